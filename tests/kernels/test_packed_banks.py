"""Banks of experts whose matrices are given packed: bitwise the results of the matrices themselves."""

import pytest
import test_fp8_experts as plain
import torch
from delayed_numbers import numbers_for
from torch import Tensor

from megakernels import fp8_experts, fp8_experts_backward
from megakernels.ops.fp8_linear.blocks import WEIGHT
from megakernels.ops.fp8_linear.delayed import delayed_of
from megakernels.ops.fp8_linear.packing import facts as packing
from megakernels.ops.fp8_linear.weights import pack_weight


def packed_of(stack: Tensor | None, scaling: str, shards: int, *, turned: bool) -> tuple[Tensor | None, Tensor | None]:
    """Matrices [E, a, b] of which each shard of rows was packed by itself, and their largest magnitudes."""
    if stack is None:
        return None, None
    count, rows, columns = stack.shape
    wide = stack.abs().float()
    of_bank = {"tensor": wide.max().view(1), "rows": wide.amax(1).flatten(), "mxfp8": None, "delayed": None}
    numbers, delayed = of_bank.get(scaling, wide.amax((1, 2))), delayed_of((*numbers_for(scaling, 1), None)[0], WEIGHT)
    packed = torch.zeros((count * rows, packing.packed_columns(columns, scaling)), dtype=torch.uint8)
    step = count * rows // shards
    for start in range(0, count * rows, step):
        place = start
        while place < start + step:
            expert = place // rows
            stop, own = min(start + step, (expert + 1) * rows), numbers
            if scaling in packing.OWN_LARGEST and numbers is not None:
                own = numbers.view(count, -1)[expert]
            how = {"turned": turned, "place": place % rows, "delayed": delayed}
            pack_weight(stack.flatten(0, 1)[place:stop], scaling, packed[place:stop], own, stack.dtype, **how)
            place = stop
    return packed, numbers


@pytest.mark.parametrize("scaling", list(packing.PACKED_ROWS))
@pytest.mark.parametrize(("gated", "kinds"), [(True, "gud"), (True, "d"), (False, "ud"), (False, "u")])
@pytest.mark.parametrize(("shards", "dtype"), [(2, torch.bfloat16), (8, torch.float32)])
def test_results_are_those_of_the_matrices(
    scaling: str, gated: bool, kinds: str, shards: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "WIDTH", 64)
    monkeypatch.setattr(plain, "HIDDEN", 128)
    given = plain.case(dtype, gated=gated, biased=True)
    keeps, each = scaling in ("tensor", "rows", "delayed"), plain.numbers_of(given, scaling)
    biases = {name: given.bank[name] for name in plain.NAMES[3:]}

    def bank(*, turned: bool) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The matrices (without elements if packed), and the packed rows."""
        places, rows, largest = list[Tensor | None](), list[Tensor | None](), list[Tensor | None]()
        for name in plain.NAMES[:3]:
            stack = given.bank[name]
            chosen = stack is not None and name[0] in kinds
            packed, numbers = packed_of(stack if chosen else None, scaling, shards, turned=turned and scaling in packing.TWO_FORMS)
            rows.append(packed)
            largest.append(numbers)
            places.append(torch.full((1,), float("nan"), dtype=dtype).expand(stack.shape) if chosen and stack is not None else stack)
        return places, [*rows, *largest]

    expected = plain.forward(given, scaling, keeps)
    matrices, packed = bank(turned=False)
    front = (given.x, given.weights, given.rows, given.counts, *matrices, given.activation)
    found = fp8_experts(*front, scaling, keeps, **biases, packed=packed, numbers=each)  # type: ignore[arg-type]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))
    kept = (expected[-2], expected[-1]) if keeps else (given.x, None)
    wanted = plain.backward(given, scaling, kept, expected)
    matrices, packed = bank(turned=True)
    of_forward = given.weights, given.rows, given.counts, expected[1] if gated else None, expected[1 + gated]
    of_backward = given.grad_y, *kept, *of_forward, *matrices, given.activation, scaling
    made = fp8_experts_backward(*of_backward, **biases, packed=packed, numbers=each)  # type: ignore[arg-type]
    assert all(map(torch.equal, made, wanted))
