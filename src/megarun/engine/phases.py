"""A trainer that says which phase of its run begins: what a trace and a measurement on a GPU both listen to."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megaplan.columns import Phase
from megarun.data.batches import Batch
from megarun.engine.trainer import Trainer


class PhasedTrainer(Trainer):
    """The trainer itself; subclasses hear of every phase but the first, `init`, which is its construction."""

    _phases: Iterator[tuple[Phase, Phase]]
    _running: tuple[Phase, Phase]

    def enter_phase(self, phase: Phase) -> None:
        """A phase begins."""
        raise NotImplementedError

    def start_step(self) -> None:
        """The first phase of the next step begins, before its batch is there."""
        if not hasattr(self, "_phases"):
            self._phases = _phases_of_steps()
        self._running = next(self._phases)
        self.enter_phase(self._running[0])

    def accumulate_gradients(self, batch: Batch) -> Tensor:
        """Forward and backward; what follows is the optimizer's phase."""
        partial = super().accumulate_gradients(batch)
        self.enter_phase(self._running[1])
        return partial


def _phases_of_steps() -> Iterator[tuple[Phase, Phase]]:
    """(forward and backward, optimizer) of the first step, then of every other."""
    yield Phase.FIRST_FORWARD_BACKWARD, Phase.FIRST_OPTIMIZER
    while True:
        yield Phase.FORWARD_BACKWARD, Phase.OPTIMIZER
