"""Transfers between ranks that a layer waits for, and the boundary between stages.

Counted, each wholly exposed, since megarun overlaps none of them with the layer's own work (`megaplan.cost.turns` has the exchanges that
another microbatch's work hides):

- Tensor groups: a sharded block gathers its normed input and scatters the sum of its output in forward; backward does both in reverse and
  gathers the input once more, since gathered inputs are not kept. MLA gathers its narrow latents instead.
- Context groups: attention gathers keys and values, again in backward, and scatters the sum of their gradients. Recompute gathers them too.
- Expert groups: rows go out and come back, forward and backward; ranks with slices of an expert gather them, and scatter their sums.
  With `host.moe_dispatcher: allgather` megarun's ranks gather all tokens, and scatter the sums of their rows.

Not counted: what happens once per step or outside the layers (gathering parameters and reducing gradients of FSDP2, the optimizer).

Collectives over n ranks whose gathered payload is S bytes: latency + (n − 1) / n · S / bandwidth. In a node that is the fabric's; across
nodes the slower of the fabric and the group's adapters of one node together, an upper bound. Each step of the ring from rank to rank adds a
latency, which grows with n. Sums over several nodes also run in a tree, whose steps grow with the logarithm of the nodes. An exchange of
rows cannot share adapters: each rank sends through its own.

Source: arXiv:2205.05198, section 4.2.2 (tensor groups); NCCL's tuning model (latency and bandwidth terms).
"""

from dataclasses import dataclass
from fractions import Fraction

from megaplan.blocks.work import Workload
from megaplan.cost.rates import TREE, Rates
from megaplan.cost.towers import TowerWorks
from megaplan.families.family import Exchanges
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Block
from megaplan.spec.host import fabric_size
from megaplan.spec.local import boundary, boundary_sizes, local_dims
from megaplan.spec.models import Spec


@dataclass(frozen=True, slots=True)
class Transfers:
    """Times that a layer waits for transfers, in nanoseconds.

    Attributes:
        forward_ns: In F.
        input_ns: In I.
        again_ns: Transfers in F that full recompute of the block repeats.
        core_again_ns: Part of these that selective recompute waits for once more: keys and values of the context group.
    """

    forward_ns: int = 0
    input_ns: int = 0
    again_ns: int = 0
    core_again_ns: int = 0

    def __add__(self, other: "Transfers") -> "Transfers":
        return Transfers(
            self.forward_ns + other.forward_ns,
            self.input_ns + other.input_ns,
            self.again_ns + other.again_ns,
            self.core_again_ns + other.core_again_ns,
        )

    def repeated_ns(self, policy: str) -> int:
        """Time that a recompute policy waits once more."""
        return {"none": 0, "selective": self.core_again_ns}.get(policy, self.again_ns)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks of one axis: how many, and the distance of two neighbours; they are in `stride · size` consecutive ranks."""

    size: int
    stride: int

    def crosses(self, spec: Spec) -> bool:
        """True if any such group leaves a node."""
        span, per_node = self.size * self.stride, fabric_size(spec.device)
        return spec.mesh.world_size > per_node and per_node % span != 0

    def per_node(self, spec: Spec) -> int:
        """Smallest number of its ranks that share a node."""
        return min(self.size, max(1, fabric_size(spec.device) // self.stride)) if self.crosses(spec) else self.size

    def nodes(self, spec: Spec) -> int:
        """Number of nodes that it spans."""
        return -(-self.size // self.per_node(spec))


def gather_ns(rates: Rates, spec: Spec, group: RankGroup, payload_bytes: int, count: int = 1) -> int:
    """All-gathers or reduce-scatters; the payload is the full tensor, after a gather or before a scatter.

    Args:
        rates: Rates of the device.
        spec: The spec.
        group: Ranks of each.
        payload_bytes: Bytes of all of them.
        count: Number of collectives.
    """
    if group.size == 1:
        return 0
    slowest, nodes = _moved_ns(rates, spec, group, payload_bytes), group.nodes(spec)
    if nodes == 1 or not rates.rings:
        return rates.latency_ns + slowest
    fabric, network = count * (group.size - nodes), count * (nodes - 1)
    around = [fabric * ring.fabric_ns + network * ring.network_ns + slowest * 100 // ring.percent for ring in rates.rings]
    return rates.latency_ns + min(around)


def sum_ns(rates: Rates, spec: Spec, group: RankGroup, payload_bytes: int, count: int = 1) -> int:
    """All-reduces: around a ring or, if that is faster over several nodes, in a tree; arguments as for `gather_ns`."""
    around, nodes = 2 * gather_ns(rates, spec, group, payload_bytes, count), group.nodes(spec)
    if nodes == 1 or not rates.rings:
        return around
    depth = (nodes - 1).bit_length()
    steps = 2 * count * ((group.per_node(spec) - 1) * TREE.fabric_ns + depth * TREE.network_ns)
    return min(around, 2 * rates.latency_ns + steps + 2 * _moved_ns(rates, spec, group, payload_bytes) * 100 // TREE.percent)


def _moved_ns(rates: Rates, spec: Spec, group: RankGroup, payload_bytes: int) -> int:
    """Time of the bytes of a gather on the slowest link."""
    moved = payload_bytes * (group.size - 1) // group.size
    slowest = rates.node_ns(moved)
    return max(slowest, rates.network_ns(moved, group.per_node(spec))) if group.crosses(spec) else slowest


def exchange_ns(rates: Rates, spec: Spec, group: RankGroup, sent_bytes: int) -> int:
    """All-to-all in which a rank spreads `sent_bytes` evenly over the group, itself included."""
    if group.size == 1:
        return 0
    near = group.per_node(spec)
    intra, inter = sent_bytes * (near - 1) // group.size, sent_bytes * (group.size - near) // group.size
    return rates.latency_ns + max(rates.node_ns(intra), rates.network_ns(inter))


def boundary_times(rates: Rates, spec: Spec, *, leaves: bool = False) -> tuple[int, ...]:
    """`boundary_ns` before each layer, with the values sent there; one number if all are equal, 0 without a pipeline."""
    if spec.mesh.pp == 1:
        return (0,)
    dims = local_dims(spec)
    sizes = boundary_sizes(spec, dims) if spec.model.payload else [boundary(spec, dims, 0).bytes]
    found = [boundary_ns(rates, spec, size, leaves=leaves) for size in sizes]
    return tuple(found if min(found) < max(found) else found[:1])


def boundary_ns(rates: Rates, spec: Spec, sent_bytes: int, *, leaves: bool = False) -> int:
    """One microbatch's boundary from a pipeline rank to the next; over the network as soon as one such link leaves a node.

    Neighbouring pipeline ranks differ by world size / pp, and all of them together span the job: they leave a node if the job does,
    or if `leaves` says so.
    """
    leaves = leaves or spec.mesh.world_size > spec.device.per_node
    return rates.latency_ns + (rates.network_ns(sent_bytes) if leaves else rates.node_ns(sent_bytes))


def layer_transfers(rates: Rates, spec: Spec, load: Workload, block: Block) -> Transfers:
    """Times for which one layer waits for transfers."""
    family = FAMILIES[block.family]
    return block_transfers(rates, spec, load, family.exchanges(family.section_of(spec.model), spec.model.hidden_size, block.variant))


def block_transfers(rates: Rates, spec: Spec, load: Workload, exchanges: Exchanges) -> Transfers:
    """Times for which a block waits for its groups: its tensor group, its context group, and its expert group."""
    found = tensor_transfers(rates, spec, load, exchanges.gathered_width) if exchanges.sharded else Transfers()
    if exchanges.context_width:
        found += context_transfers(rates, spec, load, exchanges)
    return found + row_transfers(rates, spec, load, exchanges) if exchanges.rows else found


def context_transfers(rates: Rates, spec: Spec, load: Workload, exchanges: Exchanges) -> Transfers:
    """Keys and values of a context group, or the latents from which its ranks make them.

    Backward gathers them again and sums their gradients: those of keys and values too where the up-projection multiplies in eight bits.
    """
    gathers = load.gathers_latents and exchanges.latent_width > 0
    width = exchanges.latent_width if gathers else exchanges.context_width // load.tp
    summed = exchanges.expanded_width // load.tp + exchanges.rotary_width if gathers and load.low else width
    group, tokens = RankGroup(spec.mesh.cp, spec.mesh.tp), load.num_tokens * spec.mesh.cp
    once, sums = (gather_ns(rates, spec, group, tokens * each * load.itemsize) for each in (width, summed))
    return Transfers(once, once + sums, once, once)


def tensor_transfers(rates: Rates, spec: Spec, load: Workload, gathered_width: int | None = None, width: int | None = None) -> Transfers:
    """Transfers of a sharded block.

    Its output has the width `width` (by default the hidden size), its input `gathered_width` (by default that of the output).
    """
    group, row = RankGroup(spec.mesh.tp, 1), load.num_tokens * load.itemsize
    width = width or spec.model.hidden_size
    gather, scatter = (gather_ns(rates, spec, group, row * each) for each in (gathered_width or width, width))
    return Transfers(gather + scatter, 2 * gather + scatter, gather)


def tower_transfers(rates: Rates, spec: Spec, part: TowerWorks) -> Transfers:
    """Transfers of a part of an encoder that a tensor group shards: the streams of its blocks, or at the end the rows of the projection."""
    found = Transfers()
    if part.load.tp > 1 and part.width:
        found = tensor_transfers(rates, spec, part.load, width=part.width)
    elif part.load.tp > 1 and part.gathered:
        once = gather_ns(rates, spec, RankGroup(spec.mesh.tp, 1), part.load.num_tokens * part.load.itemsize * part.gathered)
        found = Transfers(once, once)
    return found if part.has_backward else Transfers(found.forward_ns)


def vocabulary_transfers(rates: Rates, spec: Spec, load: Workload) -> tuple[Transfers, Transfers]:
    """Embedding and head under `vocab_parallel`: the lookup's rows are scattered, the head's input is gathered; backward in reverse."""
    if not spec.mesh.vocab_parallel:
        return Transfers(), Transfers()
    once = gather_ns(rates, spec, RankGroup(spec.mesh.tp, 1), load.num_tokens * load.itemsize * spec.model.hidden_size)
    return Transfers(once, once), Transfers(once, 2 * once)


def row_transfers(rates: Rates, spec: Spec, load: Workload, exchanges: Exchanges) -> Transfers:
    """Transfers of rows to the ranks of their experts and back, or of the tokens of all these ranks."""
    if load.gathers_tokens:
        return token_transfers(rates, spec, load, exchanges)
    once = sum(rows_ns(rates, spec, load, exchanges))
    return Transfers(2 * once, 2 * once)


def rows_ns(rates: Rates, spec: Spec, load: Workload, exchanges: Exchanges) -> tuple[int, int]:
    """An exchange of the rows that the rank sends, or of those that the busiest expert rank receives.

    Adds a gather of rows among the ranks with slices of an expert, or a reduce-scatter of their results.
    """
    row = (exchanges.row_width or spec.model.hidden_size) * load.itemsize
    sent = load.num_tokens // load.tp * exchanges.rows * row
    moe = spec.model.moe
    share = Fraction(1) if moe is None else moe.busiest_share(exchanges.skew, load.ep) * Fraction(moe.num_experts, moe.num_choices)
    moved = sent * share.numerator // share.denominator
    exchanged = exchange_ns(rates, spec, RankGroup(load.ep, load.etp), moved)
    return exchanged, gather_ns(rates, spec, RankGroup(load.etp, 1), moved * load.etp)


def token_transfers(rates: Rates, spec: Spec, load: Workload, exchanges: Exchanges) -> Transfers:
    """Tokens of all ranks that share experts, gathered over EP and then over ETP, and the sums that are scattered in reverse."""
    own = load.num_tokens // load.tp * (exchanges.row_width or spec.model.hidden_size) * load.itemsize
    once = gather_ns(rates, spec, RankGroup(load.ep, load.etp), own * load.ep)
    once += gather_ns(rates, spec, RankGroup(load.etp, 1), own * load.ep * load.etp)
    return Transfers(2 * once, 2 * once)
