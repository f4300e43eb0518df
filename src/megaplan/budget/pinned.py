"""Page-locked copies of parameters in host memory: torch's allocator rounds each tensor up to a power of two.

Source: `aten/src/ATen/core/CachingHostAllocator.h` of pytorch/pytorch, `allocate`.
"""

from collections import Counter
from math import prod

from megaplan.inventory.tensors import Inventory, Owner
from megaplan.layout.ranks import Layout
from megaplan.spec.models import Spec


def page_locked_bytes(size: int) -> int:
    """Bytes that a page-locked tensor takes."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def pinned_bytes(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[int, ...]:
    """Bytes of a page-locked copy of a rank's parameters, tensor by tensor, by pipeline rank."""
    found: tuple[Counter[int], ...] = spec.host.kind.tensors(spec, inventory, layout)
    return tuple(sum(number * page_locked_bytes(size) for size, number in tensors.items()) for tensors in found)


def shard_bytes(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[Counter[int], ...]:
    """Bytes of each parameter's shard on a rank, and the number of such shards, by pipeline rank; a bank of experts is one tensor."""
    mesh, size = spec.mesh, spec.precision.master.bytes
    found = []
    for pp_rank in range(mesh.pp):
        tensors: Counter[int] = Counter()
        for slot in layout.of_rank(pp_rank):
            for name in slot.blocks:
                for tensor in inventory.block(name).tensors:
                    ranks = mesh.efsdp if tensor.owner is Owner.EXPERT_PARALLEL else mesh.dp_shard * mesh.cp
                    elements = prod(tensor.local_shape(mesh.tp, mesh.ep, mesh.etp))
                    tensors[-(-elements // ranks) * size] += 1
        found.append(tensors)
    return tuple(found)
