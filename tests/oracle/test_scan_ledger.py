"""Scratch of the kernels of attention and scans: the ledger has what the operations state for the operands of a block."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megakernels import scratch_bytes, use_kernels
from megakernels.facts import KernelScratch
from megakernels.ops.gated_delta import facts as delta_facts
from megakernels.ops.mamba3 import facts as trapezoidal_facts
from megaplan.blocks.ops import Dims
from megaplan.blocks.storages import num_lanes
from megaplan.dtypes import DType
from megaplan.families.attention.composition import core_inside, indexed_inside
from megaplan.families.attention.variants import PLAIN
from megaplan.families.linear_attention.program import delta_inside
from megaplan.families.mamba.mamba1_program import selective_inside
from megaplan.families.mamba.program import scan_inside
from megaplan.families.recurrent.program import recurrence_inside
from megaplan.hosts.megarun.ledger import block_bytes
from megaplan.inventory.build import build_inventory
from megaplan.spec.local import local_dims
from megaplan.spec.models import (
    GatedDeltaNet,
    GroupedQueryAttention,
    Indexer,
    KimiDeltaAttention,
    LatentAttention,
    Mamba1,
    Mamba2,
    Mamba3,
    MatrixRecurrence,
    Spec,
)
from megarun.dtypes import TORCH_DTYPES
from megarun.parallel.groups.relay import half, lane_slice
from megarun.parallel.groups.relay_mamba3 import _own
from megarun.parallel.groups.relay_scans import DELTA, M2RNN, SELECTIVE, SSD

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-50")]
WIDTHS = (1, 2, 5, 16, 20, 64, 65, 100, 128, 129)


def empty(dtype: DType, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta")


def sizes(seed: int) -> tuple[random.Random, Dims, DType]:
    """Local sizes, and the dtype of parameters."""
    draw = random.Random(seed)
    dtype, cp = draw.choice([DType.BF16, DType.BF16, DType.FP16, DType.FP32]), draw.choice([1, 1, 2, 4])
    tokens, batch = 2 * draw.choice([1, 2, 7, 32, 65, 300, 4096]), draw.choice([1, 2, 3])
    dims = Dims(batch, tokens, tokens, 64, 1, cp, dtype, packed=draw.random() < 0.5)
    return draw, dims, dtype if draw.random() < 0.7 else DType.FP32


NO_LIMITS = 0.0, math.inf
"""Limits of Mamba-2's steps."""


def starts_of(dims: Dims) -> Tensor | None:
    return empty(DType.INT32, dims.batch, dims.tokens) if dims.packed else None


def stated(name: str, operands: tuple[Any, ...]) -> int:
    """The default of a process that has built no trainer yet, whatever another test has built."""
    use_kernels("triton")
    return scratch_bytes(f"megakernels.{name}.default", operands)


def expected(found: KernelScratch | None) -> tuple[int, int]:
    return (0, 0) if found is None else (found.forward, found.backward)


def of_lanes(
    name: str,
    dims: Dims,
    lanes: int,
    part: Callable[[Any, int, int, int], list[Tensor]],
    inputs: list[Tensor],
    settings: tuple[Any, ...],
    states: Tensor,
    y: Tensor,
) -> set[tuple[int, int]]:
    """Stated bytes of each piece and lane, forward and backward."""
    found, gradients, starts = set(), [torch.empty_like(each) for each in inputs], starts_of(dims)
    for place in range(2):
        for lane in range(lanes):
            heads = lane_slice(y.shape[2], lane, lanes)
            own, starts_here = part(inputs, place, lane, lanes), None if starts is None else half(starts, place)
            made, at = half(y, place)[:, :, heads], half(states, place)[:, :, heads]
            last = empty(DType.FP32, dims.batch, *at.shape[2:])
            forward = stated(f"{name}_piece", (last, *own, starts_here, *settings, made, at))
            behind = (last, made, *own, starts_here, at, *settings, *part(gradients, place, lane, lanes))
            found.add((forward, stated(f"{name}_piece_backward", behind)))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_the_ledger_of_attention_has_what_the_operation_states(seed: int) -> None:
    draw, dims, _ = sizes(seed)
    groups, width, value_width = draw.choice([1, 2, 3]), draw.choice((*WIDTHS, 256, 257)), draw.choice((*WIDTHS, 256, 257))
    heads, pieces = groups * draw.choice([1, 2, 5]), [piece for rank in range(dims.cp) for piece in (rank, 2 * dims.cp - 1 - rank)]
    keys, more = (dims.batch, dims.tokens * dims.cp, groups), random.Random(seed + 1000)
    sinks = empty(dims.dtype, heads) if more.random() < 0.3 else None
    cap, num_relations = more.choice([None, None, 2.0]), more.choice([0, 0, 5])
    bias = (empty(DType.INT32, *keys[:2]), empty(dims.dtype, num_relations, heads)) if num_relations else (None, None)
    value_width = value_width if sinks is None and cap is None else width
    q, k, v = empty(dims.dtype, *dims.wide(heads, width)), empty(dims.dtype, *keys, width), empty(dims.dtype, *keys, value_width)
    out, lse = empty(dims.dtype, *dims.wide(heads, value_width)), empty(DType.FP32, dims.batch, heads, dims.tokens)
    name, own = ("attention", []) if dims.cp == 1 else ("attention_pieces", [pieces[-2:], pieces])
    operands, settings = (q, k, v, starts_of(dims)), (0.3, None)
    needs = [] if own else [[*[True] * 3, sinks is not None, num_relations > 0]]
    behind = stated(f"{name}_backward", (out, *operands, sinks, *bias, out, lse, *settings, cap, True, *own, *needs))
    if sinks is None and cap is None:
        section: Any = LatentAttention.model_construct(num_heads=heads, qk_nope_head_dim=width, qk_rope_head_dim=0, v_head_dim=value_width)
    else:
        section = GroupedQueryAttention.model_construct(
            num_heads=heads, num_kv_heads=groups, head_dim=width, score_cap=cap, sinks=sinks is not None
        )
    local = dims._replace(kernels=True, relations=num_relations)
    assert (stated(name, (*operands, *settings, sinks, *bias, cap, True, *own)), behind) == expected(
        core_inside(local, section, PLAIN, dims.dtype)
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_ledger_of_indexed_attention_has_what_the_operation_states(seed: int) -> None:
    draw, dims, parameters = sizes(seed)
    heads, width, value_width = draw.choice([1, 2, 5]), draw.choice((*WIDTHS, 256, 257)), draw.choice((*WIDTHS, 256))
    index_heads, index_width, length = draw.choice([1, 2, 8, 64]), draw.choice(WIDTHS), dims.tokens * dims.cp
    pieces = [piece for rank in range(dims.cp) for piece in (rank, 2 * dims.cp - 1 - rank)]
    q, index_q = empty(dims.dtype, *dims.wide(heads, width)), empty(dims.dtype, *dims.wide(index_heads, index_width))
    k, v = (empty(dims.dtype, dims.batch, length, heads, each) for each in (width, value_width))
    index_k, weights = empty(dims.dtype, *dims.wide(index_width)), empty(dims.dtype, *dims.wide(index_heads))
    scale, bias = (empty(parameters, index_width) for _ in range(2))
    table = [empty(DType.FP32, dims.tokens, index_width // 2) for _ in range(2)]
    out, lse = empty(dims.dtype, *dims.wide(heads, value_width)), empty(DType.FP32, dims.batch, heads, dims.tokens)
    made = out, lse, *(empty(DType.FP32, dims.batch, dims.tokens) for _ in range(2))
    sinks = empty(parameters, heads) if random.Random(seed + 1000).random() < 0.5 else None
    if dims.cp == 1:
        given = q, k, v, index_q, index_k, weights, scale, bias, *table, starts_of(dims)
        forward = stated("indexed_attention", (*given, 0.3, 4, 1.0, 1e-5, None, sinks))
        backward = stated(
            "indexed_attention_backward", (out, *given, sinks, *made, 0.3, 4, 1.0, 1e-5, None, [*[True] * 8, sinks is not None])
        )
    else:
        given, numbers = (q, k, v, index_q, empty(DType.FP32, dims.batch, length, index_width), weights), (0.3, 4, 1.0, None)
        forward = stated("indexed_attention_pieces", (*given, *table, starts_of(dims), *numbers, sinks, pieces[-2:], pieces))
        behind = (out, *given, *table, starts_of(dims), sinks, *made, *numbers, pieces[-2:], pieces)
        backward = stated("indexed_attention_pieces_backward", behind)
    indexer = Indexer.model_construct(num_heads=index_heads, head_dim=index_width)
    section = LatentAttention.model_construct(
        num_heads=heads, qk_nope_head_dim=width, qk_rope_head_dim=0, v_head_dim=value_width, indexer=indexer, sinks=sinks is not None
    )
    found = indexed_inside(dims._replace(kernels=True), section, parameters)
    assert (forward, backward) == expected(found)


FEW_TOKENS = 1197
"""A seed of so few tokens beside heads that the gradients of parameters decide."""


@pytest.mark.parametrize("seed", [*range(120), FEW_TOKENS])
def test_the_ledger_of_a_scan_has_what_the_operation_states(seed: int) -> None:
    draw, dims, parameters = sizes(seed)
    groups = draw.choice([1, 2, 3, 8])
    heads, width, state = groups * draw.choice([1, 2, 10]), draw.choice(WIDTHS), draw.choice(WIDTHS)
    mamba = Mamba2(kind="mamba2", head_dim=width, state_dim=state, num_groups=groups, chunk_size=draw.choice([1, 3, 16, 40, 128, 256]))
    x, dt = (empty(dims.dtype, *dims.wide(heads, *rest)) for rest in ((width,), ()))
    B, C = (empty(dims.dtype, *dims.wide(groups, state)) for _ in range(2))
    A_log, D, dt_bias = (empty(parameters, heads) for _ in range(3))
    inputs, chunk_size = [x, dt, A_log, B, C, D, dt_bias], mamba.chunk_size
    wanted = expected(scan_inside(dims, mamba, heads, groups, parameters))
    if dims.cp > 1:
        states = empty(dims.dtype, dims.batch, 2 * -(-dims.tokens // 2 // chunk_size), heads, width, state)
        assert of_lanes("ssd", dims, num_lanes(groups, dims.cp), SSD.part, inputs, (chunk_size, *NO_LIMITS), states, x) == {wanted}
        return
    states, starts = empty(dims.dtype, dims.batch, -(-dims.tokens // chunk_size), heads, width, state), starts_of(dims)
    forward = stated("ssd", (*inputs, starts, chunk_size, *NO_LIMITS))
    assert (forward, stated("ssd_backward", (x, *inputs, starts, states, chunk_size, *NO_LIMITS, [True] * 7))) == wanted


@pytest.mark.parametrize("seed", range(120))
def test_the_ledger_of_a_selective_scan_has_what_the_operation_states(seed: int) -> None:
    draw, dims, parameters = sizes(seed)
    channels, width, every = (
        draw.choice([1, 3, 8, 33, 128, 300, 1024]),
        draw.choice([1, 3, 8, 16, 16, 17]),
        draw.choice([1, 3, 16, 64, 200]),
    )
    mamba = Mamba1(kind="mamba1", state_dim=width, save_every=every)
    x, B = empty(dims.dtype, *dims.wide(channels)), empty(dims.dtype, *dims.wide(width))
    inputs = [x, x, empty(parameters, channels, width), B, B, empty(parameters, channels), empty(parameters, channels)]
    wanted = expected(selective_inside(dims, mamba, channels, parameters))
    if dims.cp > 1:
        states = empty(DType.FP32, dims.batch, 2 * -(-dims.tokens // 2 // every), channels, width)
        assert of_lanes("selective_scan", dims, num_lanes(channels, dims.cp), SELECTIVE.part, inputs, (every,), states, x) == {wanted}
        return
    states, starts = empty(DType.FP32, dims.batch, -(-dims.tokens // every), channels, width), starts_of(dims)
    forward = stated("selective_scan", (*inputs, starts, every))
    assert (forward, stated("selective_scan_backward", (x, *inputs, starts, states, every, [True] * 7))) == wanted


@pytest.mark.parametrize("seed", range(120))
def test_the_ledger_of_a_trapezoidal_scan_has_what_the_operation_states(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trapezoidal_facts, "STATES_BYTES", 2 ** (18 if seed % 2 else 30))  # also fewer segments at once than there are
    draw, dims, parameters = sizes(seed)
    groups, rank = draw.choice([1, 2, 3, 8]), draw.choice([1, 2, 3, 4, 4, 5])
    heads, width, state = groups * draw.choice([1, 2, 10, 34]), draw.choice((1, 5, 16, 32, 64, 65)), draw.choice((1, 2, 7, 32, 128, 129))
    every, num_angles = draw.choice([1, 3, 16, 40, 256]), draw.choice([0, 1, state // 2])
    mamba = Mamba3(
        kind="mamba3",
        head_dim=width,
        state_dim=state,
        num_groups=groups,
        mimo_rank=rank,
        num_angles=num_angles,
        chunk_size=draw.choice([None, 1, 16, 24]),
        save_every=every,
    )
    x, dt = (empty(dims.dtype, *dims.wide(heads, *rest)) for rest in ((width,), ()))
    B = empty(dims.dtype, *dims.wide(rank, groups, state))
    angles = empty(dims.dtype, *dims.wide(num_angles)) if num_angles else None
    mimo = empty(parameters, heads, rank, width) if rank > 1 else None
    bias, per_head = empty(parameters, heads, rank, state), empty(parameters, heads)
    inputs = [x, x, B, B, dt, dt, dt, angles, bias, bias, per_head, per_head, mimo, mimo, mimo]
    settings, starts = (mamba.chunk_positions, every, False), starts_of(dims)
    wanted = expected(scan_inside(dims, mamba, heads, groups, parameters))
    pieces = 2 if dims.cp > 1 else 1
    saved = (dims.batch, pieces * -(-dims.tokens // pieces // every), heads)
    states, phases = empty(dims.dtype, *saved, width, state), empty(DType.FP32, *saved, num_angles)
    if dims.cp == 1:
        forward = stated("mamba3", (*inputs, starts, *settings))
        assert (forward, stated("mamba3_backward", (x, *inputs, starts, states, phases, *settings, [True] * 15))) == wanted
        return
    lanes, ahead = num_lanes(groups, dims.cp), empty(DType.FP32, dims.batch, 2, heads)
    for place in range(2):
        for lane in range(lanes):
            part = lane_slice(heads, lane, lanes)
            own, starts_here = _own(inputs, place, lane, lanes), None if starts is None else half(starts, place)
            made = [half(each, place)[:, :, part] for each in (x, states, phases)]
            carried, share = empty(DType.FP32, dims.batch, heads // lanes, width * state + num_angles), ahead[:, place, part]
            forward = stated("mamba3_piece", (carried, *own, starts_here, share, *settings, *made))
            behind = (carried, made[0], *own, starts_here, share, *made[1:], *settings, *own, share)
            assert (forward, stated("mamba3_piece_backward", behind)) == wanted


@pytest.mark.parametrize("seed", range(120))
def test_the_ledger_of_a_delta_rule_has_what_the_operation_states(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_facts, "PART_BYTES", 2 ** (18 if seed % 2 else 29))  # also fewer segments at once than there are
    draw, dims, parameters = sizes(seed)
    per_row, key_heads, keys = draw.random() < 0.5, draw.choice([1, 2, 3, 8]), draw.choice(WIDTHS)
    heads, values = (key_heads, keys) if per_row else (key_heads * draw.choice([1, 2, 10]), draw.choice((*WIDTHS, 256, 257)))
    chunk_size, every = draw.choice([1, 16, 40, 64, 256]), draw.choice([1, 3, 16, 40, 256])
    common = {"chunk_size": chunk_size, "save_every": every}
    linear = (
        KimiDeltaAttention(kind="kda", num_heads=heads, head_dim=keys, **common)
        if per_row
        else GatedDeltaNet(kind="gated_delta", num_key_heads=key_heads, num_value_heads=heads, key_dim=keys, value_dim=values, **common)
    )
    q, k = (empty(dims.dtype, *dims.wide(key_heads, keys)) for _ in range(2))
    rows = (keys,) if per_row else ()
    v, decay, beta = (empty(dims.dtype, *dims.wide(heads, *rest)) for rest in ((values,), rows, ()))
    inputs = [q, k, v, decay, beta, empty(parameters, heads), empty(parameters, heads, *rows)]
    wanted = expected(delta_inside(dims, linear, heads, key_heads, parameters))
    settings = chunk_size, every, 1.0
    if dims.cp > 1:
        states = empty(DType.FP32, dims.batch, 2 * -(-dims.tokens // 2 // every), heads, keys, values)
        lanes = num_lanes(key_heads, dims.cp)
        assert of_lanes("gated_delta", dims, lanes, DELTA.part, inputs, settings, states, v) == {wanted}
        return
    states, starts = empty(DType.FP32, dims.batch, -(-dims.tokens // every), heads, keys, values), starts_of(dims)
    forward = stated("gated_delta", (*inputs, starts, *settings))
    assert (forward, stated("gated_delta_backward", (v, *inputs, starts, states, *settings, [True] * 7))) == wanted


@pytest.mark.parametrize("seed", range(120))
def test_the_ledger_of_a_recurrence_has_what_the_operation_states(seed: int) -> None:
    draw, dims, parameters = sizes(seed)
    heads, keys, values = draw.choice([1, 3, 8, 32]), draw.choice(WIDTHS), draw.choice([1, 2, 5, 16, 16, 17])
    every = draw.choice([1, 3, 16, 64, 200])
    recurrent = MatrixRecurrence(kind="m2rnn", num_heads=heads, key_dim=keys, value_dim=values, save_every=every)
    q, k = (empty(dims.dtype, *dims.wide(keys)) for _ in range(2))
    v, f = (empty(dims.dtype, *dims.wide(heads, *rest)) for rest in ((values,), ()))
    inputs = [q, k, v, f, *(empty(parameters, *shape) for shape in ((heads, values, values), (heads, values), (heads,), (heads,)))]
    wanted = expected(recurrence_inside(dims, recurrent, heads, parameters))
    if dims.cp > 1:
        states = empty(DType.FP32, dims.batch, 2 * (-(-dims.tokens // 2 // every) + 1), heads, keys, values)
        assert of_lanes("m2rnn", dims, num_lanes(heads, dims.cp), M2RNN.part, inputs, (every,), states, v) == {wanted}
        return
    states, starts = empty(DType.FP32, dims.batch, -(-dims.tokens // every) + 1, heads, keys, values), starts_of(dims)
    forward = stated("m2rnn", (*inputs, starts, every))
    assert (forward, stated("m2rnn_backward", (v, *inputs, starts, states, every, [True] * 8))) == wanted


SECTIONS: dict[str, Any] = {
    "A": {"attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}},
    "M": {"mamba": {"kind": "mamba2", "num_heads": 8, "head_dim": 16, "state_dim": 32, "num_groups": 2, "chunk_size": 16}},
    "M1": {"mamba": {"kind": "mamba1", "save_every": 32}},
    "M3": {
        "mamba": {"kind": "mamba3", "head_dim": 16, "state_dim": 32, "num_groups": 2, "mimo_rank": 4, "num_angles": 8, "save_every": 32}
    },
    "G": {
        "linear_attention": {
            "kind": "gated_delta",
            "num_key_heads": 4,
            "num_value_heads": 8,
            "key_dim": 16,
            "value_dim": 8,
            "save_every": 32,
        }
    },
    "G2": {"linear_attention": {"kind": "kda", "num_heads": 4, "head_dim": 16, "save_every": 32}},
    "R": {"recurrent": {"kind": "m2rnn", "num_heads": 4, "key_dim": 16, "value_dim": 8, "save_every": 8}},
}


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("family", list(SECTIONS))
def test_only_with_triton_is_it_in_the_working_set(family: str, cp: int) -> None:
    """There it raises the peak of backward, and what is kept is the same."""
    peaks, kept = [], []
    for kernels in ("reference", "triton"):
        spec = Spec.model_validate(
            {
                "format": "megaplan.spec/1",
                "name": family,
                "model": {"pattern": family[0], "num_layers": 2, "hidden_size": 32, "vocab_size": 64, **SECTIONS[family]},
                "mesh": {"cp": cp},
                "batch": {"micro_batch_size": 2, "seq_length": 256},
                "host": {"kernels": kernels},
            }
        )
        sums = block_bytes(spec, local_dims(spec), "layers.0", build_inventory(spec).layers[0])
        peaks.append(sums.backward_bytes)
        kept.append(sums.saved)
    assert peaks[0] < peaks[1]
    assert kept[0] == kept[1]
