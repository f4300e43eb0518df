"""Count one optimizer step of one rank: the runtime's code on fake tensors."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import _PipelineStageBase

from megaplan.columns import Phase
from megaplan.inventory.tensors import Inventory
from megaplan.spec.host import device_of
from megarun.data.batches import Batch
from megarun.engine.phases import PhasedTrainer
from megarun.engine.trainer import sharded_stages
from megarun.job.job import Job
from megarun.parallel.groups.expert import StatedRouting
from megarun.parallel.groups.mesh import RankMesh, build_mesh
from megarun.trace.fake import lone_rank, no_cycle_collection, static_shapes
from megarun.trace.places import LOSS, Places
from megarun.trace.rank import FINITE, empty_batch
from megarun.trace.replaced import replaced
from rooflines.counter import Counter
from rooflines.work import Action, Event

_ACTIONS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


class CountedTrainer(PhasedTrainer):
    """The trainer without values: it initialises nothing, and reads a finite number that clips gradients."""

    def __init__(self, job: Job, mesh: RankMesh, counter: Counter, **options: Any) -> None:
        self._counter = counter
        super().__init__(job, mesh, **options)

    def fill(self, job: Job) -> None:
        """Skip the initialisation: parameters have no values."""

    def read_all(self, values: Tensor) -> list[float]:
        """Placeholders; a run synchronises here."""
        self._counter.waits("read_all")
        return [FINITE] * len(values)

    def enter_phase(self, phase: Phase) -> None:
        """Operations after the last backward belong to the step: clipping, metrics and the optimizer."""
        once = phase in (Phase.OPTIMIZER, Phase.FIRST_OPTIMIZER)
        self._counter.phase = "step" if once else "microbatches"
        self._counter.action = None


def count_rank(job: Job, rank: int) -> tuple[Event, ...]:
    """Count one optimizer step of a rank with existing optimizer state; the default process group must not exist yet."""
    warnings.simplefilter("ignore")  # torch warns about its own internals
    torch.set_num_threads(1)
    with lone_rank(rank, job.spec.mesh.world_size), static_shapes():
        mesh = build_mesh(job.spec.mesh, torch.device("cpu"))
        stages = sharded_stages(job, mesh, measured=False)
        places = Places(stages)
        counter = Counter(places, device_of(job.spec.device))
        with ExitStack() as stack:
            for entered in (no_cycle_collection(), places.watching(), _actions(counter, alone=job.spec.mesh.pp == 1), _routing(counter)):
                stack.enter_context(entered)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(counter)
            trainer = CountedTrainer(job, mesh, counter, stages=stages)
            trainer.optimizers.make_states()
            batch: Batch = empty_batch(job, trainer)
            counter.counts = True
            trainer.start_step()
            trainer.step(0, batch)
        families = families_of(job.inventory)
        return tuple(Event(each.action, each.phase, family(each, families), each.done) for each in counter.events)


def families_of(inventory: Inventory) -> Sequence[str]:
    """Block letter of each layer."""
    return [block.family for block in inventory.layers]


def family(event: Event, families: Sequence[str]) -> str:
    """Part of the model of an event's module path."""
    if event.phase == "step":
        return "optimizer"
    path = event.family
    layer = re.match(r"layers\.(\d+)", path)
    if layer:
        return families[int(layer.group(1))]
    first = path.partition(".")[0]
    if first in ("head", "final_norm", LOSS):
        return "head"
    if first in ("embedding", "ngram", "structure", "platform"):
        return "embedding"
    return first if first == "mtp" else "stage"


@contextmanager
def _actions(counter: Counter, *, alone: bool) -> Iterator[None]:
    """Set the current action of the counter; the loss belongs to the forward of the last slot."""

    def during(action: Action, run: Callable[[], Any]) -> Any:
        counter.action = action
        try:
            return run()
        finally:
            counter.action = None

    def noted(name: str, letter: str) -> Any:
        original = getattr(_PipelineStageBase, name)

        def run(stage: Any, microbatch: int, *args: Any, **options: Any) -> Any:
            split = letter == "B" and not options.get("full_backward", True)
            action = Action(stage.stage_index, "I" if split else letter, microbatch)
            return during(action, lambda: original(stage, microbatch, *args, **options))

        return run

    part, loss = Batch.part, _PipelineSchedule._maybe_compute_loss

    def taken(batch: Batch, index: int, num_parts: int) -> Batch:
        """Part of a batch; without a pipeline the runner takes microbatches one by one."""
        if alone:
            counter.action = Action(0, "B", index)
        return part(batch, index, num_parts)

    def loss_of(schedule: Any, stage: Any, output: Any, targets: Any, microbatch: int, *others: Any) -> Any:
        action = Action(stage.stage_index, "F", microbatch)
        return during(action, lambda: loss(schedule, stage, output, targets, microbatch, *others))

    actions = {name: noted(name, letter) for name, letter in _ACTIONS.items()}
    schedule = replaced(_PipelineSchedule, _maybe_compute_loss=loss_of)
    with replaced(_PipelineStageBase, **actions), replaced(Batch, part=taken), schedule:
        yield


@contextmanager
def _routing(counter: Counter) -> Iterator[None]:
    """Count a host synchronisation for routing splits, which a run reads from the device."""
    stated = StatedRouting.__call__

    def read(routing: StatedRouting, sent: Tensor, received: Tensor) -> Any:
        counter.waits("routing splits")
        return stated(routing, sent, received)

    with replaced(StatedRouting, __call__=read):
        yield
