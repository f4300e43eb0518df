"""The losses of E blocks' routers, from every stage (R-13).

An expert's load is counted over one sequence, all its tokens on whichever ranks. So a loss does not depend on how a batch falls on ranks
and microbatches, and no count waits for another microbatch. Each loss has the factor of its part in the whole batch and joins the backward
where it arises, so a schedule may run it when it likes; tokens, microbatches, layers and ranks simply add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaplan.spec.models import Spec


@dataclass(frozen=True, slots=True)
class LossFactors:
    """What `megakernels.moe.router_losses` multiplies by.

    Attributes:
        balance: Coefficient · E / (k · T² · sequences of the batch): E · Σ f P, its mean over sequences.
        z: Coefficient / tokens of the batch.
    """

    balance: float
    z: float


def loss_factors(spec: Spec) -> LossFactors | None:
    """The factors of a spec's routers; None if they have no losses."""
    moe, batch, mesh = spec.model.moe, spec.batch, spec.mesh
    if moe is None or not moe.has_router_losses:
        return None
    num_sequences = batch.micro_batch_size * spec.schedule.microbatches_per_update * mesh.dp_replicate * mesh.dp_shard
    num_tokens = num_sequences * batch.seq_length
    balance = moe.balance_loss_coefficient * moe.num_experts / (moe.top_k * batch.seq_length * num_tokens)
    return LossFactors(balance, moe.z_loss_coefficient / num_tokens)


def start_losses(stages: Iterable[nn.Module]) -> None:
    """Begin the sums of a step."""
    for sums in _sums(stages):
        sums.zero_()


def sum_losses(stages: Iterable[nn.Module], device: torch.device) -> Tensor:
    """This rank's balance loss and z-loss of a step, fp64 [2]."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for sums in _sums(stages):
        total += sums
    return total


def _sums(stages: Iterable[nn.Module]) -> Iterator[Tensor]:
    return (buffer for stage in stages for name, buffer in stage.named_buffers() if name.endswith(".losses"))
