"""Weights that shards pack for a gather: together they are bitwise the operand that a product makes from the whole weight."""

import random
from itertools import product
from typing import Any

import pytest
import torch
from delayed_numbers import numbers_for
from rounding import Peak
from test_block_scales import made
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megakernels import fp8_input_gradients, fp8_linears, scratch_bytes
from megakernels._common import device
from megakernels.ops.fp8_linear import choice, facts, reference
from megakernels.ops.fp8_linear import op as fp8_linear
from megakernels.ops.fp8_linear.blocks import WEIGHT
from megakernels.ops.fp8_linear.delayed import delayed_of
from megakernels.ops.fp8_linear.inputs import OWN_SCALES
from megakernels.ops.fp8_linear.packing import facts as packing
from megakernels.ops.fp8_linear.weights import pack_weight

SCALINGS = pytest.mark.parametrize("scaling", list(packing.PACKED_ROWS))


def own_numbers(scaling: str) -> Tensor | None:
    return (*numbers_for(scaling, 1), None)[0]


def gathered(weight: Tensor, scaling: str, shards: int, dtype: torch.dtype, *, turned: bool) -> tuple[Tensor, Tensor | None]:
    """A weight whose equal shards were packed separately, the last of them filled with zeros, and its largest magnitude."""
    rows, columns = weight.shape
    chunk = -(-rows // shards)
    filled = torch.zeros((chunk * shards, columns), dtype=weight.dtype)
    filled[:rows] = weight
    largest = filled.to(dtype).abs().float()
    if scaling == "fp8_blockwise":
        largest = torch.stack([torch.stack([each.max() for each in part.split(128, 1)]) for part in largest[:rows].split(128)]).flatten()
    else:
        largest = largest.amax(0) if scaling == "rows" else largest.max().view(1)
    packed = torch.zeros((chunk * shards, packing.packed_columns(columns, scaling)), dtype=torch.uint8)
    for index, (shard, out) in enumerate(zip(filled.split(chunk), packed.split(chunk), strict=True)):
        own = None if scaling in OWN_SCALES else largest
        delayed = delayed_of(own_numbers(scaling), WEIGHT)
        pack_weight(shard, scaling, out, own, dtype, turned=turned, place=index * chunk, delayed=delayed)
    return packed[:rows], None if scaling in OWN_SCALES else largest


@SCALINGS
@pytest.mark.parametrize("seed", range(12))
def test_shards_make_the_operand_of_the_whole(scaling: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(seed)
    block = packing.PACKED_ROWS[scaling]
    shards, (dtype, stored) = drawn.choice([2, 3, 5]), drawn.choices([torch.bfloat16, torch.float32], k=2)
    rows = shards * 32 * drawn.randint(1, 3) - drawn.choice([0, 16 if block <= 16 else 0])
    columns = 32 * drawn.randint(1, 5) + (128 if scaling == "fp8_blockwise" else 0)
    weight = made(rows, columns, seed=seed, dtype=stored)
    weight[0] = 0
    assert packing.packs(-(-rows // shards), columns, scaling) == ((-(-rows // shards)) % block == 0)
    if not packing.packs(-(-rows // shards), columns, scaling):
        return
    if drawn.random() < 0.5:
        monkeypatch.setattr(facts, "SCALED_SLICE_ELEMENTS", 40 * columns)
    for turned in (False, True):
        packed, largest = gathered(weight, scaling, shards, dtype, turned=turned and scaling in packing.TWO_FORMS)
        numbers = own_numbers(scaling)
        found = choice.weight(packed, scaling, largest, transposed=turned, numbers=numbers)
        wanted = choice.weight(weight.to(dtype), scaling, None, transposed=turned, numbers=numbers)
        assert torch.equal(found.data.float(), wanted.data.float())
        assert found.data.stride() == wanted.data.stride()
        assert (found.scale is None) == (wanted.scale is None)
        assert found.scale is None or torch.equal(found.scale, wanted.scale)


@SCALINGS
def test_products_with_packed_weights_are_those_with_the_weights(scaling: str) -> None:
    weights = [made(rows, 64, seed=rows, dtype=torch.bfloat16) for rows in (64, 128)]
    x, bias = made(2, 9, 64, dtype=torch.bfloat16), made(128, seed=3, dtype=torch.bfloat16)
    gradients = [made(2, 9, rows, seed=rows + 1, dtype=torch.bfloat16) for rows in (64, 128)]
    forward, back = (
        [gathered(each, scaling, 2, torch.bfloat16, turned=turned and scaling in packing.TWO_FORMS) for each in weights]
        for turned in (False, True)
    )
    largest, each = [each for _, each in forward], numbers_for(scaling, 2)
    found = fp8_linears(x, None, [packed for packed, _ in forward], [None, bias], scaling, torch.bfloat16, largest, each)
    assert all(map(torch.equal, found, fp8_linears(x, None, weights, [None, bias], scaling, numbers=each)))
    mixed = [forward[0][0], weights[1]]
    assert all(map(torch.equal, fp8_linears(x, None, mixed, [None, bias], scaling, torch.bfloat16, largest, each), found))
    made_here = fp8_input_gradients(gradients, [packed for packed, _ in back], scaling, "e4m3", largest, each)
    assert torch.equal(made_here, fp8_input_gradients(gradients, weights, scaling, "e4m3", numbers=each))


@pytest.mark.parametrize(("scaling", "casts", "elements"), list(product(list(packing.PACKED_ROWS), [False, True], [1 << 22, 64 * 160])))
def test_packing_allocates_what_the_facts_say(scaling: str, casts: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "SCALED_SLICE_ELEMENTS", elements)
    shard = made(192, 160, dtype=torch.float32 if casts else torch.bfloat16)
    packed, largest = (
        torch.empty((192, packing.packed_columns(160, scaling)), dtype=torch.uint8),
        torch.ones(packing.num_largest(192, 160, scaling)),
    )
    stated, peaks = packing.packing_bytes(192, 160, scaling, 2, casts=casts), []
    given, delayed = None if scaling in OWN_SCALES else largest, delayed_of(own_numbers(scaling), WEIGHT)
    for turned in (False, True):
        with Peak((shard, packed, largest, delayed)) as counted:
            forms = turned and scaling in packing.TWO_FORMS
            pack_weight(shard, scaling, packed, given, torch.bfloat16, turned=forms, delayed=delayed)
        peaks.append(counted.peak)
    assert max(peaks) <= stated <= 1.01 * max(peaks)


@SCALINGS
def test_stated_scratch_is_what_products_with_packed_weights_allocate(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [made(rows, 160, seed=rows, dtype=torch.bfloat16) for rows in (96, 192)]
    x = made(2, 96, 160, dtype=torch.bfloat16)
    gradients = [made(2, 96, rows, seed=rows, dtype=torch.bfloat16) for rows in (96, 192)]
    packed = [gathered(each, scaling, 3, torch.bfloat16, turned=False) for each in weights]
    given, largest, numbers = [each for each, _ in packed], [each for _, each in packed], numbers_for(scaling, 2)
    monkeypatch.setitem(device._chosen, "kernels", "torch")
    monkeypatch.setattr(reference, "has_tensor_cores", lambda _: True)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: None)
    operands: list[tuple[str, tuple[Any, ...]]] = [
        ("fp8_linears", (x, None, given, [None, None], scaling, torch.bfloat16, largest, numbers, [])),
        ("fp8_input_gradients", (gradients, given, scaling, "e4m3", largest, numbers)),
    ]
    for name, values in operands:
        with Peak(values) as counted:
            results = tree_leaves(getattr(fp8_linear, f"_{name}")._init_fn(*values))
        inside = counted.peak - sum(tensor.nbytes for tensor in results)
        stated = scratch_bytes(f"megakernels.{name}.default", values)
        assert inside <= stated <= 1.01 * inside, name
