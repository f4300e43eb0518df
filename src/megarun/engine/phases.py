"""A trainer that reports the start of each phase, for a trace or a measurement on a GPU."""

from collections.abc import Iterator

from torch import Tensor

from megaplan.columns import Phase
from megarun.data.batches import Batch
from megarun.engine.trainer import Trainer


class PhasedTrainer(Trainer):
    """The trainer with a callback for every phase except the first, `init`, which is its construction."""

    _phases: Iterator[tuple[Phase, Phase]]
    _running: tuple[Phase, Phase]

    def enter_phase(self, phase: Phase) -> None:
        """Called at the start of a phase."""
        raise NotImplementedError

    def start_step(self) -> None:
        """Start the first phase of the next step, before its batch is read."""
        if not hasattr(self, "_phases"):
            self._phases = _phases_of_steps()
        self._running = next(self._phases)
        self.enter_phase(self._running[0])

    def accumulate_gradients(self, batch: Batch) -> Tensor:
        """Forward and backward; then the optimizer phase starts."""
        partial = super().accumulate_gradients(batch)
        self.enter_phase(self._running[1])
        return partial


def _phases_of_steps() -> Iterator[tuple[Phase, Phase]]:
    """Pairs (forward_backward phase, optimizer phase): of the first step, then of every later step."""
    yield Phase.FIRST_FORWARD_BACKWARD, Phase.FIRST_OPTIMIZER
    while True:
        yield Phase.FORWARD_BACKWARD, Phase.OPTIMIZER
