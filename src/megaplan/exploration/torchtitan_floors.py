"""Lower bounds on the largest peak of a torchtitan layout over all cuts: parameters and optimizer state of a mean pipeline rank."""

from collections.abc import Sequence

from megaplan.budget.torchtitan import titan_sizes
from megaplan.exploration.any_floors import AnyFloors
from megaplan.exploration.recompute import STRENGTH
from megaplan.exploration.values import LayoutChoice, MemoryPolicy, SpecOf
from megaplan.hosts.megarun.sizes import Sizes
from megaplan.hosts.megarun.storage import block_storage
from megaplan.inventory.tensors import Inventory
from megaplan.partition.layer_bytes import stored_needs
from megaplan.spec.models import Spec


class TorchtitanFloors(AnyFloors):
    """Lower bounds for one model under host torchtitan."""

    def __init__(self, inventory: Inventory, _spec: Spec) -> None:
        self._inventory = inventory
        self._stored: dict[Sizes, int] = {}

    def peak_bytes(self, spec: Spec) -> int:
        """Lower bound on peak memory over all cuts."""
        return -(-self.stored_bytes(spec) // spec.mesh.pp)

    def peak_on(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> int:
        """See `peak_bytes`."""
        return self.peak_bytes(spec_of(layout, policy))

    def shared_bytes(self, spec: Spec) -> int:
        """The bound of `peak_bytes`, which examines no schedule."""
        return self.peak_bytes(spec)

    def least_on(self, mesh: LayoutChoice, policies: Sequence[MemoryPolicy], spec_of: SpecOf) -> int:
        """The same for every policy."""
        return self.peak_bytes(spec_of(mesh, policies[0]))

    def stored_bytes(self, spec: Spec) -> int:
        """Stored bytes of all blocks on one rank of each stage, gradient shards included."""
        sizes = titan_sizes(spec)
        if sizes not in self._stored:
            makes = self._inventory.makes
            needs = [(stored_needs(block_storage(sizes, block), muon=False), count) for block, count in makes]
            self._stored[sizes] = sum((need.static_bytes + need.update_bytes) * count for need, count in needs)
        return self._stored[sizes]

    def kept_bytes(self, spec: Spec) -> int:
        """Key by which policies are ordered: more recompute gives less."""
        return -STRENGTH.index(spec.recompute.default)
