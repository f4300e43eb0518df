"""Forward and backward of a microbatch, and the update, as CUDA graphs: recorded once, replayed without the host.

The first steps are eager: they compile kernels and create lazily created state. Then two graphs are recorded: of a step's first microbatch,
whose backward makes the gradients, and of a later one, whose backward adds to them. Both read the batch from their own tensors.
Gradients stay between steps. With `host.cuda_graphs: step` the update by them is a third graph, recorded in the same step; it reads the
learning rates and the clip factor from its own tensor, which the host writes after it has read loss and norm and decided whether to apply
the step.

The graphs share one memory pool: each reuses memory that earlier graphs have freed, and a replay finds every tensor at its recorded
address. They are replayed in the order in which they were recorded; a step that is skipped leaves out the update.

The functions that torch runs are those of eager steps, in the same order, so a replayed step is bitwise equal to an eager one. Decisions of
the host during recording are fixed in the graph: `megaplan.spec.step_graphs` names the plans in which the host decides by values, or
communicates with other ranks, and which therefore run eagerly.

Source: torch/cuda/graphs.py; docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs".
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor, nn

from megaplan.spec.models import Spec
from megaplan.spec.step_graphs import NUMBERS, replays_update, why_eager
from megarun.data.batches import Batch
from megarun.parallel.apply.compile import is_compiled
from megarun.parallel.apply.pipeline import AccumulatingRunner, BatchLoss, Runner
from megarun.parallel.apply.whole import whole_state

WARM_UP_STEPS = 2
"""Eager steps before the graphs are recorded: the first makes optimizer state, the second has the memory of every later one."""

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records what a function does on the device."""

    def record(self, work: Callable[[], None]) -> Replay:
        """Run `work` once, recording its operations without running them; returns the function that runs them."""
        ...

    def drop(self) -> None:
        """Free the tensors of an unfinished recording."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share a memory pool and are replayed in the order in which they were recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], None]) -> Replay:
        """See `Recorder`. Before recording, torch's allocator returns memory that eager steps have freed, which the pool then takes."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            # the watchdog of a process group queries events in another thread during the capture
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        finally:
            torch.cuda.set_stream(before)  # a failed capture leaves its own error
        return graph.replay

    def drop(self) -> None:
        """See `Recorder`. torch leaves the allocator's routing to the pool as it is if the end of a capture fails."""
        for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with suppress(RuntimeError):  # it has ended
                end(self._device.index or 0, self._pool)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def graphed(runner: Runner, spec: Spec, device: torch.device) -> Runner:
    """The runner with graphs, if the plan has them and the device can record them; else the runner itself."""
    if device.type != "cuda" or not isinstance(runner, AccumulatingRunner) or why_eager(spec) or is_compiled(runner.stage):
        return runner
    return GraphedRunner(runner, CudaRecorder(device), whole_step=replays_update(spec))


class GraphedRunner:
    """An `AccumulatingRunner` whose microbatches, and with `whole_step` the updates by their gradients, are replayed once recorded.

    Attributes:
        note: Pending message for the log: graphs were recorded, or the reason that they were not; else empty.
    """

    def __init__(
        self, eager: AccumulatingRunner, recorder: Recorder, *, whole_step: bool = False, warm_up_steps: int = WARM_UP_STEPS
    ) -> None:
        self._eager, self._recorder, self._left = eager, recorder, warm_up_steps
        self._stage: nn.Module = eager.stage
        self._replays: list[Replay] = []
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._inputs: Batch | None = None
        self._total: Tensor | None = None
        self._given_up = False
        self._records_update = whole_step
        self._numbers: Tensor | None = None
        self._update: Replay | None = None
        self.note = ""

    @property
    def loss(self) -> BatchLoss:
        """Criterion of a microbatch."""
        return self._eager.loss

    def take_note(self) -> str | None:
        """The message for the log, once."""
        found, self.note = self.note, ""
        return found or None

    def held_tensors(self) -> list[Tensor]:
        """Tensors that graphs read and write, without gradients; none before they are recorded."""
        found = [] if self._inputs is None or self._total is None else [*self._inputs.tensors(), self._total]
        numbers = [] if self._numbers is None else [self._numbers]
        return [*found, *numbers, *self._eager.loss.held_tensors()]

    def forward_backward(self, batch: Batch) -> Tensor:
        """See `Runner`."""
        if not self._replays and not self._given_up:
            if self._left > 0:
                self._left -= 1
            else:
                self._record(batch)
        return self._replayed(batch) if self._replays else self._eager.forward_backward(batch)

    def _record(self, batch: Batch) -> None:
        """Record both graphs, or log the reason why they cannot be recorded."""
        reason = _failure(lambda: self._record_microbatches(batch))
        if reason is None:
            self._say(f"forward and backward of a microbatch are replayed, after {WARM_UP_STEPS} eager steps")
        else:
            self._give_up(reason)

    def _say(self, text: str) -> None:
        self.note = f"{self.note}; {text}" if self.note else f"CUDA graphs: {text}"

    def _record_microbatches(self, batch: Batch) -> None:
        eager = self._eager
        first = batch.part(0, eager.num_microbatches)
        inputs = self._inputs = first.copied()
        total = self._total = torch.zeros((), dtype=torch.float64, device=eager.device)
        if first.packed is not None:
            eager.loss.hold(eager.device)
        if self._records_update:
            self._numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=eager.device)
        self._stage.zero_grad(set_to_none=True)

        def begin() -> None:
            eager.begin()
            total.copy_(eager.microbatch(inputs))

        def accumulate() -> None:
            total.add_(eager.microbatch(inputs))

        replays = [self._recorder.record(begin)]
        if eager.num_microbatches > 1:
            replays.append(self._recorder.record(accumulate))
        self._gradients = [(each, each.grad) for each in self._stage.parameters() if each.grad is not None]
        self._replays = replays

    def _give_up(self, reason: str) -> None:
        self._given_up, self._inputs, self._total, self._numbers = True, None, None, None
        whole = whole_state(self._stage)
        if whole is not None:
            whole.abandon()
        self._stage.zero_grad(set_to_none=True)
        self._eager.loss.let_go()
        self._recorder.drop()
        self._say(f"not recorded, so steps stay eager: {reason}")

    def _replayed(self, batch: Batch) -> Tensor:
        """The microbatches, by the graphs; afterwards the parameters have their gradients again, for the optimizer."""
        inputs, total = self._inputs, self._total
        if inputs is None or total is None:
            raise RuntimeError("graphs without inputs")
        if batch.packed is not None:
            self._eager.loss.divide_by(batch.packed.num_targets)
        for index in range(self._eager.num_microbatches):
            part = batch.part(index, self._eager.num_microbatches)
            torch._foreach_copy_(inputs.tensors(), part.tensors())
            self._replays[min(index, 1)]()
        self._hand_out_gradients()
        return total.clone()

    def _hand_out_gradients(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def update(self, work: Callable[[Tensor], None], numbers: Tensor) -> None:
        """Update by the gradients, and drop them.

        Args:
            work: The update by a step's numbers, which it reads on the device only.
            numbers: Numbers of this step, on the host.
        """
        if self._records_update and self._replays:
            self._records_update = False
            self._record_update(work)
        if self._update is None or self._numbers is None:
            work(numbers.to(self._eager.device, non_blocking=True, copy=True))
            return
        self._numbers.copy_(numbers, non_blocking=True)
        self._update()
        self._stage.zero_grad(set_to_none=True)

    def _record_update(self, work: Callable[[Tensor], None]) -> None:
        """Record the update behind the microbatches, or say in the log why it cannot be: they are replayed all the same."""
        numbers = self._numbers
        if numbers is None:
            raise RuntimeError("graphs without numbers")

        def record() -> None:
            self._update = self._recorder.record(lambda: work(numbers))

        reason = _failure(record)
        if reason is None:
            self._say("the update is, too")
            return
        self._numbers = None
        self._recorder.drop()
        self._hand_out_gradients()
        self._say(f"the update is not recorded, so it stays eager: {reason}")


def _failure(record: Callable[[], None]) -> str | None:
    """The reason why a recording fails; None if it does not.

    A traceback keeps the recording's tensors alive, so the function ends before they are given up.
    """
    try:
        record()
    except Exception as failure:
        first: BaseException = failure
        while first.__context__ is not None:  # the capture fails at its end because of the original error
            first = first.__context__
        return f"{type(first).__name__}: {first}".splitlines()[0]
    return None
