"""Replayed microbatches and updates: bitwise equal to eager ones, with everything that happens between steps."""

import itertools
from math import prod
from typing import Any

import pytest
import torch
from random_plans.choices import TINY, Scope
from random_plans.draw import draw
from recorded import Tape, TapeRecorder

from megaplan.plan.make import make_plan
from megaplan.spec.load import spec_from_document
from megarun.data.batches import Batches
from megarun.engine.trainer import Trainer
from megarun.job.job import Job
from megarun.parallel.apply.graphs import CudaRecorder, GraphedRunner
from megarun.parallel.groups.mesh import build_mesh

pytestmark = pytest.mark.runtime
CPU = torch.device("cpu")


def made(worker: Any, spec: dict[str, Any]) -> tuple[Trainer, Batches]:
    job = worker.build_job({"spec": spec, "spans": [[0, spec["model"]["num_layers"]]]})
    mesh = build_mesh(job.spec.mesh, CPU)
    return Trainer(job, mesh), Batches(worker.CountingRows(job.spec.model.vocab_size), job.spec, mesh)


def graphs_of(trainer: Trainer, *, whole_step: bool = False) -> tuple[GraphedRunner, TapeRecorder]:
    stage = trainer.stages[0]

    def kept() -> list[torch.Tensor]:
        gradients = [each.grad for each in stage.parameters() if each.grad is not None]
        return [*stage.buffers(), *stage.parameters(), *trainer.optimizers.state_tensors(), *gradients]

    recorder = TapeRecorder(kept)
    trainer._runner = GraphedRunner(trainer._runner, recorder, whole_step=whole_step)  # type: ignore[arg-type]
    return trainer._runner, recorder


def same(one: Trainer, other: Trainer) -> None:
    for (name, mine), (_, theirs) in zip(one.stages[0].named_parameters(), other.stages[0].named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    for mine, theirs in zip(one.optimizers.state_tensors(), other.optimizers.state_tensors(), strict=True):
        assert torch.equal(mine, theirs)


MIXED = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}


@pytest.mark.parametrize(
    ("microbatches", "precision", "whole_step"), [(1, None, False), (3, MIXED, False), (1, MIXED, True), (3, None, True)]
)
def test_steps_are_bitwise_eager(
    microbatches: int, precision: Any, whole_step: bool, one_process: Any, worker: Any, spec_with: Any
) -> None:
    """Rates change from step to step, gradients are clipped by their own factors, and gradients are dropped after each."""
    changing = {"training.gradient_clip": 0.01, "training.steps": 6, "training.rate_schedule": {"kind": "cosine", "warmup_steps": 2}}
    spec = spec_with({"schedule.num_microbatches": microbatches, **changing, **({"precision": precision} if precision else {})})
    eager, batches = made(worker, spec)
    graphed, _ = made(worker, spec)
    runner, recorder = graphs_of(graphed, whole_step=whole_step)
    for step in range(5):
        expected, found = eager.step(step, batches.at(step)), graphed.step(step, batches.at(step))
        assert expected == found, step
        assert found.gradient_norm > 0.01
        same(eager, graphed)
        assert all(each.grad is None for each in graphed.stages[0].parameters())
    assert recorder.num_replays == 3 * (microbatches + whole_step), runner.note
    said = "CUDA graphs: forward and backward of a microbatch are replayed, after 2 eager steps" + "; the update is, too" * whole_step
    assert graphed.take_note() == said


NARROW = {**MIXED, "grads": "bf16", "reduce": "bf16"}


@pytest.mark.parametrize("precision", [MIXED, NARROW])
@pytest.mark.parametrize("matrix", ["muon", "adamw"])
def test_a_recorded_update_holds_no_number_of_its_step(
    matrix: str, precision: Any, one_process: Any, worker: Any, spec_with: Any, monkeypatch: Any
) -> None:
    """Two steps with other rates, factors and counts have the same operations with the same numbers, and the host reads no tensor.

    What the operations launch on a GPU has only these numbers: `megarun.kernels.step` runs their code on tensors without values.
    """

    def read(*_: Any) -> Any:
        raise AssertionError("the host reads a tensor")

    trainer, batches = made(worker, spec_with({"optimizer.matrix": matrix, "precision": precision}))
    optimizers, update, calls = trainer.optimizers, trainer.optimizers.update, []
    trainer.step(0, batches.at(0))

    def watched(numbers: torch.Tensor) -> None:
        tape = Tape()
        with monkeypatch.context() as patch, tape:
            for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"):
                patch.setattr(torch.Tensor, name, read)
            update(numbers)
        calls.append(tape.calls)

    optimizers.update = watched  # type: ignore[method-assign]
    for step, factor in ((1, 1.0), (40, 0.125)):
        trainer.accumulate_gradients(batches.at(step))
        optimizers.step(step, factor)
    assert optimizers.numbers(1).tolist() != optimizers.numbers(40, 0.125).tolist()
    assert "megakernels.adamw_.default" in [name for name, _ in calls[0]]
    assert calls[0] == calls[1]
    assert not [name for name, _ in calls[0] if "local_scalar" in name]


def test_the_check_of_a_recorded_update_finds_a_number(one_process: Any) -> None:
    """An update that multiplies by a rate of the host's has other calls in another step."""
    found = []
    for rate in (0.1, 0.2):
        tape = Tape()
        with tape:
            torch.ones(3).mul_(rate)
            torch.ones(3).add_(torch.ones(3), alpha=torch.tensor(rate))
        found.append(tape.calls)
    assert all(one != other for one, other in zip(*found, strict=True) if one[0] == "aten.mul_.Tensor")
    assert [name for name, _ in found[0] if "local_scalar" in name]


@pytest.mark.parametrize("precision", [MIXED, NARROW])
def test_an_update_that_fails_to_be_recorded_stays_eager(precision: Any, one_process: Any, worker: Any, spec_with: Any) -> None:
    """It fails at its end, with gradients dropped: microbatches are replayed, and parameters are those of eager steps."""
    spec = spec_with({"schedule.num_microbatches": 2, "precision": precision})
    eager, batches = made(worker, spec)
    graphed, _ = made(worker, spec)
    runner, recorder = graphs_of(graphed, whole_step=True)
    record = recorder.record

    def failing(work: Any) -> Any:
        replay = record(work)
        if len(recorder.tapes) == 3:
            raise RuntimeError("operation not permitted when stream is capturing")
        return replay

    recorder.record = failing  # type: ignore[method-assign]
    for step in range(5):
        assert eager.step(step, batches.at(step)) == graphed.step(step, batches.at(step)), step
        same(eager, graphed)
    assert recorder.num_replays == 6
    reason = "RuntimeError: operation not permitted when stream is capturing"
    assert runner.note.endswith(f"; the update is not recorded, so it stays eager: {reason}")


def test_skipped_steps_and_loaded_states_are_followed(one_process: Any, worker: Any, spec_with: Any) -> None:
    """A step without update, and one after state was loaded into the tensors that exist, with the rate of an earlier step."""
    spec = spec_with({"precision": MIXED, "training.steps": 8, "training.rate_schedule": {"kind": "cosine", "warmup_steps": 2}})
    eager, batches = made(worker, spec)
    graphed, _ = made(worker, spec)
    _, recorder = graphs_of(graphed, whole_step=True)
    saved: list[list[torch.Tensor]] = []
    for step, batch in ((0, 0), (1, 1), (2, 2), (3, 3), (None, 4), (4, 5), (2, 6), (3, 7)):
        for trainer in (eager, graphed):
            held = [*(each.detach() for each in trainer.stages[0].parameters()), *trainer.optimizers.state_tensors()]
            if step == 2 and batch == 2:
                saved.append([each.clone() for each in held])
            if batch == 6:
                trainer.optimizers.make_states()
                torch._foreach_copy_(held, saved[0])
                assert all(one is other for one, other in zip(held[-3:], trainer.optimizers.state_tensors()[-3:], strict=True))
        if step is None:
            assert eager.measure(batches.at(batch)) == graphed.measure(batches.at(batch))
            eager.drop_gradients()
            graphed.drop_gradients()
        else:
            assert eager.step(step, batches.at(batch)) == graphed.step(step, batches.at(batch))
        same(eager, graphed)
    assert recorder.num_replays == 6 + 5


def test_a_failed_recording_changes_only_the_log(one_process: Any, worker: Any, spec_with: Any) -> None:
    """The microbatch fails in its backward, with copies lent and gradients half made."""
    spec = spec_with({"schedule.num_microbatches": 2, "precision": MIXED})
    eager, batches = made(worker, spec)
    graphed, _ = made(worker, spec)
    _, recorder = graphs_of(graphed)
    record = recorder.record

    def failing(work: Any) -> Any:
        middle = graphed.stages[0].layers["2"]

        def fail(*_: Any) -> None:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        handle = middle.register_full_backward_hook(fail)
        try:
            return record(work)
        finally:
            handle.remove()

    recorder.record = failing  # type: ignore[method-assign]
    for step in range(5):
        expected, found = eager.step(step, batches.at(step)), graphed.step(step, batches.at(step))
        assert expected == found, step
        same(eager, graphed)
        note = graphed.take_note()
        said = "CUDA graphs: not recorded, so steps stay eager: RuntimeError: operation not permitted when stream is capturing"
        assert note == (said if step == 2 else None)
    assert recorder.num_replays == 0


def test_documents_of_each_step_are_read(one_process: Any, worker: Any, spec_with: Any) -> None:
    """Starts are copied to the graphs' own tensor, and the number of labels is read from the device."""
    spec = spec_with({"schedule.num_microbatches": 2, "data": {"packing": "documents"}})
    eager, batches = made(worker, spec)
    graphed, _ = made(worker, spec)
    _, recorder = graphs_of(graphed)
    counts = set()
    for step in range(5):
        batch = batches.at(step)
        counts.add(batch.packed.num_targets)  # type: ignore[union-attr]
        assert eager.step(step, batch) == graphed.step(step, batches.at(step)), step
        same(eager, graphed)
    assert recorder.num_replays == 6
    assert len(counts) > 1


def random_job(seed: int) -> Job:
    """The first plan of one process in a seed's stream."""
    for attempt in itertools.count():
        document = draw(1000 * seed + attempt, Scope.RUNTIME, TINY)
        mesh = document["mesh"]
        if prod(mesh.get(axis, 1) for axis in ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp")) == 1:
            break
    return Job.from_plan(make_plan(spec_from_document(document)))


@pytest.mark.parametrize("seed", [4, 6, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 2, 3, 5, 7, 8, 9))])
def test_random_plans_are_bitwise_eager(seed: int, one_process: Any, worker: Any) -> None:
    """Losses, gradient norms, routing statistics and parameters of four steps, two of them replayed, with the update unless MP906."""
    job = random_job(seed)
    whole = job.spec.host.optimizer_offload is None
    mesh = build_mesh(job.spec.mesh, CPU)
    eager, graphed = Trainer(job, mesh), Trainer(job, mesh)
    batches = Batches(worker.CountingRows(job.spec.model.vocab_size), job.spec, mesh)
    runner, recorder = graphs_of(graphed, whole_step=whole)
    for step in range(4):
        expected, found = eager.step(step, batches.at(step)), graphed.step(step, batches.at(step))
        assert expected == found, step
        same(eager, graphed)
    assert recorder.num_replays == 2 * (job.spec.schedule.microbatches_per_update + whole), runner.note


def test_a_capture_that_fails_at_its_end_leaves_no_stream_and_no_pool(monkeypatch: Any) -> None:
    """torch's context of a capture neither restores the stream nor ends the allocator's routing when the capture is invalid."""
    calls: list[Any] = []

    class Capture:
        def __init__(self, _graph: Any, **options: Any) -> None:
            calls.append(("begin", options["pool"], options["stream"], options["capture_error_mode"]))

        def __enter__(self) -> None:
            calls.append("capturing")

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("capture was invalidated")

    def ended(*of_pool: Any) -> None:
        calls.append(("ended", *of_pool))
        raise RuntimeError("not begun")

    for name, value in {
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda _: "side",
        "CUDAGraph": lambda: "graph",
        "graph": Capture,
        "current_stream": lambda _: "main",
        "set_stream": lambda stream: calls.append(("stream", stream)),
        "synchronize": lambda _: None,
        "empty_cache": lambda: calls.append("emptied"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, ended, raising=False)
    recorder = CudaRecorder(torch.device("cuda", 3))
    with pytest.raises(RuntimeError, match="invalidated"):
        recorder.record(lambda: None)
    assert calls == [("begin", "pool", "side", "thread_local"), "capturing", ("stream", "main")]
    recorder.drop()
    assert calls[3:] == [("ended", 3, "pool"), ("ended", 3, "pool"), "emptied"]
