"""Optimizer state and the scratch of a step, as megarun's Muon and torch's fused AdamW run it.

Muon keeps one momentum shard; AdamW two moments and a step counter. Fused AdamW needs no scratch, and gradients in the parameters' dtype:
if `precision.grads` is another, megarun updates one parameter at a time, with its gradient cast to `precision.master`. Muon updates one
tensor at a time and reads its gradient unchanged: the update shard in the iteration's dtype, the whole update gathered from it, and
Newton-Schulz on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megaplan.tuples import new


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
        """True rows of the rank with this index among those that share the tensor."""
        left = self.rows - index * self.chunk_rows
        return self.chunk_rows if left > self.chunk_rows else max(0, left)

    def state_bytes(self, index: int) -> int:
        """Moments on that rank."""
        return self.local_rows(index) * self.row_bytes

    @property
    def boundaries(self) -> tuple[int, int]:
        """The index of the first short chunk, and the first after it: ranks between two boundaries hold the same bytes."""
        whole = self.rows // self.chunk_rows
        return whole, whole + (self.rows % self.chunk_rows > 0)


class MatrixScratch(NamedTuple):
    """Temporary tensors of one Newton-Schulz update, and the momentum made by its first step, on a rank with a whole share of the rows.

    The scratch is that of an iteration: the gathered update, the iterate x, x xᵀ and its polynomial (k matrices of r × r, r the shorter
    side), and the next iterate, in addition to the update's shard. If TP shards the matrix, FSDP2 gathers a part of it, which is gathered
    again over TP. Afterwards there are the orthogonalised update and the rank's shard of it in `precision.master`, which are less: an
    element of master is at most twice as wide as one of the iteration.

    Attributes:
        iterating_bytes: Everything except the shard.
        shard_bytes: The update's shard in the iteration's dtype; 0 on a one-rank mesh, where it is the gathered update itself.
        momentum_bytes: The momentum's shard.
        uneven: Present if the rows do not divide by the shard degree.
    """

    iterating_bytes: int
    shard_bytes: int
    momentum_bytes: int
    uneven: Uneven | None = None

    def at(self, dense_index: int, expert_index: int) -> tuple[int, int, int, int]:
        """The update alone, on the rank with these indices among those that share dense tensors and expert banks, as `in_turn` takes it."""
        iterating, shard, momentum, uneven = self
        if uneven is not None:
            rows, whole = uneven.local_rows(expert_index if uneven.expert else dense_index), uneven.chunk_rows
            shard, momentum = shard * rows // whole, momentum * rows // whole
        return iterating + shard, momentum, iterating + shard, momentum


def matrix_scratch(
    matrices: tuple[int, int, int],
    tp_parts: int,
    iteration_bytes: int,
    shard_elements: int,
    degree: int,
    momentum_bytes: int,
    uneven: Uneven | None,
) -> MatrixScratch:
    """The scratch of one tensor.

    Args:
        matrices: Whole matrices that the rank orthogonalises: their number, the elements of all, columns of each.
        tp_parts: Number of TP ranks that share them; 1 if each rank has its own.
        iteration_bytes: Bytes of an element of the iteration.
        shard_elements: A whole share of the rank's part; the all-gather makes `degree` of them, padding included.
        degree: Ranks that share it.
        momentum_bytes: Momentum of a whole share.
        uneven: Present if the rows do not divide by the degree.
    """
    count, elements, columns = matrices
    side = elements // (count * columns)
    side = side if side < columns else columns
    gathered = shard_elements * degree + (elements if tp_parts > 1 else 0)
    iterating, shard = gathered + 2 * elements + 2 * count * side * side, shard_elements if degree > 1 else 0
    return new(MatrixScratch, (iterating * iteration_bytes, shard * iteration_bytes, momentum_bytes, uneven))


class MatrixPeaks(NamedTuple):
    """Peaks of Muon's steps.

    Attributes:
        scratch_bytes: The largest scratch of a tensor: a later step's peak.
        first_momenta_bytes: Momenta that exist at the peak of the first step, which is in a tensor's update after its own momentum was
            made.
        first_scratch_bytes: The scratch at that point.
        momenta_bytes: All momenta.
    """

    scratch_bytes: int = 0
    first_momenta_bytes: int = 0
    first_scratch_bytes: int = 0
    momenta_bytes: int = 0


NO_UPDATES = MatrixPeaks()


def matrix_peaks(tensors: Iterable[MatrixScratch], dense_index: int, expert_index: int) -> MatrixPeaks:
    """The peaks of a block's updates.

    Args:
        tensors: Tensors in the order of updates.
        dense_index: The rank's place among those that share dense tensors.
        expert_index: Place among ranks that share expert banks.
    """
    return in_turn([tensor.at(dense_index, expert_index) for tensor in tensors])


def in_turn(updates: Sequence[tuple[int, int, int, int]]) -> MatrixPeaks:
    """Updates of several tensors or blocks in sequence; each as the four fields of `MatrixPeaks`."""
    if not updates:
        return NO_UPDATES
    largest = max(updates)[0]
    highest = first_momenta = first_scratch = made = 0
    for _, own_momenta, own_scratch, momenta in updates:
        if made + own_momenta + own_scratch > highest:
            first_momenta, first_scratch = made + own_momenta, own_scratch
            highest = first_momenta + first_scratch
        made += momenta
    return new(MatrixPeaks, (largest, first_momenta, first_scratch, made))


class Cast(NamedTuple):
    """AdamW's update of a parameter with a cast gradient.

    Attributes:
        scratch_bytes: The gradient shard in `precision.master`.
        state_bytes: The moments and step counter made by its first update.
        matrix: True if it belongs to the matrix group.
        uneven: Present if the rows do not divide by the shard degree; the bytes are those of a whole share.
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
        other_bytes: All other moments that do not.
        scratch_bytes: A cast gradient at that peak.
        largest_bytes: The largest cast gradient: a later step's.
    """

    matrix_bytes: int = 0
    other_bytes: int = 0
    scratch_bytes: int = 0
    largest_bytes: int = 0


AT_END = LastPeak()


def last_peak(casts: Sequence[Cast], dense_index: int, expert_index: int) -> LastPeak:
    """Peak of AdamW's first step: at its end if nothing is cast, else at the cast that is larger than the moments made after it.

    Args:
        casts: Casts in the order of updates.
        dense_index: The rank's place among those that share dense tensors.
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
