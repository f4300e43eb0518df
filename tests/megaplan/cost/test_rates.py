"""Rates of a device: which part of its peak a product of linears reaches."""

from pathlib import Path

import pytest

from megaplan.cost.rates import rates_of
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES, PARTS
from megaplan.spec.load import load_spec

SPEC = Path(__file__).parents[3] / "plans" / "tiny-hybrid.yaml"
REACHED = rates_of(load_spec(str(SPEC), ["device.name=h200", "device.reached={bf16: 0.30}"]).spec)
FLOPS = 10**15


@pytest.mark.parametrize("part", [*FAMILIES, "head"])
def test_linears_of_every_letter_have_the_rate_that_is_given(part: str) -> None:
    """`device.reached` replaces the modelled share of the peak: 0.30 of it in bf16."""
    peak = REACHED.device.peak_flops[DType.BF16].value
    assert REACHED.compute_ns(FLOPS, part, DType.BF16) == -(-FLOPS * 10**10 // (3 * peak))


@pytest.mark.parametrize("part", [part for part in PARTS if part in REACHED.percent and part != "head"])
def test_other_parts_keep_their_own_share(part: str) -> None:
    """A scan or an attention core is not a linear."""
    peak = REACHED.device.peak_flops[DType.BF16].value
    assert REACHED.compute_ns(FLOPS, part, DType.BF16) == -(-FLOPS * 10**11 // (peak * REACHED.percent[part]))
