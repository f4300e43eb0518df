"""Model FLOPs utilisation (MFU) of a job."""

from dataclasses import dataclass

import torch

from megaplan.cost.model import model_costs
from megaplan.spec.pools import peak_flops
from megarun.job.job import Job


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Converts a job's throughput to FLOP/s and MFU.

    Attributes:
        flops_per_token: Model FLOPs of forward and backward per token.
        peak_flops: Peak FLOP/s of all planned devices; None if the job does not run on GPUs.
    """

    flops_per_token: int
    peak_flops: int | None

    @classmethod
    def of(cls, job: Job, device: torch.device) -> "Utilisation":
        """The utilisation of a job on a type of device."""
        spec = job.spec
        return cls(model_costs(spec, job.inventory).model_flops, peak_flops(spec) if device.type == "cuda" else None)

    def rates(self, tokens_per_second: float) -> tuple[float, float | None]:
        """Model FLOP/s, and their share of the peak (None without a peak)."""
        rate = self.flops_per_token * tokens_per_second
        return rate, None if self.peak_flops is None else rate / self.peak_flops
