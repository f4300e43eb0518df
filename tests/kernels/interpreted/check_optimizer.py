"""Momentum with Nesterov update, and decay with addition."""

import pytest
import torch
from kernel_checks import TOLERANCE, shuffled_grid
from op_checks import rms_ratio
from torch import Tensor

from megakernels import adamw_, decayed_add_, nesterov_
from megakernels.ops.optimizer import reference

BF16, FP32 = torch.bfloat16, torch.float32
LAYOUTS = {
    "dense": lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype),
    "transposed": lambda shape, dtype: torch.full((*shape[:-2], shape[-1], shape[-2]), torch.nan, dtype=dtype).mT,
    "part": lambda shape, dtype: torch.full((*shape[:-2], shape[-2] + 3, shape[-1]), torch.nan, dtype=dtype)[..., 1:-2, :],
}


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


SHAPES = [(1, 1, 1), (3, 5, 7), (2, 40, 130), (33, 9)]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nesterov", "decayed_add", "adamw"):
        monkeypatch.setattr(reference, name, None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("average", "gradient", "update"), [(FP32, FP32, BF16), (BF16, FP32, FP32), (FP32, BF16, BF16)], ids=str)
def test_nesterov(average: torch.dtype, gradient: torch.dtype, update: torch.dtype, layout: str) -> None:
    """The update is the formula's divided by the kept share; every tensor of the list is moved."""
    torch.manual_seed(0)
    keep, scale = 0.95, 0.3
    momenta, gradients = ([torch.randn(shape).to(dtype) for shape in SHAPES] for dtype in (average, gradient))

    def run() -> tuple[list[Tensor], list[Tensor]]:
        moved, updates = [each.clone() for each in momenta], [LAYOUTS[layout](shape, update) for shape in SHAPES]
        nesterov_([each.view(-1) for each in moved], gradients, updates, keep, number(scale))
        return moved, updates

    moved, updates = run()
    with shuffled_grid(seed=1):
        for first, again in zip((moved, updates), run(), strict=True):
            assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    for before, given, after, found in zip(momenta, gradients, moved, updates, strict=True):
        exact = keep * before.double() + (1 - keep) * scale * given.double()
        assert rms_ratio(after, exact) < TOLERANCE[average]
        assert rms_ratio(found, exact + (1 - keep) / keep * scale * given.double()) < TOLERANCE[BF16]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("weight", "update"), [(FP32, BF16), (BF16, FP32)], ids=str)
def test_decayed_add(weight: torch.dtype, update: torch.dtype, layout: str) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(shape).to(weight) for shape in SHAPES]
    updates = [LAYOUTS[layout](shape, update).copy_(torch.randn(shape)) for shape in SHAPES]
    rate, weight_decay, factors = number(0.1), 0.7, [float(place + 1) for place in range(len(SHAPES))]
    found, again = ([each.clone() for each in weights] for _ in range(2))
    decayed_add_([each.view(-1) for each in found], updates, rate, weight_decay, factors)
    with shuffled_grid(seed=1):
        decayed_add_([each.view(-1) for each in again], updates, rate, weight_decay, factors)
    for before, change, factor, after, repeated in zip(weights, updates, factors, found, again, strict=True):
        assert rms_ratio(after, (1 - rate * weight_decay) * before.double() - rate * factor * change.double()) < TOLERANCE[weight]
        assert torch.equal(after, repeated)


def test_adamw_is_torchs() -> None:
    """Three updates by scaled gradients, which are not modified; torch's are scaled beforehand."""
    torch.manual_seed(0)
    start, scale = [torch.randn(shape) for shape in SHAPES], 0.3
    theirs = [torch.nn.Parameter(each.double()) for each in start]
    optimizer = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    weights, first, second = start, [torch.zeros_like(each) for each in start], [torch.zeros_like(each) for each in start]
    steps = [torch.zeros(()) for _ in start]
    for _ in range(3):
        gradients = [torch.randn(shape) for shape in SHAPES]
        kept = [each.clone() for each in gradients]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.double() * scale
        optimizer.step()
        with shuffled_grid(seed=1):
            numbers = {"lr": number(0.01), "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "scale": number(scale)}
            adamw_(weights, gradients, first, second, steps, **numbers)
        assert all(torch.equal(*pair) for pair in zip(gradients, kept, strict=True))
    assert all(step == 3 for step in steps)
    for mine, exact in zip(weights, theirs, strict=True):
        assert rms_ratio(mine, exact.detach()) < TOLERANCE[FP32]


def test_empty_lists_and_tensors() -> None:
    nesterov_([], [], [], 0.9, number(1.0))
    decayed_add_([], [], number(0.9), 0.1, [])
    nesterov_([torch.empty(0)], [torch.empty(0)], [torch.empty(0, 3)], 0.9, number(1.0))
    decayed_add_([torch.empty(0)], [torch.empty(0, 3)], number(0.9), 0.1, [0.1])


def test_contract() -> None:
    momenta, gradients, updates = ([torch.randn(4, 6)] for _ in range(3))
    arguments = {"nesterov_": (momenta, gradients, updates, 0.9, number(1.0)), "decayed_add_": (momenta, updates, number(0.9), 0.1, [0.1])}
    for op, given in arguments.items():
        report = torch.library.opcheck(getattr(torch.ops.megakernels, op), given)
        assert set(report.values()) == {"SUCCESS"}
