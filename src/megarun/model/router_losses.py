"""Router losses of the E blocks of all stages (R-13).

An expert's load is counted over all tokens of one sequence, on all its ranks. So a loss does not depend on how a batch is distributed over
ranks and microbatches, and does not need counts of other microbatches. Each loss is scaled by its share of the global batch and enters the
backward in its own layer, in any order of the schedule; it is summed over tokens, microbatches, layers and ranks.
"""

from dataclasses import dataclass

from megaplan.spec.models import Spec


@dataclass(frozen=True, slots=True)
class LossFactors:
    """Factors for `megakernels.router_losses`.

    Attributes:
        balance: Factor of the balance loss: coefficient · E / (k · T² · sequences of the batch): E · Σ f P, its mean over sequences.
        z: Factor of the z-loss: coefficient / tokens of the batch.
    """

    balance: float
    z: float


def loss_factors(spec: Spec) -> LossFactors | None:
    """The factors of a spec's routers; None if they have no losses."""
    moe = spec.model.moe
    if moe is None or not moe.has_router_losses:
        return None
    num_tokens = spec.global_batch_tokens
    balance = moe.balance_loss_coefficient * moe.num_choices / (moe.top_k * spec.batch.seq_length * num_tokens)
    return LossFactors(balance, moe.z_loss_coefficient / num_tokens)
