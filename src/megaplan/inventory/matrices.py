"""Rounds in which Muon orthogonalises matrices, and the ranks among which it deals them out."""

from __future__ import annotations

from typing import NamedTuple

ROUND_ELEMENTS = 2**25
"""Elements of the matrices of a round on a rank: fewer launches for small matrices, and not much more scratch than one large one needs."""


class MatrixRound(NamedTuple):
    """Tensors that Muon updates together: equal in shape, and shared by the same ranks.

    Each of the `degree` ranks has a share of the rows of every tensor, and orthogonalises some of the whole matrices. Ranks whose shares
    are whole matrices exchange nothing: then `degree` is 1, and `num_matrices` those of a share.

    Attributes:
        num_matrices: Matrices of a tensor, on all ranks that share it.
        elements: Elements of a whole matrix.
        degree: Ranks among which its matrices are dealt out.
    """

    num_matrices: int
    elements: int
    degree: int

    @property
    def num_tensors(self) -> int:
        """Most tensors of a round: about `ROUND_ELEMENTS` on each rank."""
        return max(1, ROUND_ELEMENTS * self.degree // (self.num_matrices * self.elements))

    def matrices(self, num_tensors: int) -> int:
        """Matrices that a rank orthogonalises in a round of so many tensors; the last ranks may have fewer, and fill up with zeros."""
        return -(-num_tensors * self.num_matrices // self.degree)


def matrix_round(count: int, elements: int, degree: int) -> MatrixRound:
    """The rounds of a tensor with `count` matrices of which `degree` ranks have equal shares."""
    return MatrixRound(count // degree, elements, 1) if count % degree == 0 else MatrixRound(count, elements, degree)
