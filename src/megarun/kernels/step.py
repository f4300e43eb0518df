"""The launches of one optimizer step of a rank: the runtime's own step on fake tensors, with each operation's own launch code."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaplan.hosts.megarun.ledger import block_variants
from megaplan.layout.ranks import Slot
from megaplan.schedules import schedule_problems
from megarun.engine.trainer import Trainer, sharded_stages
from megarun.job.job import Job
from megarun.kernels.cuda_code import NAMESPACE, Unvalued, body_of, cuda_code, signature_of, without_values
from megarun.kernels.launches import MULTIPLE, KernelLaunch, keyed, recorded
from megarun.kernels.target import Target
from megarun.parallel.groups.expert import Splits, StatedRouting
from megarun.parallel.groups.mesh import build_mesh
from megarun.trace.fake import lone_rank, no_cycle_collection, static_shapes
from megarun.trace.rank import FINITE, empty_batch
from megarun.trace.replaced import replaced as replaced_attributes

FEWEST_MICROBATCHES = 2
"""Gradients of the second microbatch are added to the first's."""
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class UnvaluedTrainer(Trainer):
    """The trainer on tensors without values: it skips initialisation, and reads one finite number for every loss and norm."""

    def fill(self, job: Job) -> None:
        """Skip the initialisation: parameters have no values."""

    def read_all(self, values: Tensor) -> list[float]:
        """Placeholders with which the step completes."""
        return [FINITE] * len(values)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """Runs the CUDA code of each operation of `megakernels`, once for each signature of operands; enter it inside a `FakeTensorMode`."""

    def __init__(self, target: Target, found: Callable[[KernelLaunch], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._target, self._found = target, found
        self._known: set[Any] = set()
        self._seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and record its launches."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operation on local tensors is dispatched next
        if func is _WAIT and isinstance(args[0], FakeTensor):
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func.namespace == NAMESPACE:
            signature = func, signature_of(args)
            if signature not in self._known:
                self._known.add(signature)
                self._run(func, args)
        return out

    def _run(self, func: Any, args: tuple[Any, ...]) -> None:
        def launched(kernel: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
            launch = keyed(recorded(kernel, given, options))
            if launch.identity not in self._seen:
                self._seen.add(launch.identity)
                self._found(launch)

        with cuda_code(self._target, launched), Unvalued():  # type: ignore[no-untyped-call]  # torch's mode has no types
            body_of(func)(*map(without_values, args))


def find_launches(job: Job, rank: int, target: Target, found: Callable[[KernelLaunch], None]) -> None:
    """Run one step of a rank on fake tensors and report each distinct launch; after `launches.compile_for(target)`.

    Needs no GPU and no other process. It is called in its own process, which can join only one fake group.

    Args:
        job: Job that megarun can build.
        rank: Global rank.
        target: GPU on which the plan runs.
        found: Function called with each launch as soon as it is known.
    """
    warnings.simplefilter("ignore")  # torch warns about its own internals
    torch.set_num_threads(1)
    job = shortened(job)
    with lone_rank(rank, job.spec.mesh.world_size), static_shapes():
        mesh = build_mesh(job.spec.mesh, torch.device("cpu"))
        stages = sharded_stages(job, mesh, measured=False)
        with ExitStack() as stack:
            for entered in (no_cycle_collection(), FakeTensorMode(allow_non_fake_inputs=True), Launches(target, found)):
                stack.enter_context(entered)
            trainer = UnvaluedTrainer(job, mesh, stages)
            for step, aligned in enumerate((True, False) if job.spec.mesh.experts_travel else (True,)):
                with _rows_received(mesh.expert_coordinate["etp"], aligned=aligned):
                    trainer.step(step, empty_batch(job, trainer))


@contextmanager
def _rows_received(slice_index: int, *, aligned: bool) -> Iterator[None]:
    """Let a rank receive a number of rows that is, or is not, a multiple of the launcher's specialisation: the router decides it.

    The rows come from the first rank, or from another rank of its ETP group.
    """
    stated = StatedRouting.__call__

    def state(routing: StatedRouting, sent: Tensor, received: Tensor) -> Splits:
        splits = stated(routing, sent, received)
        more = -splits.num_received % MULTIPLE - (not aligned)
        if splits.gathered:
            other = 0 if slice_index else -1
            return replace(splits, gathered=(*splits.gathered[:other], splits.gathered[other] + more, *splits.gathered[other:][1:]))
        first, *others = splits.received
        return Splits(splits.sent, (first + more, *others))

    with replaced_attributes(StatedRouting, __call__=state):
        yield


def shortened(job: Job) -> Job:
    """The job with one layer of each variant in a slot, and the fewest microbatches that its schedule supports.

    Layers of a variant differ only in their weights (`block_variants`), so all have the launches of one. If layers read another layer's
    values in addition to the residual stream, all layers are kept.
    """
    schedule, mesh, model = job.spec.schedule, job.spec.mesh, job.spec.model
    given = schedule.num_microbatches if mesh.pp > 1 else schedule.microbatches_per_update
    fits = (
        number
        for number in range(FEWEST_MICROBATCHES, given)
        if mesh.pp == 1 or not schedule_problems(schedule.kind, mesh.pp, mesh.vpp, number)
    )
    changed = schedule.model_copy(update={"num_microbatches": next(fits, given), "steps_per_update": 1})
    spec = job.spec.model_copy(update={"schedule": changed})
    reads_others = bool(model.parallel_layers or model.payload)
    variants = block_variants(job.spec, job.inventory)
    layout = job.layout if reads_others else job.layout._replace(slots=tuple(_distinct(slot, variants) for slot in job.layout.slots))
    return replace(job, spec=spec, layout=layout)


def _distinct(slot: Slot, variants: dict[str, Any]) -> Slot:
    """The slot with the first of its layers of each variant."""
    first: dict[Any, str] = {}
    for name in slot.blocks:
        first.setdefault(variants[name] if name.startswith("layers.") else name, name)
    return slot._replace(blocks=tuple(first.values()))
