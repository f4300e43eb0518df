"""A job: the planned spec with its inventory and layout."""

from dataclasses import dataclass, replace

from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout, Slot
from megaplan.plan.document import PlanDocument
from megaplan.spec.models import Spec
from megarun.job.support import refuse_other_orders


@dataclass(frozen=True, slots=True)
class Job:
    """The spec, inventory and layout from which the runtime is built; `layout` has the plan's cuts."""

    spec: Spec
    inventory: Inventory
    layout: Layout

    @classmethod
    def from_plan(cls, plan: PlanDocument) -> "Job":
        """The job of a plan that was read.

        Raises:
            MegaplanError: MP790 if its decisions have orders that differ from this runtime's.
        """
        refuse_other_orders(plan.decisions)
        return cls(plan.spec, plan.inventory, plan.layout())

    def with_seed(self, seed: int) -> "Job":
        """A copy with another `training.seed`, which is in no digest."""
        training = self.spec.training.model_copy(update={"seed": seed})
        return replace(self, spec=self.spec.model_copy(update={"training": training}))

    def slots(self, pp_rank: int) -> tuple[Slot, ...]:
        """The slots of a pipeline rank, by chunk."""
        return self.layout.of_rank(pp_rank)

    @property
    def global_batch(self) -> tuple[int, int]:
        """Sequences of one optimizer step, over all microbatches and data ranks, and tokens of each."""
        return self.spec.global_batch_size, self.spec.batch.seq_length

    @property
    def global_batch_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.spec.global_batch_tokens
