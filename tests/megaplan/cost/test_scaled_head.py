"""The head in a recipe's format: three products as any linear's, and the logits that backward makes again."""

from collections.abc import Callable

import pytest

from megakernels.ops.fp8_linear.facts import NOTHING, linear_passes
from megaplan.cost.blocks import HEAD, LOGITS_AGAIN, head, rank_workload
from megaplan.cost.low_precision import EightBits
from megaplan.cost.rates import rates_of
from megaplan.cost.times import end_times
from megaplan.spec.models import Spec

MESHES = {"alone": {}, "tp": {"tp": 2}, "vocabulary": {"tp": 2, "vocab_parallel": True}}


def spec_with(make_spec: Callable[..., Spec], mesh: str, *, low: bool) -> Spec:
    recipe = {"name": "fp8_rowwise", "head": low}
    return make_spec("AD", precision={"params": "bf16", "recipe": recipe}, mesh=MESHES[mesh], host={"kernels": "triton"})


@pytest.mark.parametrize("mesh", MESHES)
def test_products_of_a_head_are_a_linears(mesh: str, make_spec: Callable[..., Spec]) -> None:
    spec = spec_with(make_spec, mesh, low=True)
    model, load = spec.model, rank_workload(spec, spec.precision.params)
    vocab = model.vocab_size // (2 if mesh == "vocabulary" else 1)
    expected = linear_passes(model.hidden_size, vocab, 100, 2, by_row=True, fused=True, shares=False, keeps=False)
    found = {
        op.name: EightBits(spec, 2, "none").of_head(op, 100)
        for op in head(load, model.hidden_size, model.vocab_size, vocab_parallel=mesh == "vocabulary")
    }
    assert found[HEAD] == expected
    again = found[LOGITS_AGAIN]
    assert again is not None
    assert again[1] == expected[0]
    assert {again[0].product, again[2].copies} == {NOTHING}
    assert [name for name, passes in found.items() if passes is None] == ["final_norm", "cross_entropy"]


@pytest.mark.parametrize("mesh", MESHES)
def test_the_last_slot_has_its_time_and_the_first_has_not(mesh: str, make_spec: Callable[..., Spec]) -> None:
    wide, low = (spec_with(make_spec, mesh, low=each) for each in (False, True))
    (first, last, _), (low_first, low_last, _) = (end_times(spec, rates_of(spec)) for spec in (wide, low))
    assert first == low_first
    assert last != low_last
