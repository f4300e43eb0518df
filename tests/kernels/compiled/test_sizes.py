"""Triton compiles the launches of any size: every `arange` is of a power of two, and a size of 1 may be a constant, as the launcher has it.

Operations run their launching code at drawn sizes; nothing is computed, and each launch goes through Triton's frontend.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from delayed_numbers import numbers_for
from kernel_checks import run
from launches import Launch, Lost, first_ir, launches_to, watched_loops
from op_cases import CASES
from op_makers import Case, plan
from test_carries import OPERATIONS, configurations_of
from torch import Tensor

import megakernels
import megakernels._common.tiles  # imported before a test has kernels chosen: they are compiled, not interpreted
from megakernels._common import device
from megakernels.ops.indexed_attention.facts import difference_constants, select_constants
from megakernels.ops.moe import grouped
from megakernels.ops.packed_weight.facts import Packing

pytestmark = pytest.mark.jobs

BY_NAME = {case.name: case for case in CASES}
ELEMENTS = 1 << 19
"""Positions times the largest size, at most."""
WIDE: dict[str, dict[int, tuple[int, int]]] = {
    **{name: {37: (1, 9000)} for name in ("rms_norm", "add_rms_norm")},
    **{name: {21: (1, 9000)} for name in ("swiglu", "geglu", "relu2glu", "relu2", "gelu", "xielu")},
    **{name: {11: (1, 3000)} for name in ("causal_conv1d", "causal_conv1d_initial", "causal_conv1d_packed", "gated_conv1d")},
    **{name: {12: (1, 64), 5: (1, 64)} for name in ("attention", "attention_window")},
    **{name: {5: (1, 64), 7: (1, 64)} for name in ("attention_grouped_unequal", "attention_grouped_unequal_packed")},
    **{name: {6: (1, 64), 5: (1, 64)} for name in ("chosen_attention", "chosen_attention_packed", "chosen_attention_sinks")},
    **{
        name: {6: (1, 64), 5: (1, 64), 8: (6, 128)}
        for name in ("indexed_attention", "indexed_attention_packed", "indexed_attention_window", "indexed_attention_sinks")
    },
    **{name: {5: (1, 32), 7: (1, 32)} for name in ("ssd", "ssd_packed", "ssd_one_group_small_chunks")},
    **{name: {5: (1, 128), 6: (1, 16)} for name in ("m2rnn", "m2rnn_packed")},
    **{name: {5: (1, 600), 3: (1, 16)} for name in ("selective_scan", "selective_scan_packed")},
    **{name: {5: (1, 64), 6: (1, 64)} for name in ("gated_delta", "gated_delta_rows", "gated_delta_rows_packed")},
    **{name: {5: (1, 32), 7: (4, 32)} for name in ("mamba3", "mamba3_single", "mamba3_single_unrotated", "mamba3_packed")},
    **{name: {13: (1, 4000)} for name in ("head_gated_norm_sigmoid_False", "head_gated_norm_sigmoid_True")},
    **{name: {9: (1, 5000)} for name in ("dispatch", "combine")},
    **{name: {16: (1, 300), 24: (1, 300)} for name in ("routed_experts_swiglu_16x24",)},
    **{"routed_experts_gelu_5x6": {6: (1, 300)}, "route_normalize_True": {9: (1, 3000), 6: (3, 300)}, "gated_add": {7: (1, 3000)}},
    **{"rope": {10: (6, 300)}, "mla_kv": {11: (5, 300)}, "cross_entropy": {23: (23, 9000)}, "linear_cross_entropy": {12: (1, 300)}},
}
"""Drawn sizes that replace a case's, each with its minimum and maximum; kernels support them in both dtypes."""


class Positions(int):
    """A number of positions, which no other size of a case is taken for."""


def size(draw: random.Random, least: int, most: int) -> int:
    """Small and large numbers, and numbers around powers of two."""
    free = round(math.exp(draw.uniform(math.log(least), math.log(most))))
    near = (1 << draw.randrange(most.bit_length())) + draw.choice([-1, 0, 1])
    return min(most, max(least, draw.choice([least, free, free, near])))


def resized(case: Case, sizes: dict[int, int]) -> Case:
    def inputs(normal: Callable[..., Tensor], num_positions: int) -> dict[str, Tensor]:
        def own(*shape: int) -> Tensor:
            return normal(*(side if isinstance(side, Positions) else sizes.get(side, side) for side in shape))

        return case.inputs(own, Positions(num_positions))

    return replace(case, inputs=inputs)


def run_case(name: str, draw: random.Random) -> None:
    sizes = {side: size(draw, *limits) for side, limits in WIDE[name].items()}
    case = resized(BY_NAME[name], sizes)
    positions = size(draw, 1, max(1, min(3000, ELEMENTS // max(sizes.values()))))
    run(case, case.make(positions, draw.choice([torch.float32, torch.bfloat16])))


def run_fp8_linears(draw: random.Random) -> None:
    rows, width, outputs = (16 * size(draw, 1, most) for most in (60, 40, 40))
    x, weight, grad = (torch.zeros(shape).bfloat16() for shape in ((rows, width), (outputs, width), (rows, outputs)))
    for scaling in (draw.choice(["tensor", "rows"]), "delayed"):
        numbers = numbers_for(scaling, 1)
        megakernels.fp8_linears(x, None, [weight], [None], scaling, numbers=numbers)
        megakernels.fp8_input_gradients([grad], [weight], scaling, "e5m2", numbers=numbers)
        kept = megakernels.fp8_quantize(x, "columns" if scaling == "rows" else scaling, *numbers)
        megakernels.fp8_weight_gradients([grad], *kept, width, scaling, "e5m2", [True], numbers)


def run_newton_schulz(draw: random.Random) -> None:
    rows, cols = size(draw, 1, 700), size(draw, 1, 700)
    x = torch.zeros(size(draw, 1, 4), rows, cols, dtype=draw.choice([torch.float32, torch.bfloat16, torch.float16]))
    megakernels.newton_schulz_(x, 5)
    megakernels.newton_schulz_(torch.zeros(1, 8 * draw.randint(32, 60), 64 * draw.randint(9, 20)).bfloat16(), 5)


def run_updates(draw: random.Random) -> None:
    shape, dtypes = (size(draw, 1, 4), size(draw, 1, 700), size(draw, 1, 700)), (torch.float32, torch.bfloat16)
    average, gradient, weight, first, second = (torch.zeros(shape, dtype=draw.choice(dtypes)) for _ in range(5))
    update = torch.zeros(shape).bfloat16() if draw.random() < 0.5 else torch.zeros(shape[0], shape[2], shape[1]).mT
    number = torch.zeros((), dtype=torch.float64)
    megakernels.nesterov_([average], [gradient], [update], 0.95, number)
    megakernels.decayed_add_([weight], [update], number, 0.1, [0.1])
    averages = [first], [second], [torch.zeros(())]
    megakernels.adamw_([weight], [gradient], *averages, lr=number, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, scale=number)


def run_ngram_rows(draw: random.Random) -> None:
    batch, positions = size(draw, 1, 4), size(draw, 1, 3000)
    tokens, before = torch.zeros(batch, positions, dtype=torch.int64), torch.zeros(batch, size(draw, 1, 5), positions, dtype=torch.int64)
    megakernels.ngram_rows(tokens, before, size(draw, 1, 40), size(draw, 40, 10**6))


def run_router(draw: random.Random) -> None:
    tokens, experts, top_k = size(draw, 1, 3000), size(draw, 4, 300), draw.randint(1, 4)
    x, weight = (torch.zeros(rows, 40, requires_grad=True) for rows in (tokens, experts))
    found = megakernels.route_scored(x, weight, top_k, True, 1, sigmoid=draw.random() < 0.5)
    weights, _, probs, log_sums, _ = found
    weighted, _ = megakernels.router_losses(weights, probs, log_sums, torch.zeros(1, experts, dtype=torch.int32), 0.1, 0.1)
    weighted.sum().backward()
    megakernels.dispatch_plan(torch.zeros(tokens, top_k, dtype=torch.int32), experts)
    megakernels.arrival_plan(plan(tokens)["counts"].view(1, -1), 2 * tokens)


def run_bent_attention(draw: random.Random) -> None:
    positions, groups, shared, width = size(draw, 1, 700), draw.randint(1, 2), draw.randint(1, 3), size(draw, 1, 64)
    dtype, classes = draw.choice([torch.float32, torch.bfloat16]), torch.zeros(1, positions, dtype=torch.int32)
    q, k, v = (torch.zeros(1, positions, heads, width, dtype=dtype, requires_grad=True) for heads in (groups * shared, groups, groups))
    relations = torch.zeros(size(draw, 1, 40), groups * shared, dtype=dtype, requires_grad=True)
    cap = draw.choice([None, 30.0])
    megakernels.attention(q, k, v, 0.3, classes=classes, relations=relations, cap=cap).sum().backward()


def run_capped_attention(draw: random.Random) -> None:
    """Rows whose backward stores its scores."""
    positions, groups, width = draw.randint(400, 900), draw.randint(1, 2), 16 * draw.randint(1, 4)
    heads = groups, groups, groups * draw.randint(1, 3)
    k, v, q = (torch.zeros(1, positions, each, width, dtype=torch.bfloat16, requires_grad=True) for each in heads)
    megakernels.attention(q, k, v, 0.3, window=draw.choice([None, 100]), cap=30.0).sum().backward()


def run_experts_with_biases(draw: random.Random) -> None:
    tokens, hidden, width = size(draw, 1, 700), 16 * size(draw, 1, 20), 16 * size(draw, 1, 20)
    x, weights, dtype = torch.zeros(tokens, hidden).bfloat16(), torch.zeros(tokens, 2), torch.bfloat16
    routing = plan(tokens)
    count, scaling = len(routing["counts"]), draw.choice(["tensor", "rows"])
    shapes = ((width, hidden), (width, hidden), (hidden, width), (width,), (width,), (hidden,))
    gate, up, down, *biases = (torch.zeros(count, *shape, dtype=dtype, requires_grad=True) for shape in shapes)
    names = dict(zip(("gate_bias", "up_bias", "down_bias"), biases, strict=True))
    banks = gate, up, down, "swiglu"
    megakernels.routed_experts(x, weights, routing["rows"], routing["counts"], *banks, **names).sum().backward()
    with torch.no_grad():
        _, gate_out, up_out, low, scales = megakernels.fp8_experts(x, weights, *routing.values(), *banks, scaling, True, **names)
        rest = low, scales, weights, *routing.values(), gate_out, up_out
        megakernels.fp8_experts_backward(torch.zeros_like(x), *rest, *banks, scaling, **names)


def run_packed_rows(draw: random.Random) -> None:
    rows, columns = size(draw, 1, 40), size(draw, 1, 3000)
    packing = Packing(draw.choice(["nf4", "int8"]), draw.choice([4, 20, 64]), draw.random() < 0.5)
    packed = torch.zeros(rows, packing.row_bytes(columns), dtype=torch.uint8)
    megakernels.unpacked(packed, columns, packing, draw.choice([torch.float32, torch.bfloat16, torch.float16]))


EXTRA = {
    run.__name__: run
    for run in (
        *(run_fp8_linears, run_newton_schulz, run_updates, run_ngram_rows),
        *(run_router, run_bent_attention, run_capped_attention, run_experts_with_biases, run_packed_rows),
    )
}
RUNS: dict[str, Callable[[random.Random], None]] = {**{name: lambda draw, name=name: run_case(name, draw) for name in WIDE}, **EXTRA}


@contextmanager
def launches_of(names: set[str], *, compiles: bool) -> Iterator[None]:
    """Context in which operations choose their kernels for CPU tensors, and compute nothing."""
    lost: set[Lost] = set()

    def taken(launch: Launch) -> None:
        key = f"{launch.source.fn.__name__} {launch.source.signature} {launch.source.constants}"
        names.add(launch.source.fn.__name__)
        if compiles and key not in SEEN:
            with watched_loops(lost, set()):
                first_ir(launch.source, launch.options)
            SEEN.add(key)

    with pytest.MonkeyPatch.context() as patch, launches_to(taken):
        patch.setattr(device, "INTERPRETED", True)
        patch.setattr(grouped, "sizes_of", lambda counts, num_rows: [num_rows, *[0] * (len(counts) - 1)])  # nothing has counted them
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        yield
    assert lost == set()


@pytest.fixture
def compiled() -> Iterator[set[str]]:
    """The names of the kernels whose launches went through the frontend, which raises if one cannot be compiled."""
    names: set[str] = set()
    with launches_of(names, compiles=True):
        yield names


SEEN: set[str] = set()
LONG = ("mamba3", "mamba3_single")
"""Not in CI: `mamba3_packed` and `mamba3_single_unrotated` launch the same kernels."""


@pytest.mark.parametrize("name", [name for name in RUNS if name not in LONG])
def test_launches_of_a_drawn_size_compile(name: str, compiled: set[str]) -> None:
    RUNS[name](random.Random(name))
    assert compiled


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_launches_of_many_sizes_compile(name: str, compiled: set[str]) -> None:
    for seed in range(8):
        RUNS[name](random.Random(f"{name} {seed}"))


@pytest.mark.parametrize("num_keys", [1, 128, 129, 257, 384, 513, 1025])
def test_indexed_attention_compiles_at_any_number_of_keys(num_keys: int, compiled: set[str]) -> None:
    case = BY_NAME["indexed_attention"]
    run(case, case.make(num_keys, torch.bfloat16))
    assert {"index_select_kernel", "index_difference_kernel"} <= compiled


def test_blocks_of_keys_are_powers_of_two() -> None:
    for num_keys in range(1, 20_000):
        numbers: list[Any] = [difference_constants(num_keys)["BLOCK"], *(select_constants(num_keys)[0][name] for name in ("R", "BLOCK"))]
        assert all(number & (number - 1) == 0 for number in numbers), num_keys


def test_all_kernels_are_launched() -> None:
    launched: set[str] = set()
    with launches_of(launched, compiles=False):
        for name, each in RUNS.items():
            for seed in range(2):
                each(random.Random(f"{name} {seed}"))
    every = {configuration[0].__name__ for operation in OPERATIONS for configuration in configurations_of(operation)}
    assert every - launched == {"mamba3_last_phase_kernel"}  # which pieces of a sequence alone have
