"""Local sizes of a spec's ranks, and the settings that decide how FSDP2 stores parameters: equal sizes give equal storage."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megakernels.ops.newton_schulz.facts import REFERENCE_BYTES
from megakernels.ops.packed_weight.facts import Packing
from megaplan.dtypes import DType
from megaplan.inventory.tensors import Block, Group, MatrixRound
from megaplan.spec.local import PackedGather, packed_gather
from megaplan.spec.models import Spec


class Uneven(NamedTuple):
    """The moments of a tensor whose rows do not divide by its shard degree.

    Attributes:
        rows: Rows of dim 0, after TP and EP.
        chunk_rows: ceil(rows / degree), the rows of the first ranks.
        degree: Ranks that share it.
        row_bytes: Moments of one row.
        shard_row_bytes: The row itself, in `precision.master`.
        expert: True if it shards over efsdp instead of dp_shard.
        matrix: True if it belongs to the matrix group.
    """

    rows: int
    chunk_rows: int
    degree: int
    row_bytes: int
    shard_row_bytes: int
    expert: bool
    matrix: bool

    def local_rows(self, index: int) -> int:
        """Rows without padding on the rank with this index among the ranks that share the tensor."""
        left = self.rows - index * self.chunk_rows
        return self.chunk_rows if left > self.chunk_rows else max(0, left)

    def state_bytes(self, index: int) -> int:
        """Moments on that rank."""
        return self.local_rows(index) * self.row_bytes

    @property
    def boundaries(self) -> tuple[int, int]:
        """The index of the first short chunk, and the next index: ranks between two boundaries hold the same bytes."""
        whole = self.rows // self.chunk_rows
        return whole, whole + (self.rows % self.chunk_rows > 0)


class MatrixScratch(NamedTuple):
    """Muon's scratch for tensors of one kind.

    A round begins with updates in the iteration's dtype: the share that a rank sends, or the matrices themselves. A rank receives its
    matrices, or their TP parts, which TP gathers. The iteration has two buffers for its matrices and two for x xᵀ (or xᵀ x: r × r, r the
    shorter side); plain torch sometimes needs a third one for the latter. All later points need less.

    Attributes:
        round: The rounds in which these tensors are updated.
        rows: Rows of a full matrix, or its columns if TP shards the columns.
        tp_parts: Number of TP ranks that share a matrix; 1 if each rank has its own.
        iteration: Bytes of an element of the iteration.
        squares: Bytes of an element of x xᵀ, in all its buffers.
        share_elements: Elements of a full shard of a tensor, without padding.
        expert: True if it belongs to an expert bank.
        uneven: Present if the rows do not divide by the shard degree.
    """

    round: MatrixRound
    rows: int
    tp_parts: int
    iteration: int
    squares: int
    share_elements: int
    expert: bool
    uneven: Uneven | None = None

    def at(self, num_tensors: int, dense_index: int, expert_index: int) -> int:
        """Most bytes in a round, on the rank with these indices among the ranks that share dense tensors and expert banks."""
        together = min(num_tensors, self.round.num_tensors)
        matrices, share = self.round.matrices(together), self.share_elements
        if self.uneven is not None:
            rows, whole = self.uneven.local_rows(expert_index if self.expert else dense_index), self.uneven.chunk_rows
            share = share * rows // whole
        part = matrices * self.round.elements // self.tp_parts
        sent = together * share if self.round.degree > 1 else part
        side = min(self.rows, self.round.elements // self.rows)
        return max((sent + part) * self.iteration, matrices * (2 * self.round.elements * self.iteration + side**2 * self.squares))


class Cast(NamedTuple):
    """AdamW's update of a parameter with a cast gradient.

    Attributes:
        scratch_bytes: The gradient shard in `precision.master`.
        state_bytes: The moments and step counter made by its first update.
        matrix: True if it belongs to the matrix group.
        uneven: Present if the rows do not divide by the shard degree; the bytes are those of a full shard.
    """

    scratch_bytes: int
    state_bytes: int
    matrix: bool
    uneven: Uneven | None = None

    def at(self, dense_index: int, expert_index: int) -> tuple[int, int]:
        """Cast gradient, and moments with their step counter, on the rank with these indices."""
        if self.uneven is None:
            return self.scratch_bytes, self.state_bytes
        index, moments = expert_index if self.uneven.expert else dense_index, self.uneven.chunk_rows * self.uneven.row_bytes
        counter = self.state_bytes - moments
        return self.uneven.local_rows(index) * self.uneven.shard_row_bytes, self.uneven.state_bytes(index) + counter


class LastPeak(NamedTuple):
    """Peaks of AdamW's steps.

    Attributes:
        matrix_bytes: Moments of the matrix group that do not exist yet at the first step's peak.
        other_bytes: All other moments, which do not depend on it.
        scratch_bytes: A cast gradient at that peak.
        largest_bytes: The largest cast gradient, in a later step.
    """

    matrix_bytes: int = 0
    other_bytes: int = 0
    scratch_bytes: int = 0
    largest_bytes: int = 0


AT_END = LastPeak()


def last_peak(casts: Sequence[Cast], dense_index: int, expert_index: int) -> LastPeak:
    """Peak of AdamW's first step: at its end if nothing is cast, else at the last cast that is larger than the moments made after it.

    Args:
        casts: Casts in the order of updates.
        dense_index: The rank's index among the ranks that share dense tensors.
        expert_index: Place among ranks that share expert banks.
    """
    best, matrix, other, largest = AT_END, 0, 0, 0
    for cast in reversed(casts):
        scratch, state = cast.at(dense_index, expert_index)
        largest = max(largest, scratch)
        if scratch - matrix - other > best.scratch_bytes - best.matrix_bytes - best.other_bytes:
            best = LastPeak(matrix, other, scratch)
        if cast.matrix:
            matrix += state
        else:
            other += state
    return best._replace(largest_bytes=largest)


class GroupBytes(NamedTuple):
    """FSDP2 groups, one or several together.

    Attributes:
        gathered_bytes: Unsharded compute copies, padded.
        flat_bytes: The all-gather's output before parameters are copied out of it; 0 on a mesh of one rank.
        casting_bytes: Bytes in addition to `gathered_bytes` while a one-rank mesh fills them from casts: 0 if parameters are stored in the
            used dtype.
        sent_bytes: The all-gather's input, a cast of the shard; 0 if parameters are stored in the used dtype, and on a one-rank mesh.
        part_bytes: The part of the gathered parameters that a rank keeps between forward and backward; 0 if it keeps none, or all.
        part_sent_bytes: The input of an all-gather of such parts: a copy of the ones that are cast when shards are gathered.
        cutting_bytes: Most bytes in addition to `gathered_bytes` while these parts are copied, tensor by tensor.
        unsharded_bytes: Whole gradients in `precision.grads`.
        made_bytes: Whole gradients in the dtype in which autograd makes them.
        reduce_bytes: Reduce-scatter input in `precision.reduce`, padded; the cast that is summed over copies of parameters.
        reduced_bytes: Reduce-scatter output, a padded shard.
        divided_bytes: The input divided by the gradient divisor, with replicas and no sharding.
        recast_bytes: The output once more, in `precision.grads`, if that is another dtype.
        shard_bytes: Gradient shards in `precision.grads`, padded.
        last_made_bytes: Bytes of the last tensor in `made_bytes`. On meshes of more than one rank `foreach_reduce` references it until the
            function returns.
        last_unsharded_bytes: Bytes of the last tensor in `unsharded_bytes`.
    """

    gathered_bytes: int = 0
    flat_bytes: int = 0
    casting_bytes: int = 0
    sent_bytes: int = 0
    part_bytes: int = 0
    part_sent_bytes: int = 0
    cutting_bytes: int = 0
    unsharded_bytes: int = 0
    made_bytes: int = 0
    reduce_bytes: int = 0
    reduced_bytes: int = 0
    divided_bytes: int = 0
    recast_bytes: int = 0
    shard_bytes: int = 0
    last_made_bytes: int = 0
    last_unsharded_bytes: int = 0

    @property
    def has_tasks(self) -> bool:
        """True if its parameters are gathered, or if FSDP2 takes its gradients when they are made."""
        return self.gathered_bytes > 0 or self.made_bytes > 0

    @property
    def sent_again_bytes(self) -> int:
        """The input of the all-gather before a backward."""
        return self.part_sent_bytes if self.part_bytes else self.sent_bytes

    @property
    def reduction_bytes(self) -> int:
        """All buffers of a reduction."""
        return self.reduce_bytes + self.reduced_bytes + self.divided_bytes + self.recast_bytes


NOTHING = GroupBytes()


def together(groups: Iterable[GroupBytes]) -> GroupBytes:
    """Several groups combined into one; its last tensor is that of the last group that has one."""
    listed = list(groups)
    if len(listed) == 1:
        return listed[0]
    last = next((group for group in reversed(listed) if group.made_bytes), NOTHING)
    *sums, _, _ = [sum(sizes) for sizes in zip(*listed, strict=True)] or NOTHING
    return GroupBytes._make((*sums, last.last_made_bytes, last.last_unsharded_bytes))


def gradient_dtype(spec: Spec, block: Block) -> DType:
    """Dtype in which autograd makes a block's parameter gradients: the parameters', or bf16 for fp8."""
    return spec.precision.of(block.family).of_products


class Sizes(NamedTuple):
    """Settings of a spec that decide storage, computed once for all its blocks.

    Attributes:
        tp: `mesh.tp`.
        ep: `mesh.ep`.
        etp: `mesh.etp`.
        replicated: True if shards have replicas.
        params: `precision.params`.
        families: `precision.families`, by letter.
        degrees: Numbers of ranks that share dense tensors, and that share expert banks.
        whole: True if every rank owns full tensors, not sharded by TP or EP.
        masters: `precision.master`.
        master: Bytes per element of master parameters.
        grads: Bytes of an element in `precision.grads`.
        reduce: Bytes of an element in `precision.reduce`.
        moments: Bytes of an element in `precision.moments`.
        iteration: Bytes of an element in Muon's iteration; 0 without Muon.
        squares: Bytes per element of x xᵀ in Newton-Schulz; plain torch products need more in addition.
        casts_gradients: True if AdamW's gradients are cast for it.
        recasts: True if reduced gradients are cast.
        padded: True if chunks are whole rows, as FSDP2 cuts them; without padding each is its share of the elements.
        whole_state: True if there is no FSDP2.
        frozen: Dtype of the shards of frozen parameters; None if all are trained.
        packing: Form of the weights of frozen linears; None if they have that dtype.
        kept_over: `sharding.reshard_size`, if it is used; else 0.
        gathers_ahead: Units that each unit's forward begins by gathering.
        offload: Fraction of the optimizer's state that is in host memory; 0 for none.
        low: Letters all of whose tensors are gathered in 8 bits without a change of gradients (torchtitan).
        packs: Weights that megarun gathers packed by their recipe; None for none.
        unit_layers: Consecutive layers that have a group together; 0 if all are in the group of their stage.
        buckets: Bytes of an element of the casts in which gradients are summed over copies of dense tensors, and of banks; 0 for none.
    """

    tp: int
    ep: int
    etp: int
    replicated: bool
    params: DType
    families: tuple[tuple[str, DType], ...]
    degrees: tuple[int, int]
    whole: bool
    masters: DType
    master: int
    grads: int
    reduce: int
    moments: int
    iteration: int
    squares: int
    casts_gradients: bool
    recasts: bool
    padded: bool
    whole_state: bool
    frozen: DType | None = None
    packing: Packing | None = None
    kept_over: int = 0
    gathers_ahead: int = 0
    offload: float = 0.0
    low: frozenset[str] = frozenset()
    packs: PackedGather | None = None
    unit_layers: int = 1
    buckets: tuple[int, int] = (0, 0)

    def compute(self, family: str) -> DType:
        """Dtype of the gathered parameters of a family's blocks."""
        return DType.FP8 if family in self.low else self.made(family)

    def stored(self, group: Group) -> DType:
        """Dtype of the shards of a group's tensors; packed rows are bytes."""
        if group is Group.PACKED:
            return DType.FP8
        return self.masters if self.frozen is None or group is not Group.FROZEN else self.frozen

    def used(self, group: Group, family: str) -> DType:
        """Dtype of the gathered copies of a group's tensors."""
        return DType.FP8 if group is Group.PACKED else self.compute(family)

    def made(self, family: str) -> DType:
        """Dtype of the gradients of a family's parameters in autograd."""
        return next((dtype for letter, dtype in self.families if letter == family), self.params)


def storage_sizes(spec: Spec, *, padded: bool = True) -> Sizes:
    """The sizes of a spec; if `padded` is false, those of a runtime that can shard between any two elements."""
    mesh, precision = spec.mesh, spec.precision
    iteration = spec.newton_schulz_dtype.bytes if spec.optimizer.uses_muon else 0
    cast = precision.reduce.bytes if spec.sharding.copies and precision.reduce is not precision.grads else 0
    return Sizes(
        mesh.tp,
        mesh.ep,
        mesh.etp,
        mesh.dp_replicate > 1,
        params=precision.params,
        families=tuple(precision.families.items()),
        degrees=spec.shard_degrees,
        whole=mesh.tp == mesh.ep == mesh.etp == 1,
        masters=precision.master,
        master=precision.master.bytes,
        grads=precision.grads.bytes,
        reduce=precision.reduce.bytes,
        moments=precision.moments.bytes,
        iteration=iteration,
        squares=2 * iteration + (0 if spec.host.uses_triton else REFERENCE_BYTES),
        casts_gradients=precision.grads is not precision.master,
        recasts=precision.grads is not precision.reduce,
        padded=padded,
        whole_state=spec.has_whole_state,
        frozen=None if spec.lora is None else spec.lora.stored(precision.params),
        packing=spec.packing,
        kept_over=spec.sharding.kept_over,
        gathers_ahead=spec.sharding.prefetch or int(mesh.experts_travel),
        offload=spec.host.optimizer_offload or 0.0,
        packs=packed_gather(spec),
        unit_layers=spec.sharding.unit_layers,
        buckets=(cast * (mesh.data_ranks > 1), cast * (mesh.efsdp * mesh.dp_replicate > 1)),
    )
