"""Gradient shards lie in the computing stream's memory, and no memory is given back while another stream may still use it."""

import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaplan.spec.models import Spec
from megarun.engine.trainer import Trainer
from megarun.job.job import Job
from megarun.parallel.apply.gradients import parameter_groups
from megarun.parallel.apply.shards import ShardsWhereActivationsWere
from megarun.parallel.groups.mesh import build_mesh
from megarun.trace.rank import empty_batch
from megarun.trace.tracker import plain_tensors

pytestmark = [pytest.mark.runtime, pytest.mark.usefixtures("wrapped")]
CPU = torch.device("cpu")


class Stream:
    """A stream of vector time: what it has run, and what of other streams it has waited for."""

    def __init__(self, priority: int = -1) -> None:  # noqa: ARG002  (torch asks for one)
        self.seen: dict[Stream, int] = {}

    def run(self) -> int:
        self.seen[self] = self.seen.get(self, 0) + 1
        return self.seen[self]

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        for stream, time in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), time)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Event:
    """Work that a stream had run and waited for when the event was recorded."""

    def __init__(self) -> None:
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        recorded: Any = torch.cpu.current_stream() if stream is None else stream
        self.seen = dict(recorded.seen)

    def wait(self, stream: Stream | None = None) -> None:
        waiting: Any = torch.cpu.current_stream() if stream is None else stream
        waiting.wait_event(self)


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """The stream that allocated each storage, and the storage's last use by every stream.

    Memory of the computing stream that is freed is handed out again at once: `early` lists what another stream may still use then. The
    reduce-scatter stream waits for the computing one before each of its own allocations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computing: Any = torch.cpu.current_stream()
        self.made_in: dict[int, Stream] = {}
        self.uses: dict[int, dict[Stream, int]] = {}
        self.early: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        stream: Any = torch.cpu.current_stream()
        time = stream.run()
        for tensor in plain_tensors((args, kwargs, out)):
            if tensor.device.type == "cpu":
                self._use(tensor.untyped_storage(), stream, time, str(func))
        return out

    def _use(self, storage: Any, stream: Stream, time: int, op: str) -> None:
        key = storage._cdata
        if key not in self.made_in:
            self.made_in[key], self.uses[key] = stream, {}
            weakref.finalize(storage, self._freed, key, op, storage.nbytes())
        self.uses[key][stream] = time

    def _freed(self, key: int, op: str, nbytes: int) -> None:
        own = self.made_in.pop(key)
        late = [stream for stream, time in self.uses.pop(key).items() if stream is not own and own.seen.get(stream, 0) < time]
        if late and own is self.computing:
            self.early.append(f"{nbytes} bytes made by {op}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """torch's CPU streams, with an order."""
    computing = Stream()
    monkeypatch.setattr(torch.cpu, "Stream", Stream)
    monkeypatch.setattr(torch.cpu, "Event", Event)
    monkeypatch.setattr(torch.cpu, "_default_cpu_stream", computing)
    monkeypatch.setattr(torch.cpu, "_current_stream", computing)
    return computing


def _trained(worker: Any, spec: dict[str, Any], memory: Memory) -> Trainer:
    """The trainer after two steps; the gradient shards of the second still exist."""
    job: Job = worker.build_job({"spec": spec, "spans": [[0, 5]]})
    trainer = Trainer(job, build_mesh(Spec.model_validate(spec).mesh, CPU))
    with memory:
        for step in range(2):
            trainer.step(step, empty_batch(job, trainer))  # type: ignore[arg-type]
        trainer.measure(empty_batch(job, trainer))  # type: ignore[arg-type]
    return trainer


def _shards(trainer: Trainer) -> list[Any]:
    found = [parameter.grad for stage in trainer.stages for parameter in stage.parameters()]
    return [gradient.to_local().untyped_storage() for gradient in found if isinstance(gradient, DTensor)]


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_shards_are_in_the_computing_stream_and_nothing_is_freed_early(
    one_process: Any, worker: Any, spec_with: Any, streams: Stream, num_microbatches: int
) -> None:
    memory = Memory()
    trainer = _trained(worker, spec_with({"schedule.num_microbatches": num_microbatches}), memory)
    shards = _shards(trainer)
    assert shards
    assert {id(memory.made_in[storage._cdata]) for storage in shards} == {id(streams)}
    assert memory.early == []


def test_outputs_that_are_only_added_would_be_freed_early_there(
    one_process: Any, worker: Any, spec_with: Any, streams: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime does not do this: with every output in the computing stream, the check above finds the reads that are not waited for."""
    monkeypatch.setattr(ShardsWhereActivationsWere, "_becomes_shards", lambda *_: True)
    memory = Memory()
    _trained(worker, spec_with({"schedule.num_microbatches": 3}), memory)
    assert memory.early


def test_shards_that_are_casts_stay_in_the_reduction_stream(one_process: Any, worker: Any, spec_with: Any, streams: Stream) -> None:
    memory = Memory()
    precision = {"params": "fp32", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "bf16"}
    trainer = _trained(worker, spec_with({"precision": precision}), memory)
    shards = _shards(trainer)
    assert shards
    assert id(streams) not in {id(memory.made_in[storage._cdata]) for storage in shards}
    assert memory.early == []


def test_every_group_has_the_reduction(one_process: Any, worker: Any, spec_with: Any) -> None:
    job: Job = worker.build_job({"spec": spec_with(), "spans": [[0, 5]]})
    trainer = Trainer(job, build_mesh(job.spec.mesh, CPU))
    groups = [group for stage in trainer.stages for group in parameter_groups(stage)]
    assert len(groups) == 7  # five layers, a bank, and the stage's own
    assert all(isinstance(group._reduce_scatter_comm, ShardsWhereActivationsWere) for group in groups)
