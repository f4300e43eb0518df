"""What the ledger says a bank in eight bits holds inside its operations, against what these state and keep."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megakernels import fp8_experts, scratch_bytes
from megakernels._common import device
from megaplan.hosts.megarun.scaled_experts import Bank, backward_bytes, forward_bytes

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-50")]


def drawn(seed: int) -> Bank:
    """Few tokens and many, one expert and many, so that every moment is the highest of some bank."""
    draw = random.Random(seed)
    experts = draw.choice([1, 3, 16])
    slots, gated = draw.randint(1, min(experts, 4)), draw.random() < 0.5
    widths = 16 * draw.choice([1, 3, 17]), 16 * draw.choice([1, 3, 17])
    flags = gated, draw.random() < 0.5, draw.choice([2, 4]), draw.random() < 0.5, draw.random() < 0.7, draw.random() < 0.5
    return Bank(draw.choice([0, 1, 50, 700]), slots, experts, *widths, *flags)


@pytest.mark.parametrize("seed", range(40))
def test_inside_is_what_the_operations_state(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = drawn(seed)
    monkeypatch.setitem(device._chosen, "kernels", "triton" if bank.fused else "reference")
    dtype, scaling = {2: torch.bfloat16, 4: torch.float32}[bank.size], "rows" if bank.by_row else "tensor"
    with FakeTensorMode():

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype)

        up, down = empty(bank.experts, bank.width, bank.hidden), empty(bank.experts, bank.hidden, bank.width)
        gate = torch.empty_like(up) if bank.gated else None
        inner, outer = empty(bank.experts, bank.width), empty(bank.experts, bank.hidden)
        biases = {"gate_bias": inner if bank.gated else None, "up_bias": inner, "down_bias": outer} if bank.bias else {}
        x, weights = empty(bank.tokens, bank.hidden), torch.empty(bank.tokens, bank.slots)
        rows, counts = torch.empty(bank.rows, dtype=torch.int32), torch.empty(bank.experts, dtype=torch.int32)
        front = (weights, rows, counts, gate, up, down, "swiglu" if bank.gated else "relu2", scaling)
        made = fp8_experts(x, *front, bank.keeps, **biases)  # type: ignore[arg-type]
        rest: tuple[Any, ...] = tuple(biases.get(name) for name in ("gate_bias", "up_bias", "down_bias"))
        assert forward_bytes(bank) == scratch_bytes("megakernels.fp8_experts.default", (x, *front, bank.keeps, *rest, None))
        kept = (made[-2], made[-1]) if bank.keeps else (x, None)
        if bank.keeps:
            assert tuple(made[-2].shape) == bank.kept_shape
        outs = (made[1] if bank.gated else None, made[1 + bank.gated])
        operands = (x, *kept, weights, rows, counts, *outs, *front[3:], *rest, None)
        assert backward_bytes(bank) == scratch_bytes("megakernels.fp8_experts_backward.default", operands)
