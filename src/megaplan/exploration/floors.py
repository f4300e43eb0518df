"""Lower bounds on the largest peak of a layout over all cuts, from sums over the whole model.

At one of its forwards, rank r of a pipeline holds its parameters and moments S_r; at least a_r microbatches on each of its chunks, a_r K_r;
and, if its chunks have all run backward (forward), their unsharded gradients G_r and gathered parameters P_r: S_r + a_r K_r + g_r G_r + t_r
P_r ≤ C. The parts of all ranks add up to the whole model's, so any weights w_r give a bound of C; two are tried, w_r = 1 and w_r = 1 / a_r.
When the update begins, all ranks hold parameters, optimizer state and gradient shards.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from megaplan.exploration.any_floors import AnyFloors
from megaplan.exploration.values import LayoutChoice, MemoryPolicy, SpecOf
from megaplan.families.registry import FAMILIES
from megaplan.hosts.megarun.embedding import boundary_bytes
from megaplan.hosts.megarun.ledger import block_bytes
from megaplan.hosts.megarun.sizes import storage_sizes
from megaplan.hosts.megarun.storage import block_storage
from megaplan.inventory.tensors import Block, Inventory
from megaplan.partition.layer_bytes import BlockNeeds, stored_needs
from megaplan.schedules.states import FORWARD, REDUCED, UNTOUCHED, rank_states
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec


class Floors(AnyFloors):
    """Lower bounds for one model under host megarun."""

    def __init__(self, inventory: Inventory, _spec: Spec | None = None) -> None:
        self._inventory = inventory
        self._wholes: dict[tuple[object, ...], BlockNeeds] = {}
        self._kept: dict[tuple[object, ...], int] = {}
        self._kinds: list[tuple[int, int]] | None = None

    def peak_bytes(self, spec: Spec) -> int:
        """Lower bound on peak memory over all cuts."""
        whole, kept = self._whole(spec), self.kept_bytes(spec)
        if not spec.mesh.is_pipelined:
            return whole.static_bytes + max(kept, whole.update_bytes)
        mesh, schedule = spec.mesh, spec.schedule
        keeps = not spec.sharding.reshard_after_forward
        ranks = _held(schedule.kind, mesh.pp, mesh.vpp, schedule.num_microbatches, keeps, spec.interleaves_pairs)
        least = -(-(whole.static_bytes + whole.update_bytes) // spec.pp_shares)
        for choice in range(len(ranks[0])):
            held = [found[choice] for found in ranks]
            graded, gathered = min(each[1] for each in held), min(each[2] for each in held)
            rest = whole.at(0, graded, gathered)
            counts = [each[0] for each in held]
            least = max(least, -(-(rest + min(counts) * kept) // spec.pp_shares))
            if min(counts):
                each = spec.num_copies * (Fraction(rest, max(counts)) + kept)
                least = max(least, int(each / sum(Fraction(1, count) for count in counts)))
        return least

    def shared_bytes(self, spec: Spec) -> int:
        """A smaller bound that examines no schedule: some rank of a pipeline has at least the mean of all ranks' bytes."""
        whole = self._whole(spec)
        return -(-(whole.static_bytes + max(self.kept_bytes(spec), whole.update_bytes)) // spec.pp_shares)

    def stored_bytes(self, spec: Spec) -> int:
        """Parameters, gradients and optimizer state of the whole model: other meshes have padding and copies in addition."""
        whole = self._whole(spec)
        return whole.static_bytes + whole.update_bytes

    def peak_on(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> int:
        """See `peak_bytes`."""
        return self.peak_bytes(spec_of(layout, policy))

    def least_on(self, mesh: LayoutChoice, policies: Sequence[MemoryPolicy], spec_of: SpecOf) -> int:
        """The smallest bound over several policies and any schedule."""
        recomputes = [policy.recompute for policy in policies]
        stored = {policy._replace(recompute=(), full_layers=0, modules=()) for policy in policies}  # stored bytes are the same
        return min(self._least_bytes(spec_of(mesh, policy), recomputes) for policy in stored)

    def _least_bytes(self, spec: Spec, options: Sequence[Sequence[tuple[str, str]]]) -> int:
        letters: dict[str, set[str]] = {}
        for option in options:
            for letter, policy in option:
                letters.setdefault(letter, set()).add(policy)
        total, layers = 0, self._inventory.layers
        for index, count in self._layer_kinds(spec):
            block = layers[index]
            policies = {"none"} if index == len(layers) - 1 else letters[block.family]
            total += count * min([self._layer(spec, f"layers.{index}", block, policy, index) for policy in policies])
        kept = max(0, total - len(self._inventory.layers) * boundary_bytes(local_dims(spec)))
        whole = self._whole(spec)
        return -(-(whole.static_bytes + max(kept, whole.update_bytes)) // spec.pp_shares)

    def _whole(self, spec: Spec) -> BlockNeeds:
        """Stored bytes of all blocks on one rank of each stage; copies count once."""
        mesh = spec.mesh
        offloads = spec.host.optimizer_offload is not None
        key = mesh.tp, mesh.ep, mesh.etp, mesh.dp_shard, mesh.efsdp, mesh.dp_replicate == 1, spec.precision.grads, offloads
        if key not in self._wholes:
            sizes = storage_sizes(spec)
            found = []
            for block, count in self._inventory.makes:
                needs = stored_needs(block_storage(sizes, block), muon=spec.optimizer.uses_muon, offloads=offloads)
                found.append([count * size for size in needs])
            self._wholes[key] = BlockNeeds(*map(sum, zip(*found, strict=True)))
        return self._wholes[key]

    def kept_bytes(self, spec: Spec) -> int:
        """Bytes that layers keep for one microbatch, without inputs that may be in a receive buffer."""
        layers, total = self._inventory.layers, 0
        for index, count in self._layer_kinds(spec):
            block = layers[index]
            if spec.offloads(index, block.family):
                continue
            total += count * self._layer(spec, f"layers.{index}", block, spec.policy(index, block.family), index)
        return max(0, total - spec.mesh.num_slots * boundary_bytes(local_dims(spec)))

    def _layer_kinds(self, spec: Spec) -> list[tuple[int, int]]:
        """Layers that save different bytes, each with its count; the last one, which is never recomputed, is separate."""
        if self._kinds is None:
            found: dict[tuple[object, ...], list[int]] = {}
            for index, block in enumerate(self._inventory.layers):
                family = FAMILIES[block.family]
                is_last = index == len(self._inventory.layers) - 1
                operations = family.operations(family.section_of(spec.model), index)
                found.setdefault((id(block), operations, is_last, self._is_low(spec, block, index)), []).append(index)
            self._kinds = [(indices[0], len(indices)) for indices in found.values()]
        return self._kinds

    def _is_low(self, spec: Spec, block: Block, index: int) -> bool:
        return spec.precision.is_low(block.family, index, len(self._inventory.layers))

    def _layer(self, spec: Spec, name: str, block: Block, policy: str, index: int) -> int:
        """Bytes that a layer keeps under a policy, independent of the spec's; the last one is never recomputed."""
        mesh, family = spec.mesh, FAMILIES[block.family]
        policy = "none" if index == len(self._inventory.layers) - 1 else policy
        experts = (mesh.ep, mesh.etp) if family.banks else ()
        operations = family.operations(family.section_of(spec.model), index)
        degrees = mesh.tp, mesh.cp, spec.batch.micro_batch_size, spec.host.kernels, mesh.is_pipelined, experts
        key = (id(block), operations, policy, degrees, self._is_low(spec, block, index))
        found = self._kept.get(key)
        if found is None:
            dims = local_dims(spec, is_last_cp_rank=False)
            ledger = block_bytes(_plain(spec, block.family, policy), dims, name, block, start=len(self._inventory.layers))
            found = self._kept[key] = ledger.saved_bytes + (boundary_bytes(dims) if ledger.keeps_input else 0)
        return found


def _plain(spec: Spec, letter: str, policy: str) -> Spec:
    """The spec with a policy for a letter, and a schedule without split backwards: the bytes kept at a forward are the same."""
    recompute = spec.recompute.model_copy(update={"blocks": {**spec.recompute.blocks, letter: policy}})
    return spec.model_copy(update={"recompute": recompute, "schedule": spec.schedule.model_copy(update={"kind": "1f1b"})})


def floors_of(spec: Spec, inventory: Inventory) -> AnyFloors:
    """The lower bounds of the spec's host."""
    if spec.host.kind.floors is None:
        return AnyFloors()
    floors: AnyFloors = spec.host.kind.floors(inventory, spec)
    return floors


@lru_cache(maxsize=512)
def _held(kind: str, pp: int, vpp: int, count: int, keeps: bool, interleaved: bool) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Two forwards of each rank: the fewest microbatches on a chunk, and True if all gradients and gathered parameters exist.

    The first has the most microbatches; the second, the most after every chunk's first backward.
    """
    found = []
    for of_rank in rank_states(kind, pp, vpp, count, interleaved=interleaved):
        most, graded = (0, 0, 0), (0, 0, 0)
        for point in of_rank:
            if point.kind is not FORWARD or point.partner >= 0:  # a pair in turns never holds all of both its microbatches
                continue
            exist = int(all(point.weight_grads) and REDUCED not in point.states)
            touched = int(keeps and not {UNTOUCHED, REDUCED} & {state for index, state in enumerate(point.states) if index != point.chunk})
            each = (min(point.in_flight), exist, touched)
            most = max(most, each)
            graded = max(graded, each, key=lambda one: (one[1], one[0], one[2]))
        found.append((most, graded))
    return tuple(found)
