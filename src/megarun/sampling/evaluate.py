"""The loss of a token file under a checkpoint, in one process."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarun.data.batches import Batches
from megarun.data.token_file import TokenFile
from megarun.job.job import Job
from megarun.launch.process_group import Launch, process_group
from megarun.metrics.records import bits_per_byte
from megarun.parallel.apply.forward import ForwardRunner
from megarun.parallel.groups.mesh import build_mesh
from megarun.remote import AnyPath
from megarun.sampling.decode import load_stage


@dataclass(frozen=True, slots=True)
class FileLoss:
    """The loss of rows of a token file.

    Attributes:
        rows: Rows that were read, each of the plan's sequence length.
        labels: Tokens that were predicted.
        loss: Loss of the main prediction, nats a label.
        bytes_per_token: UTF-8 bytes of the file's texts over its tokens.
    """

    rows: int
    labels: int
    loss: float
    bytes_per_token: float

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite above the largest number."""
        return math.exp(self.loss) if self.loss < math.log(torch.finfo(torch.float64).max) else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits that code a byte of text."""
        return bits_per_byte(self.loss, self.bytes_per_token)


def evaluate(checkpoint: AnyPath, saved: Job, source: TokenFile, most_rows: int | None, device: torch.device) -> FileLoss:
    """Compute the loss of a token file's rows, in the order of the plan's seed, one row at a time.

    Args:
        checkpoint: Folder of the checkpoint.
        saved: The job that saved it.
        source: The token file, which fits the job.
        most_rows: Rows to read; all if None.
        device: Device of the model.

    Raises:
        MegaplanError: The checkpoint cannot be read.
    """
    length = saved.spec.batch.seq_length
    stage, spec = load_stage(checkpoint, saved, length, device)
    rows = min(source.num_windows(length), most_rows or source.num_tokens)
    with process_group(Launch(0, 1, 0, dist.HashStore()), device):  # type: ignore[attr-defined]
        mesh = build_mesh(spec.mesh, device)
        runner, batches = ForwardRunner([stage], spec, mesh), Batches(source, spec, mesh)
        nats, labels = torch.zeros((), dtype=torch.float64, device=device), 0
        for index in range(rows):
            found, count = runner.nats(batches.at(index))
            nats += found
            labels += count
    return FileLoss(rows, labels, float(nats) / max(1, labels), source.bytes_per_token)
