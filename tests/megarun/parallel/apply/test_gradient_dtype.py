"""Gradients are kept in `precision.grads`, whatever the parameters' dtype, and the optimizer reads exactly those."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megarun.data.batches import Batches
from megarun.engine.trainer import Trainer
from megarun.optim.build import Optimizers
from megarun.parallel.apply.gradients import in_parameter_dtype, keep_gradient_dtype, parameter_groups
from megarun.parallel.groups.mesh import build_mesh

pytestmark = [pytest.mark.runtime, pytest.mark.usefixtures("wrapped")]
CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def trainer_of(worker: Any, spec: dict[str, Any]) -> tuple[Trainer, Batches]:
    job = worker.build_job({"spec": spec, "spans": [[0, spec["model"]["num_layers"]]]})
    mesh = build_mesh(job.spec.mesh, CPU)
    return Trainer(job, mesh), Batches(worker.CountingRows(job.spec.model.vocab_size), job.spec, mesh)


def local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def reduced_each_microbatch(trainer: Trainer, batches: Batches) -> dict[str, list[Tensor]]:
    """The result of every microbatch's reduction, before it is accumulated."""
    found: dict[str, list[Tensor]] = {}

    def record(name: str) -> Any:
        def take(parameter: Tensor) -> None:
            found.setdefault(name, []).append(local(parameter.grad).clone())
            parameter.grad = None

        return take

    for name, parameter in trainer.stages[0].named_parameters():
        parameter.register_post_accumulate_grad_hook(record(name))
    trainer.accumulate_gradients(batches.at(0))
    return found


@pytest.mark.parametrize(("params", "reduce"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")])
def test_shards_accumulate_in_the_gradients_dtype(params: str, reduce: str, one_process: Any, worker: Any, spec_with: Any) -> None:
    """bf16 shards of fp32 parameters: the sum in bf16, in order, of what each microbatch reduced; one flat buffer per group."""
    overrides = {"schedule.num_microbatches": 3, "precision.params": params, "precision.reduce": reduce}
    wide, batches = trainer_of(worker, spec_with(overrides))
    parts = reduced_each_microbatch(wide, batches)
    narrow, batches = trainer_of(worker, spec_with({**overrides, "precision.grads": "bf16"}))
    narrow.accumulate_gradients(batches.at(0))
    for name, parameter in narrow.stages[0].named_parameters():
        expected = parts[name][0].to(BF16)
        for part in parts[name][1:]:
            expected += part.to(BF16)
        assert (parameter.dtype, local(parameter.grad).dtype) == (FP32, BF16)
        assert torch.equal(local(parameter.grad), expected), name
    storages = {local(p.grad).untyped_storage().data_ptr() for p in narrow.stages[0].parameters()}
    assert len(storages) == len(list(parameter_groups(narrow.stages[0])))


@pytest.mark.requirement("R-60")
@pytest.mark.parametrize("matrix", ["muon", "adamw"])
def test_the_optimizer_reads_them_as_they_are(matrix: str, one_process: Any, worker: Any, spec_with: Any) -> None:
    """An update with bf16 gradients is the update with the same values in fp32; afterwards the next step's gradients are bf16 again."""
    overrides = {"optimizer.matrix": matrix, "schedule.num_microbatches": 2, "precision.params": "bf16", "precision.reduce": "bf16"}
    narrow, batches = trainer_of(worker, spec_with({**overrides, "precision.grads": "bf16"}))
    wide, _ = trainer_of(worker, spec_with(overrides))
    for step in range(2):
        narrow.accumulate_gradients(batches.at(step))
        for ours, theirs in zip(wide.stages[0].parameters(), narrow.stages[0].parameters(), strict=True):
            ours.grad = theirs.grad.to(FP32)
        for trainer in (narrow, wide):
            trainer.optimizers.step(step)
        assert all(parameter.grad is None for parameter in narrow.stages[0].parameters())
    for (name, a), b in zip(wide.stages[0].named_parameters(), narrow.stages[0].parameters(), strict=True):
        assert torch.equal(local(a), local(b)), name
    assert narrow.resident_bytes() == wide.resident_bytes()
    assert {state.dtype for state in narrow.optimizers.state_tensors()} == {FP32}


def test_one_gradient_at_a_time_is_widened() -> None:
    """AdamW's gradient exists in the parameter's dtype only while that parameter is updated."""
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad_dtype = BF16
    with pytest.raises(RuntimeError, match=r"shape \(4,\) has no gradient"), in_parameter_dtype(parameter):
        pass
    parameter.grad = gradient = torch.ones(4, dtype=BF16)
    with in_parameter_dtype(parameter):
        assert torch.equal(parameter.grad, torch.ones(4))
    assert parameter.grad is gradient


def test_nothing_changes_where_the_dtypes_agree(one_process: Any, worker: Any, spec_with: Any) -> None:
    """No hook, no setting, one AdamW."""
    job = worker.build_job({"spec": spec_with(), "spans": [[0, 5]]})
    trainer = Trainer(job, build_mesh(job.spec.mesh, CPU))
    assert not any(hook.__name__ == "set_once" for hook in trainer.stages[0]._forward_pre_hooks.values())
    assert {parameter.grad_dtype for parameter in trainer.stages[0].parameters()} == {FP32}
    assert keep_gradient_dtype(trainer.stages[0], job.spec) is None
    optimizers = Optimizers(trainer.stages, job.inventory, job.spec)
    assert len(optimizers._all) == 2
    assert optimizers._single == []
