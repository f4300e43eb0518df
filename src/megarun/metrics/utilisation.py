"""Model FLOPs utilisation (MFU) of a job."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megaplan.cost.model import model_costs
from megaplan.spec.device import device_of
from megarun.job.job import Job


@dataclass(frozen=True, slots=True)
class Utilisation:
    """What a job's throughput is measured by.

    Attributes:
        flops_per_token: Model FLOPs of one token's forward and backward.
        peak_flops: FLOPs a second of all planned devices; None where it does not run on such.
    """

    flops_per_token: int
    peak_flops: int | None

    @classmethod
    def of(cls, job: Job, device: torch.device) -> Utilisation:
        """Of a job that runs on devices of a kind."""
        spec = job.spec
        peak = device_of(spec.device).peak_flops[spec.precision.params].value * spec.mesh.world_size
        return cls(model_costs(spec, job.inventory).model_flops, peak if device.type == "cuda" else None)

    def rates(self, tokens_per_second: float) -> tuple[float, float | None]:
        """Model FLOPs a second, and the part of the peak that they are."""
        rate = self.flops_per_token * tokens_per_second
        return rate, None if self.peak_flops is None else rate / self.peak_flops
