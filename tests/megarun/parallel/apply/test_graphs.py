"""Replayed microbatches: bitwise equal to eager ones, with everything that happens between steps."""

import itertools
from math import prod
from typing import Any

import pytest
import torch
from random_plans.choices import TINY, Scope
from random_plans.draw import draw
from recorded import TapeRecorder

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


def graphs_of(trainer: Trainer) -> tuple[GraphedRunner, TapeRecorder]:
    stage = trainer.stages[0]
    recorder = TapeRecorder(lambda: [*stage.buffers(), *stage.parameters()])
    trainer._runner = GraphedRunner(trainer._runner, recorder)  # type: ignore[arg-type]
    return trainer._runner, recorder


def same(one: Trainer, other: Trainer) -> None:
    for (name, mine), (_, theirs) in zip(one.stages[0].named_parameters(), other.stages[0].named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


MIXED = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("precision", [None, MIXED])
def test_steps_are_bitwise_eager(microbatches: int, precision: Any, one_process: Any, worker: Any, spec_with: Any) -> None:
    spec = spec_with({"schedule.num_microbatches": microbatches, **({"precision": precision} if precision else {})})
    eager, batches = made(worker, spec)
    graphed, _ = made(worker, spec)
    runner, recorder = graphs_of(graphed)
    for step in range(5):
        expected, found = eager.step(step, batches.at(step)), graphed.step(step, batches.at(step))
        assert expected == found, step
        same(eager, graphed)
    assert recorder.num_replays == 3 * microbatches, runner.note


def test_a_failed_recording_changes_nothing_but_the_log(one_process: Any, worker: Any, spec_with: Any) -> None:
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
    """Losses, gradient norms, routing statistics and parameters of four steps, two of them replayed."""
    job = random_job(seed)
    mesh = build_mesh(job.spec.mesh, CPU)
    eager, graphed = Trainer(job, mesh), Trainer(job, mesh)
    batches = Batches(worker.CountingRows(job.spec.model.vocab_size), job.spec, mesh)
    runner, recorder = graphs_of(graphed)
    for step in range(4):
        expected, found = eager.step(step, batches.at(step)), graphed.step(step, batches.at(step))
        assert expected == found, step
        same(eager, graphed)
    assert recorder.num_replays == 2 * job.spec.schedule.microbatches_per_update, runner.note


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
