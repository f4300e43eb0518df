"""Muon's symmetric products by quack-kernels: its table, and the steps with a package in plain torch in its place."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megakernels import use_libraries
from megakernels.libraries import QUACK, Loaded
from megakernels.ops.newton_schulz import quack, reference
from megakernels.ops.newton_schulz.facts import in_quack
from megakernels.ops.newton_schulz.iteration import iterate


@pytest.mark.parametrize(
    ("sizes", "scaled", "taken"),
    [
        ((4096, 14336, 2), False, True),
        ((256, 256, 2), False, True),
        ((4096, 4096, 2), True, False),
        ((4096, 4096, 4), False, False),
        ((248, 4096, 2), False, False),
        ((1028, 4096, 2), False, False),
        ((1024, 4100, 2), False, False),
    ],
)
def test_the_table(sizes: tuple[int, int, int], scaled: bool, taken: bool) -> None:
    assert in_quack(*sizes, scaled=scaled) is taken


@pytest.mark.parametrize("shape", [(2, 256, 264), (1, 768, 256)])
def test_steps_are_those_of_own_products(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Five steps in bf16: both have the same error against fp64, and products without factors use the package."""
    made: list[tuple[Any, ...]] = []

    def gemm_symmetric(a: Tensor, b: Tensor, C: Tensor | None, out: Tensor, alpha: float, beta: float) -> Tensor:
        assert a.shape[-2] == b.shape[-1] == out.shape[-1]
        made.append((tuple(a.shape), C is not None))
        wide = alpha * (a.float() @ b.float()) + (0.0 if C is None else beta * C.float())
        return out.copy_(wide.tril() + wide.tril(-1).mT)

    monkeypatch.setattr(quack, "loaded", lambda _: Loaded(SimpleNamespace(gemm_symmetric=gemm_symmetric), None))  # type: ignore[arg-type]
    monkeypatch.setattr(quack, "_is_able", lambda _: True)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    own, theirs = x.clone(), x.clone()
    iterate(own, 5, reference.product)

    def product(a: Tensor, b: Tensor, out: Tensor, **given: Any) -> None:
        scales = given.pop("scales", None)
        if quack.runs(a, out, scales, given.get("diagonal", 0.0), tall=given.get("tall", False)):
            quack.product(a, b, out, **given)
        else:
            reference.product(a, b, out, scales=scales, **given)

    iterate(theirs, 5, product)
    assert not made
    use_libraries([QUACK])
    try:
        theirs = x.clone()
        iterate(theirs, 5, product)
    finally:
        use_libraries([])
    assert len(made) >= 3
    exact = x.double()
    iterate(exact, 5, reference.product)
    assert 0 < (theirs - exact).norm() < 1.2 * (own - exact).norm()
