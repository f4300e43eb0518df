"""The losses of E blocks' routers, from every stage (R-13).

An expert's load is counted over one sequence, all its tokens on whichever ranks. So a loss does not depend on how a batch falls on ranks
and microbatches, and no count waits for another microbatch. Each loss has the factor of its part in the whole batch and joins the backward
where it arises, so a schedule may run it when it likes; tokens, microbatches, layers and ranks simply add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from megaplan.spec.models import Spec


@dataclass(frozen=True, slots=True)
class LossFactors:
    """What `megakernels.router_losses` multiplies by.

    Attributes:
        balance: Coefficient · E / (k · T² · sequences of the batch): E · Σ f P, its mean over sequences.
        z: Coefficient / tokens of the batch.
    """

    balance: float
    z: float


def loss_factors(spec: Spec) -> LossFactors | None:
    """The factors of a spec's routers; None if they have no losses."""
    moe = spec.model.moe
    if moe is None or not moe.has_router_losses:
        return None
    num_tokens = spec.global_batch_tokens
    balance = moe.balance_loss_coefficient * moe.num_experts / (moe.top_k * spec.batch.seq_length * num_tokens)
    return LossFactors(balance, moe.z_loss_coefficient / num_tokens)
