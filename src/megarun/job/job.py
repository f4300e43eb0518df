"""A job: the planned spec with its inventory and layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megaplan.inventory.tensors import Inventory
from megaplan.layout.values import Layout, Slot
from megaplan.plan.document import PlanDocument
from megaplan.spec.models import Spec


@dataclass(frozen=True, slots=True)
class Job:
    """The spec, inventory and layout from which the runtime is built; `layout` has the plan's cuts."""

    spec: Spec
    inventory: Inventory
    layout: Layout

    @classmethod
    def from_plan(cls, plan: PlanDocument) -> Job:
        """The job of a plan."""
        return cls(plan.spec, plan.inventory, plan.layout())

    def with_seed(self, seed: int) -> Job:
        """A copy with another `training.seed`, which is in no digest."""
        training = self.spec.training.model_copy(update={"seed": seed})
        return replace(self, spec=self.spec.model_copy(update={"training": training}))

    def slots(self, pp_rank: int) -> tuple[Slot, ...]:
        """The slots of a pipeline rank, by chunk."""
        return self.layout.of_rank(pp_rank)

    @property
    def global_batch(self) -> tuple[int, int]:
        """Sequences of one optimizer step, over all microbatches and data ranks, and tokens of each."""
        spec = self.spec
        sequences = spec.batch.micro_batch_size * spec.schedule.microbatches_per_update * spec.mesh.dp_replicate * spec.mesh.dp_shard
        return sequences, spec.batch.seq_length

    @property
    def global_batch_tokens(self) -> int:
        """Tokens of one optimizer step."""
        sequences, length = self.global_batch
        return sequences * length
