"""Short constructors for parameter tensors, one per ownership rule.

Column- and row-parallel follow Megatron-LM's pairing (arXiv:1909.08053, section 3): a column-parallel weight `[out, in]` shards its output
rows, a row-parallel weight its input columns, so that a block needs one reduction at its end.
"""

from megaplan.inventory.tensors import Group, Init, Owner, ParamTensor
from megaplan.tuples import new

REPLICATED, TENSOR_PARALLEL = Owner.REPLICATED, Owner.TENSOR_PARALLEL
MATRIX, OTHER = Group.MATRIX, Group.OTHER
NORMAL, NORMAL_OUT, ONES = Init.NORMAL, Init.NORMAL_OUT, Init.ONES
"""The members by name: in Python 3.11 a lookup on the class costs as much as making the tensor."""


def norm(name: str, width: int) -> ParamTensor:
    """A replicated RMSNorm scale `[width]`, over hidden, a latent or one head."""
    return new(ParamTensor, (name, (width,), REPLICATED, OTHER, ONES, None, (), 1))


def replicated(name: str, shape: tuple[int, ...], group: Group, init: Init = NORMAL, num_matrices: int = 1) -> ParamTensor:
    """A tensor that is replicated on all tensor-parallel and expert-parallel ranks."""
    return new(ParamTensor, (name, shape, REPLICATED, group, init, None, (), num_matrices))


def column(
    name: str, out_width: int, in_width: int, *, group: Group = MATRIX, parts: tuple[int, ...] = (), num_matrices: int = 1
) -> ParamTensor:
    """A column-parallel weight `[out_width, in_width]`: TP shards the rows, each of `parts` separately."""
    return new(ParamTensor, (name, (out_width, in_width), TENSOR_PARALLEL, group, NORMAL, 0, parts, num_matrices))


def row(name: str, out_width: int, in_width: int) -> ParamTensor:
    """A row-parallel weight `[out_width, in_width]` back into the residual: TP shards the columns."""
    return new(ParamTensor, (name, (out_width, in_width), TENSOR_PARALLEL, MATRIX, NORMAL_OUT, 1, (), 1))


def per_head(name: str, shape: tuple[int, ...], init: Init, parts: tuple[int, ...] = ()) -> ParamTensor:
    """A tensor whose dim 0 runs over heads or their channels (scalars, biases, convolutions): TP shards dim 0, AdamW updates it."""
    return new(ParamTensor, (name, shape, TENSOR_PARALLEL, OTHER, init, 0, parts, 1))
