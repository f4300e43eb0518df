"""The loss of held-out text: the same rows each time, forward only, without side effects on training."""

import time

import torch
import torch.distributed as dist

from megarun.data.batches import Batches, TokenRows
from megarun.engine.trainer import Trainer
from megarun.job.job import Job
from megarun.launch.interrupt import Interrupt
from megarun.metrics.records import Evaluated, bits_per_byte
from megarun.parallel.apply.forward import ForwardRunner


class Evaluator:
    """Evaluates a trainer's model on the first batches of a held-out token file, in the order of the training seed."""

    def __init__(self, job: Job, trainer: Trainer, source: TokenRows, num_batches: int) -> None:
        self._job, self._trainer, self._num_batches = job, trainer, num_batches
        self._bytes_per_token = source.bytes_per_token
        self._batches = Batches(source, job.spec, trainer.mesh)

    def evaluate(self, step: int, interrupt: Interrupt, control: dist.ProcessGroup) -> Evaluated | None:
        """The loss after `step` optimizer steps; None if a signal interrupts the evaluation. Collective."""
        began, trainer = time.perf_counter(), self._trainer
        runner = ForwardRunner(trainer.stages, self._job.spec, trainer.mesh)
        nats = torch.zeros((), dtype=torch.float64, device=trainer.mesh.device)
        num_labels = 0
        try:
            for index in range(self._num_batches):
                if interrupt.agreed(control):
                    return None
                found, labels = runner.nats(self._batches.at(index))
                nats += found
                num_labels += labels
        finally:
            runner.reshard()
        (loss,) = trainer.read_all(trainer.reduced_loss(nats).reshape(1))
        loss /= num_labels
        bits, num_tokens = bits_per_byte(loss, self._bytes_per_token), self._num_batches * self._job.global_batch_tokens
        return Evaluated(step, loss, bits, num_tokens, time.perf_counter() - began)
