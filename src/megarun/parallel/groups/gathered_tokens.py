"""Tokens that the ranks of a group gather, the same number each, and sums of partial results that are scattered to the tokens' ranks."""

from torch import Tensor

from megarun.parallel.groups.tensor import TensorParallel, exchanged


def gathered_tokens(group: TensorParallel, tokens: Tensor) -> Tensor:
    """Tokens of all ranks of the group, by rank: [N, ...] each -> [ranks · N, ...]."""
    return tokens if group.degree == 1 else exchanged(group.gather_rows, group.scatter_rows, tokens)


def scattered_sum(group: TensorParallel, partial: Tensor) -> Tensor:
    """This rank's tokens of the group's sum: [ranks · N, ...] -> [N, ...]."""
    return partial if group.degree == 1 else exchanged(group.scatter_rows, group.gather_rows, partial)
