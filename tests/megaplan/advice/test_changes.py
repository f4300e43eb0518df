"""Changes keep the global batch, and the number of GPUs unless they add GPUs; other settings do not change."""

from collections.abc import Callable
from fractions import Fraction
from math import prod

import pytest

from megaplan.advice.changes import AXES, KEYS, changed, growth, single_edits, texts, value_of
from megaplan.errors import Severity
from megaplan.spec.load import load_spec
from megaplan.spec.models import Spec
from megaplan.spec.rules import check_rules

SPECS = {
    "llama": ("llama-3.1-8b", ()),
    "hybrid": ("nam56r-8xh200", ("mesh.tp=2", "mesh.cp=2")),
    "experts": ("mixtral-8x7b", ("batch.micro_batch_size=12",)),
    "megatron": ("mixtral-8x7b", ("host={name: megatron}", "mesh.tp=2", "mesh.vocab_parallel=true", "recompute.blocks.A=selective")),
}


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> Spec:
    name, overrides = SPECS[request.param]
    return load_spec(f"plans/{name}.yaml", overrides).spec


@pytest.fixture
def pairs(spec: Spec) -> list[Spec]:
    edits = single_edits(spec)
    found = [changed(spec, [one]) for one in edits]
    found += [changed(spec, [one, two]) for one in edits[::3] for two in edits[::2] if one.group != two.group]
    return [each for each in found if each is not None]


def test_the_global_batch_and_the_number_of_gpus_are_kept(spec: Spec, pairs: list[Spec]) -> None:
    assert len(pairs) > 50
    assert {each.global_batch_size for each in pairs} == {spec.global_batch_size}
    assert {each.mesh.world_size for each in pairs} == {spec.mesh.world_size}


def test_texts_of_a_change_make_the_changed_spec(spec: Spec, pairs: list[Spec], again: Callable[..., Spec]) -> None:
    """The spec that is priced is the one that the options give, key by key."""
    legal = [each for each in pairs if not any(item.severity is Severity.ERROR for item in check_rules(each))]
    assert len(legal) > 10
    for each in legal[::3]:
        told = again(spec, texts(spec, each))
        assert {key: value_of(told, key) for key in KEYS} == {key: value_of(each, key) for key in KEYS}
        assert told.model_dump() == each.model_dump()


def test_expandable_segments_are_those_of_a_spec_that_sets_them(again: Callable[..., Spec]) -> None:
    spec = load_spec("plans/mixtral-8x7b.yaml", ("host={name: megatron}", "mesh.vocab_parallel=false")).spec
    (edit,) = [edit for edit in single_edits(spec) if dict(edit.values) == {"host.expandable_segments": True}]
    after = changed(spec, [edit])
    assert after is not None
    assert after.host == again(spec, texts(spec, after)).host


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_growth_multiplies_the_gpus(spec: Spec, factor: int) -> None:
    found = [changed(spec, [edit]) for edit in growth(spec, factor)]
    assert {each.mesh.world_size for each in found if each is not None} == {factor * spec.mesh.world_size}
    assert {each.global_batch_size for each in found if each is not None} == {spec.global_batch_size}


def test_expert_ranks_grow_with_every_axis_that_their_groups_are_made_of() -> None:
    spec = load_spec("plans/mixtral-8x7b.yaml", ("mesh={}", "schedule.kind=1f1b")).spec
    found = {texts(spec, after) for edit in growth(spec, 8) if (after := changed(spec, [edit])) is not None}
    assert {("mesh.tp=8", "mesh.ep=8"), ("mesh.cp=8", "mesh.ep=8"), ("mesh.cp=2", "mesh.tp=4", "mesh.ep=8"), ("mesh.tp=8",)} <= found
    assert not any("mesh.pp=8" in change and "mesh.ep=8" in change for change in found)
    wide = {each.mesh.ep for edit in growth(spec, 64) if (each := changed(spec, [edit])) is not None}
    assert max(wide) == 8, "no more ranks than experts"


def test_a_mesh_without_a_pipeline_has_no_schedule() -> None:
    spec = load_spec("plans/nam56r-8xh200.yaml", ()).spec
    moves = [edit for edit in single_edits(spec) if dict(edit.factors) == {"pp": Fraction(1, 2), "dp_shard": Fraction(2)}]
    (one,) = moves
    found = changed(spec, [one])
    assert found is not None
    assert (found.mesh.pp, found.mesh.vpp, found.schedule.kind) == (1, 1, "1f1b")
    assert prod(getattr(found.mesh, axis) for axis in AXES) == 8
    assert texts(spec, found) == ("mesh.pp=1", "mesh.vpp=1", "mesh.dp_shard=8", "schedule.kind=1f1b", "schedule.num_microbatches=8")
