"""A rank that has its parameters whole: no copy that is not needed, gradients of autograd, memory freed when it is no longer used."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaplan.spec.models import Spec
from megarun.data.batches import Batches
from megarun.engine.trainer import Trainer
from megarun.parallel.apply.gradients import parameter_groups
from megarun.parallel.apply.weight_gradients import WeightGradients, split_linears
from megarun.parallel.apply.whole import Lent, whole_state
from megarun.parallel.groups.mesh import build_mesh

pytestmark = pytest.mark.runtime
CPU = torch.device("cpu")
MIXED = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}
PRECISIONS = {
    "fp32": dict.fromkeys(MIXED, "fp32"),
    "bf16": dict.fromkeys(MIXED, "bf16"),
    "copies": MIXED,
    "copies with narrow gradients": MIXED | {"grads": "bf16", "reduce": "bf16"},
    "wide gradients of narrow parameters": MIXED | {"master": "bf16", "moments": "bf16"},
}
FULL = {"default": "full", "blocks": {"M": "selective", "E": "selective"}}


def trained(worker: Any, spec: dict[str, Any]) -> tuple[Trainer, Batches]:
    job = worker.build_job({"spec": spec, "spans": [[0, spec["model"]["num_layers"]]]})
    mesh = build_mesh(job.spec.mesh, CPU)
    return Trainer(job, mesh), Batches(worker.CountingRows(job.spec.model.vocab_size), job.spec, mesh)


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in trainer.stages[0].named_parameters() if parameter.grad is not None}


def lent(trainer: Trainer) -> list[Lent]:
    state = whole_state(trainer.stages[0])
    assert state is not None
    return [member for group in state.groups for member in group.members]


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("name", PRECISIONS)
def test_gradients_are_fsdp2s(name: str, reshard: bool, one_process: Any, worker: Any, spec_with: Any, monkeypatch: Any) -> None:
    """Every bit, over three microbatches, with recompute; a second step begins like the first."""
    overrides = {"precision": PRECISIONS[name], "schedule.num_microbatches": 3, "recompute": FULL}
    spec = spec_with({**overrides, "sharding": {"reshard_after_forward": reshard}})
    ours, batches = trained(worker, spec)
    assert not list(parameter_groups(ours.stages[0]))
    monkeypatch.setattr(Spec, "has_whole_state", False)
    theirs, _ = trained(worker, spec)
    for step in range(2):
        for trainer in (ours, theirs):
            trainer.drop_gradients()
            trainer.accumulate_gradients(batches.at(step))
        expected = gradients(theirs)
        found = gradients(ours)
        assert found.keys() == expected.keys()
        for key, gradient in found.items():
            other = expected[key].to_local()  # type: ignore[attr-defined]
            assert gradient.dtype == other.dtype
            assert torch.equal(gradient, other), key


def test_what_is_stored_as_it_is_used_is_not_copied(one_process: Any, worker: Any, spec_with: Any) -> None:
    """No parameter is lent where autograd makes gradients in the stored dtype; none has a copy where only gradients are wider."""
    for name, number, copies in (("fp32", 0, 0), ("bf16", 0, 0), ("wide gradients of narrow parameters", None, 0), ("copies", None, None)):
        trainer, batches = trained(worker, spec_with({"precision": PRECISIONS[name]}))
        trainer.accumulate_gradients(batches.at(0))
        every = len(list(trainer.stages[0].parameters()))
        assert len(lent(trainer)) == (every if number is None else number)
        assert sum(member.copied for member in lent(trainer)) == (every if copies is None else copies)


def test_copies_are_freed_when_the_step_ends(one_process: Any, worker: Any, spec_with: Any) -> None:
    """Between steps a stage has its stored parameters, and evaluation, which has no backward, leaves none lent."""
    trainer, batches = trained(worker, spec_with({"precision": MIXED}))
    stored = dict(trainer.stages[0].named_parameters())
    trainer.accumulate_gradients(batches.at(0))
    assert {name: id(p) for name, p in trainer.stages[0].named_parameters()} == {name: id(p) for name, p in stored.items()}
    assert {member.used.untyped_storage().nbytes() for member in lent(trainer)} == {0}
    with torch.no_grad():
        trainer.stages[0](batches.at(1).tokens)
    assert max(member.used.untyped_storage().nbytes() for member in lent(trainer)) > 0
    state = whole_state(trainer.stages[0])
    assert state is not None
    state.release()
    assert {member.used.untyped_storage().nbytes() for member in lent(trainer)} == {0}


@pytest.mark.parametrize("name", ["fp32", "copies"])
def test_deferred_gradients_are_added_where_autograd_adds(name: str, one_process: Any, worker: Any, spec_with: Any) -> None:
    """The second half of a split backward completes the gradients of two microbatches."""
    trainer, batches = trained(worker, spec_with({"precision": PRECISIONS[name], "schedule.num_microbatches": 2}))
    trainer.accumulate_gradients(batches.at(0))
    expected = {key: value.clone() for key, value in gradients(trainer).items()}
    trainer.drop_gradients()
    (stage,) = trainer.stages
    split_linears(stage)
    store, batch = WeightGradients(stage), batches.at(0)
    for index in range(2):
        part = batch.part(index, 2)
        with store.deferring():
            torch.autograd.backward(trainer._runner.loss(stage(part.tokens), part.labels))  # type: ignore[attr-defined]
        store.take()()
    assert gradients(trainer).keys() == expected.keys()
    for key, value in gradients(trainer).items():
        assert torch.equal(value, expected[key]), key


def test_a_module_without_lent_parameters_costs_nothing(one_process: Any, worker: Any, spec_with: Any) -> None:
    """Inputs pass through no function, and outputs have no hook."""
    trainer, batches = trained(worker, spec_with())
    seen: list[Any] = []
    block: nn.Module = next(iter(trainer.stages[0].layers.values()))
    block.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].grad_fn.name(), output._backward_hooks)))
    trainer.accumulate_gradients(batches.at(0))
    assert [hooks for _, hooks in seen] == [None] * len(seen)
    assert not any("EndOfBackward" in name for name, _ in seen)
