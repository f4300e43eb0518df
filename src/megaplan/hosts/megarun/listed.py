"""The order in which FSDP2 lists a block's tensors, and the additional bytes while it fills or cuts them one after another.

On a mesh of one rank it fills gathered tensors from casts, and replaces them by the kept part.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import prod

from megaplan.families.registry import FAMILIES
from megaplan.hosts.megarun.sizes import Sizes
from megaplan.inventory.tensors import Block, Group, Outside, Owner, ParamTensor
from megaplan.spec.layout import keepers_of

EXPERT_PARALLEL, MATRIX, FROZEN = Owner.EXPERT_PARALLEL, Group.MATRIX, Group.FROZEN
LAST_OWN = {family.letter: family.last_own for family in FAMILIES.values() if family.last_own}
"""Last parameter that FSDP2 lists for a family whose blocks have direct parameters, which follow their children's parameters."""
ORDER = (
    "vision",
    "projector",
    "embedding",
    "ngram",
    "structure",
    "platform",
    "layer_embeddings",
    "relation_bias",
    "layers",
    "final_norm",
    "head",
    "mtp",
)
"""Modules of a stage in its order (`megarun.model.stage`)."""


def fsdp_order(name: str) -> int:
    """Position of a block's module among those of its slot, in FSDP2's order of their parameters."""
    return ORDER.index(name.partition(".")[0])


def listed_key(block: Block) -> Callable[[str], tuple[int, bool]]:
    """Sort key that gives FSDP2's order of a block's tensors: direct parameters of the block, without a dot in their names, come last.

    A prediction depth has blocks below it, one after another, and each lists its own tensors last.
    """
    inside = block.variant if block.family == Outside.MTP else ()
    blocks = {name: (place, LAST_OWN.get(letter)) for place, (name, letter) in enumerate(inside)}
    own = LAST_OWN.get(block.family)

    def key(name: str) -> tuple[int, bool]:
        first, _, rest = name.partition(".")
        if first in blocks:
            place, last = blocks[first]
            return place, rest == last or "." not in rest
        return len(blocks), name == own or "." not in name

    return key


def casting_bytes(sizes: Sizes, *blocks: Block) -> tuple[int, int]:
    """Additional bytes for the dense and bank tensors of a group, on a one-rank mesh, while each gathered tensor is filled from a cast.

    A cast is freed when the next tensor's input exists, so two are allocated before the next tensor gets its storage. Without FSDP2 there
    is no gather: copies are cast in place.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`wait_for_unshard` with a world size of 1).
    """
    compute = sizes.compute(blocks[0].family)
    if sizes.whole_state or all(sizes.stored(group) is compute for group in (MATRIX, FROZEN)) or min(sizes.degrees) > 1:
        return 0, 0
    fills = [list(chain.from_iterable(fills_of(sizes, block, expert=expert) for block in blocks)) for expert in (False, True)]
    return 0 if sizes.degrees[0] > 1 else filling_bytes(fills[0]), 0 if sizes.degrees[1] > 1 else filling_bytes(fills[1])


def fills_of(sizes: Sizes, block: Block, *, expert: bool | None = None) -> Iterator[tuple[int, int]]:
    """Bytes of a block's gathered tensors and of their casts, in FSDP2's order; by `expert`, of dense or bank tensors alone."""
    key = listed_key(block)
    for tensor, elements in sorted(zip(block.tensors, block.sizes, strict=True), key=lambda each: key(each[0].name)):
        if expert is None or (tensor.owner is EXPERT_PARALLEL) is expert:
            used = sizes.used(tensor.group, block.family)
            size = (elements if sizes.whole else local_part(tensor, sizes)[1]) * used.bytes
            yield size, 0 if sizes.stored(tensor.group) is used else size


def filling_bytes(fills: Iterable[tuple[int, int]]) -> int:
    """Most bytes in addition to the gathered tensors while they are filled in this order, from their bytes and those of their casts."""
    most = filled = before = 0
    for size, cast in fills:
        most = max(most, filled + before + cast, filled + size + cast)
        filled, before = filled + size, cast
    return most - filled


def cutting_bytes(sizes: Sizes, block: Block, *, packed: bool = False) -> tuple[int, int]:
    """Additional bytes for the dense and bank tensors while each gathered tensor is replaced by the part that a rank keeps.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`to_sharded_post_forward`).
    """
    found, key = [0, 0], listed_key(block)
    for expert in (False, True):
        degree, keepers = sizes.degrees[expert], keepers_of(sizes.kept_over, sizes.degrees[expert])
        if keepers == degree or sizes.whole_state:
            continue
        left = 0
        for tensor in sorted(block.tensors, key=lambda each: key(each.name)):
            if (tensor.owner is EXPERT_PARALLEL) is expert:
                shape, elements = local_part(tensor, sizes)
                rows = shape[0] * shape[1] if expert else shape[0]
                chunk = -(-rows // degree) * (elements // rows) if sizes.padded else -(-elements // degree)
                low = sizes.packs.shard_bytes(block.family, tensor.name, shape) if packed and sizes.packs else None
                nbytes = degree * (chunk * sizes.used(tensor.group, block.family).bytes if low is None else low)
                found[expert], left = max(found[expert], left + nbytes // keepers), left + nbytes // keepers - nbytes
    return found[0], found[1]


def local_part(tensor: ParamTensor, sizes: Sizes) -> tuple[tuple[int, ...], int]:
    """The shape of a rank's part, and its number of elements."""
    shape = tensor.local_shape(sizes.tp, sizes.ep, sizes.etp)
    return shape, prod(shape)
