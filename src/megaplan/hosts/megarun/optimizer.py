"""Optimizer state and the scratch of a step, as megarun's Muon and torch's fused AdamW run it.

Muon keeps one momentum shard; AdamW two moments and a step counter. Fused AdamW needs no scratch, and gradients in the parameters' dtype:
if `precision.grads` is another, megarun updates one parameter at a time, with its gradient cast to `precision.master`. Muon updates tensors
of one shape in rounds and reads their gradients unchanged, in one pass: each matrix is sent to one of the ranks that share it,
Newton-Schulz runs there, and every rank gets its rows of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megaplan.inventory.matrices import MatrixRound


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
    """Muon's scratch for tensors of one kind.

    A round begins with updates in the iteration's dtype: the share that a rank sends, or the matrices themselves. What arrives is the
    rank's matrices, or their TP parts, which TP gathers. The iteration has two buffers of its matrices, and two of x xᵀ (or xᵀ x: r × r, r
    the shorter side); plain torch needs a third of these at times. Everything afterwards is less.

    Attributes:
        round: Rounds of these tensors.
        rows: Rows of a whole matrix, or its columns if TP shards these.
        tp_parts: Number of TP ranks that share a matrix; 1 if each rank has its own.
        iteration: Bytes of an element of the iteration.
        squares: Bytes of an element of x xᵀ, in all its buffers.
        share_elements: A whole share of a tensor, without padding.
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
        """Most bytes in a round, on the rank with these indices among those that share dense tensors and expert banks."""
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
