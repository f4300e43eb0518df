"""Attention's forward by the libraries in torch, and the inputs that each accepts.

Both return what the operation saves: out and the log-sum-exp of scaled scores. Their backwards are not used. torch's flash backward sums dq
with atomics; its deterministic mode, slower than the Triton kernels, holds copies of dq in fp32 and the gradients of k and v for every
query head. cuDNN's backward through torch is not deterministic: of 20 runs on an H200 none to six had the bits of the first.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megakernels.libraries import HOPPER
from megakernels.ops.attention.facts import CUDNN_EQUAL_WIDTH, CUDNN_WIDTH, FLASH_WIDTH
from megakernels.ops.attention.inputs import Attention

Library = Literal["cudnn", "flash"]
HALF = (torch.bfloat16, torch.float16)
ALIGNED = 8
"""Both need head widths and row offsets that are multiples of this many elements, 16 bytes."""
CUDNN_GENERATIONS = (HOPPER, 10)
"""Major compute capabilities for which cuDNN has their own kernels: Hopper and data-centre Blackwell."""
FLASH_GENERATION = 8
"""The lowest major compute capability of the flash kernels."""
CUDNN_VERSION = 90000
"""The lowest version that accepts rows of any length."""


class Machine(NamedTuple):
    """Properties of a device and of this torch that decide the choice.

    Attributes:
        capability: Major and minor compute capability.
        cudnn_version: Number that torch gives; None if cuDNN is missing or switched off.
        has_flash: True if torch was built with its flash kernels.
    """

    capability: tuple[int, int]
    cudnn_version: int | None
    has_flash: bool


def library_of(
    machine: Machine, dtype: torch.dtype, num_positions: int, width: int, value_width: int, *, window: bool, packed: bool
) -> Library | None:
    """The library whose forward accepts these inputs, cuDNN before flash; None for the Triton kernel.

    Packed rows have none: the libraries need the number of documents on the host, which would synchronise. Nor has fp32.

    Args:
        machine: The device.
        dtype: The dtype of q, k and v.
        num_positions: T.
        width: Width of a head of q and k.
        value_width: Width of a head of v.
        window: True if a query sees a window only.
        packed: True if rows hold several documents.
    """
    if dtype not in HALF or packed or num_positions < 2 or width % ALIGNED or value_width % ALIGNED:
        return None
    major, version = machine.capability[0], machine.cudnn_version
    widest = CUDNN_EQUAL_WIDTH if major == HOPPER and width == value_width else CUDNN_WIDTH
    if major in CUDNN_GENERATIONS and not window and max(width, value_width) <= widest and (version or 0) >= CUDNN_VERSION:
        return "cudnn"
    return "flash" if machine.has_flash and major >= FLASH_GENERATION and width == value_width <= FLASH_WIDTH else None


def machine_of(device: torch.device) -> Machine:
    """The properties of a CUDA device."""
    cudnn = torch.backends.cudnn
    version = cudnn.version() if cudnn.is_available() and cudnn.enabled else None  # type: ignore[no-untyped-call]
    return Machine(torch.cuda.get_device_capability(device), version, torch.backends.cuda.is_flash_attention_available())


def is_aligned(tensor: Tensor) -> bool:
    """True if a library can read the rows of a tensor as they are; allocations begin at more than 16 bytes."""
    *strides, last = tensor.stride()
    return last == 1 and not any(number % ALIGNED for number in (*strides, tensor.storage_offset()))


def library_for(given: Attention) -> Library | None:
    """`library_of` of a call; none without CUDA, with a cap or with a term added to scores."""
    q = given.q
    if given.cap is not None or given.relations is not None:
        return None
    if not q.is_cuda or 0 in q.shape or not all(is_aligned(each) for each in given[:3]):
        return None
    sizes = q.shape[1], q.shape[3], given.v.shape[3]
    return library_of(machine_of(q.device), q.dtype, *sizes, window=given.window is not None, packed=given.starts is not None)


def cudnn_forward(given: Attention) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.forward`, without window or documents."""
    heads = [each.transpose(1, 2) for each in (given.q, given.k, given.v)]
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, True, False, scale=given.scale)
    return found[0].transpose(1, 2).contiguous(), found[1].view(found[0].shape[:3])


def flash_forward(given: Attention) -> tuple[Tensor, Tensor]:
    """Follows the contract of `reference.forward`, without documents."""
    length, window = given.q.shape[1], {}
    if given.window is not None:
        window = {"window_size_left": given.window - 1, "window_size_right": 0}
    found = torch.ops.aten._flash_attention_forward(*given[:3], None, None, length, length, 0.0, True, False, scale=given.scale, **window)
    return found[0].contiguous(), found[1]


FORWARDS: dict[Library, Callable[[Attention], tuple[Tensor, Tensor]]] = {"cudnn": cudnn_forward, "flash": flash_forward}
