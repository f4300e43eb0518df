"""A parameter's start is a function of the seed and its name."""

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import softplus

from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Group, Init, Owner, ParamTensor
from megaplan.spec.models import Spec
from megarun.engine.initialise import fill

pytestmark = pytest.mark.runtime


def tensor(init: Init, shape: tuple[int, ...] = (100, 40)) -> ParamTensor:
    return ParamTensor("weight", shape, Owner.REPLICATED, Group.OTHER, init)


def test_rules() -> None:
    """Each rule's distribution: bounds where it has bounds, moments within five standard errors where it has moments."""
    normal, out = fill(tensor(Init.NORMAL), "a", 0, 8), fill(tensor(Init.NORMAL_OUT), "a", 0, 8)
    assert abs(float(normal.std()) / 0.02 - 1) < 5 / math.sqrt(2 * normal.numel())
    assert abs(float(normal.mean())) < 5 * 0.02 / math.sqrt(normal.numel())
    torch.testing.assert_close(out, normal / 4)
    assert bool((fill(tensor(Init.ONES), "a", 0, 8) == 1).all())
    assert bool((fill(tensor(Init.ZEROS), "a", 0, 8) == 0).all())
    a_log = fill(tensor(Init.A_LOG), "a", 0, 8).exp()
    assert 1 <= float(a_log.min()) < 1.1
    assert 15.9 < float(a_log.max()) <= 16 * (1 + 1e-6)
    dt = softplus(fill(tensor(Init.DT_BIAS), "a", 0, 8).double())
    assert 1e-3 * (1 - 1e-4) <= float(dt.min()) < 1.1e-3
    assert 0.09 < float(dt.max()) <= 0.1 * (1 + 1e-4)
    assert float(dt.log10().mean()) == pytest.approx(-2, abs=0.05)
    conv = fill(tensor(Init.CONV, (1000, 4)), "a", 0, 8)
    assert 0.49 < float(conv.max()) <= 0.5
    assert -0.5 <= float(conv.min()) < -0.49


def test_seed_and_name_decide(spec_with: Any) -> None:
    """The same seed and name give the same tensor, a different one of either another tensor; the shape is the inventory's."""
    inventory = build_inventory(Spec.model_validate(spec_with()))
    for name, item in inventory.tensors():
        first = fill(item, name, 0, 5)
        assert first.shape == item.shape
        assert torch.equal(first, fill(item, name, 0, 5))
        if item.init not in (Init.ONES, Init.ZEROS):
            assert not torch.equal(first, fill(item, name, 1, 5))
            assert not torch.equal(first, fill(item, name + "x", 0, 5))
