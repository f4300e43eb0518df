"""This rank's parts of tensors that FSDP2 may have sharded."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor; the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_of(parameter: Tensor, name: str = "a parameter") -> Tensor:
    """A parameter's gradient.

    Raises:
        RuntimeError: The group has none.
    """
    if parameter.grad is None:
        raise RuntimeError(f"{name} of shape {tuple(parameter.shape)} has no gradient; backward did not reach it")
    return parameter.grad
