"""Newton-Schulz steps in place. No gradient."""

from torch import Tensor
from torch.library import custom_op

from megakernels._common import register_cost, register_scratch, require
from megakernels._common.device import module_for
from megakernels.ops.newton_schulz import reference
from megakernels.ops.newton_schulz.sizes import cost, scratch

__all__ = ["newton_schulz_"]


def newton_schulz_(x: Tensor, num_steps: int) -> Tensor:
    """Replaces matrices by approximations of the nearest semi-orthogonal ones, with singular values between about 0.7 and 1.2.

    Steps are made on x xᵀ, or xᵀ x of tall matrices, where that is cheaper than on x: its polynomials are multiplied together, and x by
    their product twice in five steps. They are in fp16 if x is in 16 bits, and accumulate in fp32.

    Args:
        x: Matrices [n, rows, cols], contiguous; changed in place.
        num_steps: Steps of the quintic iteration.

    Returns:
        x.

    Scratch:
        A second buffer of x, and two of x xᵀ.

    Triton:
        The lower triangles of symmetric products, each tile stored twice; with tensor descriptors where rows begin at multiples of 16
        bytes. The products with x are the BLAS library's. With `use_libraries` quack-kernels makes the symmetric products on Hopper that
        have no factor of each matrix, and add to no diagonal in bf16.

    Raises:
        ValueError: x is not a contiguous stack of matrices.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), quintic coefficients; Dao-AILab,
        "Gram Newton-Schulz" (2025), the iteration of x xᵀ with restarts.
    """
    require(x.dim() == 3 and x.is_contiguous(), "newton_schulz_", "x must be contiguous [n,rows,cols]", x=x.shape, strides=x.stride())
    _newton_schulz_(x, num_steps)
    return x


@custom_op("megakernels::newton_schulz_", mutates_args=("x",))
def _newton_schulz_(x: Tensor, num_steps: int) -> None:
    module_for(x, reference).forward(x, num_steps)


@_newton_schulz_.register_fake
def _(_x: Tensor, _num_steps: int) -> None:
    pass


register_cost(_newton_schulz_, cost)
register_scratch(_newton_schulz_, scratch)
