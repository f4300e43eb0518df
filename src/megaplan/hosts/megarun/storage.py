"""FSDP2's memory for a block's parameters: resident shards, gathered copies, gradients, reduce buffers.

Every tensor is sharded along dim 0 of its stored shape in n chunks of ceil(d0 / n) rows; an expert bank is stored as the rows of all its
experts (`ParamTensor.stored_shape`). Each rank stores a full chunk, zero-padded; views of it have the rows without padding. Gathered copies
and reduce inputs hold n padded chunks; unsharded gradients have the tensor's own shape; the gradient shards of a group lie in one padded
buffer. Optimizer state has no padding, so trailing ranks hold less of it.

Dense tensors shard over dp_shard, expert banks over efsdp = dp_shard · cp · tp / (ep · etp). A layer or a prediction depth is a group, and
its expert bank is another group. All other parameters of a slot are the slot's own group, which is never resharded after forward.
Consecutive layers may form one group (`megaplan.hosts.megarun.units`); each bank stays a separate group.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`_init_sharded_param`) and _fsdp_collectives.py (`foreach_all_gather`,
`foreach_reduce`).
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.hosts.allocator import slack_bytes
from megaplan.hosts.megarun.listed import LAST_OWN, casting_bytes, cutting_bytes, filling_bytes, fills_of, listed_key, local_part
from megaplan.hosts.megarun.packed import packed_block
from megaplan.hosts.megarun.sizes import NOTHING, Cast, GroupBytes, MatrixScratch, Sizes, Uneven, together
from megaplan.inventory.tensors import Block, Group, Outside, Owner, ParamTensor, make_block, matrix_round
from megaplan.inventory.towers import STATED
from megaplan.spec.layout import keepers_of
from megaplan.spec.local import PackedShards
from megaplan.tuples import new

UNPACKED = PackedShards()
EXPERT_PARALLEL, REPLICATED, MATRIX, FROZEN = Owner.EXPERT_PARALLEL, Owner.REPLICATED, Group.MATRIX, Group.FROZEN
OWNER_COLUMNS = {
    Owner.REPLICATED: Column.REPLICATED_PARAMS,
    Owner.TENSOR_PARALLEL: Column.TENSOR_PARALLEL_PARAMS,
    Owner.EXPERT_PARALLEL: Column.EXPERT_PARALLEL_PARAMS,
}
RESIDENT_PLACES = {owner: place for place, owner in enumerate(OWNER_COLUMNS)}


class Shard(NamedTuple):
    """A tensor's part on a rank, in construction order.

    Attributes:
        column: Column in `resident_bytes`.
        padded_bytes: A full chunk, as stored.
        expert: True if it belongs to an expert bank.
        uneven: Present if its last chunks are short.
    """

    column: int
    padded_bytes: int
    expert: bool
    uneven: Uneven | None

    def true_bytes(self, index: int) -> int:
        """Bytes without padding, on the rank with this index among the ranks that share it."""
        return self.padded_bytes if self.uneven is None else self.uneven.local_rows(index) * self.uneven.shard_row_bytes


class BlockStorage(NamedTuple):
    """A rank's memory for one block's parameters.

    Attributes:
        resident_bytes: Shards as stored, padded: of replicated, tensor-parallel and expert-parallel tensors.
        dense: The group of tensors outside the expert bank.
        experts: The group of the expert bank.
        both: Both groups combined.
        matrix_state_bytes: Moments of Muon tensors that shard evenly.
        other_state_bytes: Moments of AdamW tensors that shard evenly, step counters of all AdamW tensors.
        uneven: Tensors whose last chunks are short or empty.
        shards: If there are such tensors, every tensor in the order in which it is made and padded.
        matrix_scratch: Muon's scratch, by kind of tensor, with the number of tensors.
        casts: Casts of AdamW's gradients in the order of updates; empty if gradients are not cast.
        adamw_shard_bytes: Gradient shards of the dense group if Muon has none of its tensors, else 0; without FSDP2, shards of all tensors
            that are not Muon's.
        resident_slack_bytes: Bytes that the allocator's rounding adds to the shards.
        state_slack_bytes: Bytes that it adds to the moments.
        parameters: Elements after TP and EP, before state sharding.
        maxima_bytes: Largest magnitudes of packed weights.
    """

    resident_bytes: tuple[int, int, int]
    dense: GroupBytes
    experts: GroupBytes
    both: GroupBytes
    matrix_state_bytes: int
    other_state_bytes: int
    uneven: tuple[Uneven, ...]
    shards: tuple[Shard, ...]
    matrix_scratch: Mapping[MatrixScratch, int]
    casts: tuple[Cast, ...]
    adamw_shard_bytes: int
    resident_slack_bytes: int
    state_slack_bytes: int
    parameters: int
    maxima_bytes: int = 0


def block_storage(sizes: Sizes, block: Block, *, packed: bool = False) -> BlockStorage:
    """Storage of one block on a rank that holds it; `packed` is true if `sizes.packs` covers the tensor."""
    if block.family is Outside.TOWERS:
        return _without_copies(_mixed_storage(sizes._replace(frozen=sizes.frozen or sizes.params, padded=False), block))
    sizes = sizes_of(sizes, block)
    return _trained_storage(sizes, block, packed=packed) if sizes.frozen is None else _mixed_storage(sizes, block)


def sizes_of(sizes: Sizes, block: Block) -> Sizes:
    """The sizes of a block: frozen tensors of an encoder are stored in `precision.params` where all other parameters are trained."""
    return sizes._replace(frozen=sizes.frozen or sizes.params) if block.family in STATED else sizes


def root_casting_bytes(sizes: Sizes, blocks: Iterable[Block]) -> int:
    """Bytes in addition to the gathered tensors of a stage's group while a one-rank mesh fills them, block by block, from casts."""
    held = [(sizes_of(sizes, block), packed_block(sizes.packing, block, sizes.tp)) for block in blocks]
    return filling_bytes(chain.from_iterable(fills_of(*each) for each in held))


def _without_copies(storage: BlockStorage) -> BlockStorage:
    """Storage of parameters of which only the shards and the gradient shards are priced."""
    dense = GroupBytes(shard_bytes=storage.dense.shard_bytes)
    return storage._replace(dense=dense, both=dense)


def _mixed_storage(sizes: Sizes, block: Block) -> BlockStorage:
    """Storage of a block with frozen tensors, of dtype `sizes.frozen` or packed."""
    assert sizes.frozen is not None
    whole, block = block, packed_block(sizes.packing, block, sizes.tp)
    of_packed = sizes._replace(masters=DType.FP8, master=1, params=DType.FP8, families=())
    trained, frozen, packed = (
        _trained_storage(each._replace(frozen=None), _only(block, groups))
        for each, groups in (
            (sizes, (MATRIX, Group.OTHER)),
            (sizes._replace(masters=sizes.frozen, master=sizes.frozen.bytes), (FROZEN,)),
            (of_packed, (Group.PACKED,)),
        )
    )
    casting, cutting = casting_bytes(sizes, block), cutting_bytes(sizes, block)
    dense, experts = map(_with_frozen, (trained.dense, trained.experts), (frozen.dense, frozen.experts), casting, cutting)
    dense = _with_frozen(dense, packed.dense, casting[0], cutting[0])
    uneven = {tensor.name: short for tensor, short in _uneven_of(sizes, block)}
    parts = trained, frozen, packed
    first, second, third = map(sum, zip(*(part.resident_bytes for part in parts), strict=True))
    return trained._replace(
        resident_bytes=(first, second, third),
        dense=dense,
        experts=experts,
        both=dense if experts is NOTHING else together((dense, experts)),
        uneven=tuple(uneven.values()),
        shards=_in_order(sizes, block, uneven),
        resident_slack_bytes=sum(part.resident_slack_bytes for part in parts),
        parameters=sum(local_part(tensor, sizes)[1] for tensor in whole.tensors),
    )


def _only(block: Block, groups: tuple[Group, ...]) -> Block:
    return make_block(block.family, tuple(tensor for tensor in block.tensors if tensor.group in groups), block.variant)


def _with_frozen(trained: GroupBytes, frozen: GroupBytes, casting_bytes: int, cutting_bytes: int) -> GroupBytes:
    """A group of trained and frozen tensors: all are gathered together, but only trained ones have gradients."""
    if frozen is NOTHING:
        return trained
    return trained._replace(
        gathered_bytes=trained.gathered_bytes + frozen.gathered_bytes,
        flat_bytes=trained.flat_bytes + frozen.flat_bytes,
        sent_bytes=trained.sent_bytes + frozen.sent_bytes,
        casting_bytes=casting_bytes,
        part_bytes=trained.part_bytes + frozen.part_bytes,
        part_sent_bytes=trained.part_sent_bytes + frozen.part_sent_bytes,
        cutting_bytes=cutting_bytes,
    )


def _uneven_of(sizes: Sizes, block: Block) -> Iterator[tuple[ParamTensor, Uneven]]:
    """A block's tensors whose last chunks are short; frozen ones have no moments."""
    if not sizes.padded:
        return
    for tensor in block.tensors:
        expert, trained = tensor.owner is EXPERT_PARALLEL, tensor.group not in (FROZEN, Group.PACKED)
        shape, elements = local_part(tensor, sizes)
        rows, degree = (shape[0] * shape[1] if expert else shape[0]), sizes.degrees[expert]
        if rows % degree:
            matrix, stored = tensor.group is MATRIX, sizes.stored(tensor.group).bytes
            width, moments = elements // rows, (1 if matrix and sizes.iteration else 2) * sizes.moments if trained else 0
            yield tensor, Uneven(rows, -(-rows // degree), degree, width * moments, width * stored, expert, matrix)


def _trained_storage(sizes: Sizes, block: Block, *, packed: bool = False) -> BlockStorage:
    (dense_degree, expert_degree), whole, padded = sizes.degrees, sizes.whole, sizes.padded
    master, moments, iteration, casts_gradients = sizes.master, sizes.moments, sizes.iteration, sizes.casts_gradients
    own, muon_runs, row_moments = LAST_OWN.get(block.family), iteration > 0, 2 * moments
    replicated = dense_shard = dense_elements = dense_last = own_last = expert_shard = expert_elements = expert_last = 0  # elements
    matrix_state = other_state = 0
    adamw_shards, muon_shards = list[int](), list[int]()
    uneven: dict[str, Uneven] = {}
    scratch: dict[MatrixScratch, int] = {}
    casts: list[Cast] = []
    dense_by_muon = False
    for tensor, unsharded in zip(block.tensors, block.sizes, strict=True):
        name, shape, owner, group, _, _, _, num_matrices = tensor
        shape, elements = (shape, unsharded) if whole else local_part(tensor, sizes)
        expert, in_matrix_group = owner is EXPERT_PARALLEL, group is MATRIX
        rows, degree = (shape[0] * shape[1], expert_degree) if expert else (shape[0], dense_degree)  # a bank by `stored_shape`
        chunk_rows = -(-rows // degree)
        chunk = chunk_rows * (elements // rows) if padded else -(-elements // degree)
        if expert:
            expert_shard, expert_elements, expert_last = expert_shard + chunk, expert_elements + elements, elements
        else:
            dense_shard, dense_elements, dense_last = dense_shard + chunk, dense_elements + elements, elements
            if owner is REPLICATED:
                replicated += chunk
            if name == own:
                own_last = elements
        is_muons = in_matrix_group and muon_runs
        element_moments, nbytes, short = moments if is_muons else row_moments, chunk * master, None
        state = even_state = chunk * element_moments
        if chunk_rows * degree != rows and padded:
            width = elements // rows
            short, even_state = Uneven(rows, chunk_rows, degree, width * element_moments, width * master, expert, in_matrix_group), 0
            uneven[name] = short
        if is_muons:
            matrix_state += even_state
            dense_by_muon |= not expert
            matrices = (num_matrices, elements, shape[-1], 1) if whole else _matrices(tensor, elements, sizes)
            kind = _matrix_scratch(matrices, sizes, chunk, expert=expert, short=short)
            scratch[kind] = scratch.get(kind, 0) + 1
            muon_shards.append(nbytes)
            continue
        adamw_shards.append(nbytes)
        if in_matrix_group:
            matrix_state += even_state + STEP_BYTES
        else:
            other_state += even_state + STEP_BYTES
        if casts_gradients:
            casts.append(Cast(nbytes, state + STEP_BYTES, in_matrix_group, short))
    (casting, bank_casting), (cutting, bank_cutting), family = (
        casting_bytes(sizes, block),
        cutting_bytes(sizes, block, packed=packed),
        block.family,
    )
    low, bank = packed_shards(sizes, block, packed=packed)
    dense = _group(sizes, family, False, (dense_shard, dense_elements, own_last or dense_last, casting, cutting), low)
    experts = _group(sizes, family, True, (expert_shard, expert_elements, expert_last, bank_casting, bank_cutting), bank)
    return new(
        BlockStorage,
        (
            (replicated * master, (dense_shard - replicated) * master, expert_shard * master),
            dense,
            experts,
            dense if experts is NOTHING else together((dense, experts)),
            matrix_state,
            other_state,
            tuple(uneven.values()),
            _in_order(sizes, block, uneven),
            scratch,
            tuple(casts),
            sum(adamw_shards) // master * sizes.grads if sizes.whole_state else 0 if dense_by_muon else dense.shard_bytes,
            *_slacks(adamw_shards, muon_shards, master, moments),
            dense_elements + expert_elements,
            low.maxima_bytes + bank.maxima_bytes,
        ),
    )


def _in_order(sizes: Sizes, block: Block, uneven: Mapping[str, Uneven]) -> tuple[Shard, ...]:
    """A block's shards in construction order: a module's children get storage before its own parameters, which have no dot in their names.

    A bank keeps its position. The result is empty if every tensor is sharded evenly.
    """
    if not uneven:
        return ()
    dense_degree, expert_degree = sizes.degrees
    key, made = listed_key(block), list[tuple[tuple[int, bool], Shard]]()
    for tensor, elements in zip(block.tensors, block.sizes, strict=True):
        name, _, owner, *_ = tensor
        short, expert = uneven.get(name), owner is EXPERT_PARALLEL
        if short is None:
            local = elements if sizes.whole else local_part(tensor, sizes)[1]
            nbytes = local // (expert_degree if expert else dense_degree) * sizes.stored(tensor.group).bytes
        else:
            nbytes = short.chunk_rows * short.shard_row_bytes
        made.append((key(name), new(Shard, (RESIDENT_PLACES[owner], nbytes, expert, short))))
    return tuple([shard for _, shard in sorted(made, key=itemgetter(0))])


def _slacks(adamw_shards: list[int], muon_shards: list[int], master: int, moments: int) -> tuple[int, int]:
    """Bytes that the allocator's rounding adds to shards of these sizes, and to their moments: AdamW has two, Muon one."""
    adamw, muon = slack_bytes(adamw_shards), slack_bytes(muon_shards)
    if moments == master:
        return adamw + muon, 2 * adamw + muon
    of_adamw, of_muon = ([size // master * moments for size in shards] for shards in (adamw_shards, muon_shards))
    return adamw + muon, 2 * slack_bytes(of_adamw) + slack_bytes(of_muon)


def _matrix_scratch(
    matrices: tuple[int, int, int, int], sizes: Sizes, share_elements: int, *, expert: bool, short: Uneven | None
) -> MatrixScratch:
    """Muon's scratch for a tensor with these matrices, as `_matrices` gives them."""
    count, elements, columns, parts = matrices
    dealt = matrix_round(count, elements // count, sizes.degrees[expert])
    rows = dealt.elements // columns
    return new(MatrixScratch, (dealt, rows, parts, sizes.iteration, sizes.squares, share_elements, expert, short))


def _matrices(tensor: ParamTensor, elements: int, sizes: Sizes) -> tuple[int, int, int, int]:
    """The matrices of which a rank has parts.

    Returns their number, elements and columns (or the dim that is not sharded), and the number of ranks that share one.

    `elements` counts the rank's part of the tensor. TP shards a matrix, or ETP one of a bank.
    """
    count, cut, columns = tensor.local_matrices(sizes.tp, sizes.ep), tensor.cut_dim(sizes.tp, sizes.etp), tensor.shape[-1]
    if cut is None:
        return count, elements, columns, 1
    parts = sizes.etp if tensor.owner is EXPERT_PARALLEL else sizes.tp
    return count, elements * parts, columns if cut == 0 else elements * parts // count // columns, parts


def packed_shards(sizes: Sizes, block: Block, *, packed: bool) -> list[PackedShards]:
    """The packed shards of a block's dense group and of its bank, if the recipe covers the block."""
    if sizes.packs is None or not packed:
        return [UNPACKED, UNPACKED]
    key, used, found = listed_key(block), sizes.made(block.family), list[PackedShards]()
    tensors = sorted(block.tensors, key=lambda each: key(each.name))
    for banks in (False, True):
        shapes = [(each.name, local_part(each, sizes)[0]) for each in tensors if (each.owner is EXPERT_PARALLEL) is banks]
        found.append(sizes.packs.together(block.family, shapes, used.bytes, casts=used is not sizes.masters))
    return found


def _group(sizes: Sizes, family: str, banks: bool, elements: tuple[int, int, int, int, int], low: PackedShards = UNPACKED) -> GroupBytes:
    """A group, from the elements of its padded shard, of all its tensors and of its last tensor.

    Two more arguments are the bytes beyond the gathered tensors at two points.
    """
    shard, true, last, casting, cutting = elements
    if not true:
        return NOTHING
    if sizes.whole_state:
        used = 0 if sizes.compute(family) is sizes.masters else sizes.compute(family).bytes
        made = max(sizes.made(family).bytes, 2)
        kept, bucket = true * sizes.grads, true * sizes.buckets[banks]
        return GroupBytes(true * used, unsharded_bytes=kept, made_bytes=true * made, reduce_bytes=bucket, shard_bytes=kept)
    degree, grads, reduce, recasts = sizes.degrees[banks], sizes.grads, sizes.reduce, sizes.recasts
    whole, sharded, keepers = shard * degree, degree > 1, keepers_of(sizes.kept_over, degree)
    compute, made = sizes.compute(family).bytes, max(sizes.made(family).bytes, 2)  # fp8 weights get bf16 gradients
    unpacked = (shard - low.elements) * compute
    gathered = (unpacked + low.packed_bytes) * degree
    cast = unpacked if sharded and sizes.compute(family) is not sizes.masters else 0
    return new(
        GroupBytes,
        (
            gathered,
            gathered if sharded else 0,
            casting,
            max(low.packed_bytes + cast, low.making_bytes - gathered),
            gathered // keepers if keepers < degree else 0,
            cast * degree // keepers if keepers < degree else 0,
            cutting,
            true * grads,
            true * made,
            whole * reduce,
            shard * reduce,
            0 if sharded or not sizes.replicated else whole * reduce,
            shard * grads if recasts else 0,
            shard * grads,
            last * made if sharded else 0,
            last * grads if sharded else 0,
        ),
    )


STEP_BYTES = 4
"""AdamW's step counter, an fp32 scalar per parameter (fused AdamW keeps it on the device)."""
