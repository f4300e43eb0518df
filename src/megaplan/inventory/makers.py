"""Short constructors for parameter tensors, one per ownership rule.

Column- and row-parallel follow Megatron-LM's pairing (arXiv:1909.08053, section 3): a column-parallel weight `[out, in]` shards its output
rows, a row-parallel weight its input columns, so that a block needs one reduction at its end.
"""

from __future__ import annotations

from megaplan.inventory.tensors import Group, Init, Owner, ParamTensor


def norm(name: str, width: int) -> ParamTensor:
    """A replicated RMSNorm scale `[width]`, over hidden, a latent or one head."""
    return ParamTensor(name, (width,), Owner.REPLICATED, Group.OTHER, Init.ONES)


def replicated(name: str, shape: tuple[int, ...], group: Group, init: Init = Init.NORMAL, num_matrices: int = 1) -> ParamTensor:
    """A tensor that every tensor-parallel and expert-parallel rank holds whole."""
    return ParamTensor(name, shape, Owner.REPLICATED, group, init, num_matrices=num_matrices)


def column(
    name: str, out_width: int, in_width: int, *, group: Group = Group.MATRIX, parts: tuple[int, ...] = (), num_matrices: int = 1
) -> ParamTensor:
    """A column-parallel weight `[out_width, in_width]`: TP shards the rows, each of `parts` on its own."""
    return ParamTensor(name, (out_width, in_width), Owner.TENSOR_PARALLEL, group, Init.NORMAL, 0, parts, num_matrices)


def row(name: str, out_width: int, in_width: int) -> ParamTensor:
    """A row-parallel weight `[out_width, in_width]` back into the residual: TP shards the columns."""
    return ParamTensor(name, (out_width, in_width), Owner.TENSOR_PARALLEL, Group.MATRIX, Init.NORMAL_OUT, 1)


def per_head(name: str, shape: tuple[int, ...], init: Init, parts: tuple[int, ...] = ()) -> ParamTensor:
    """A tensor whose dim 0 runs over heads or their channels (scalars, biases, convolutions): TP shards dim 0, AdamW updates it."""
    return ParamTensor(name, shape, Owner.TENSOR_PARALLEL, Group.OTHER, init, 0, parts)
