"""Run the CUDA code of an operation without a GPU, on meta tensors that report `is_cuda`, with Triton launches recorded.

An operation of `megakernels` selects its implementation by the device of its operands. Its Python code runs here as on CUDA, with the same
selection, copies and torch operations around its kernels; nothing is computed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from megakernels.ops.moe import grouped
from megaplan.devices import Device
from megarun.parallel.groups.expert import spread
from megarun.trace.replaced import replaced

Launched = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
CAPABILITIES = {"ampere": (8, 0), "hopper": (9, 0), "blackwell": (10, 0)}
"""Compute capability by generation. Source: NVIDIA CUDA C++ Programming Guide, compute capabilities."""
CUDNN_VERSION = 90100
"""The least that torch's CUDA wheels need since 2.4. Source: pytorch, .github/scripts/generate_binary_build_matrix.py."""


def without_values(value: Any) -> Any:
    """A meta tensor with the same shape, strides and dtype; other values unchanged."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [without_values(each) for each in value] if isinstance(value, list) else value


@contextmanager
def cuda_code(device: Device, launched: Launched) -> Iterator[None]:
    """Context in which operations run their CUDA code on meta tensors.

    Args:
        device: Device; torch is assumed to be built for it, with cuDNN and flash attention.
        launched: Function of a kernel, its arguments and its options, called in place of each launch.
    """

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:  # noqa: ARG001  triton's own names
        launched(kernel, args, options)

    major, minor = CAPABILITIES[device.generation]
    properties = SimpleNamespace(multi_processor_count=device.num_sms.value, major=major, minor=minor)
    with ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(replaced(kind, run=run))
        stack.enter_context(replaced(torch.cuda, get_device_properties=lambda _: properties))
        stack.enter_context(replaced(torch.backends.cudnn, is_available=lambda: True, version=lambda: CUDNN_VERSION))
        stack.enter_context(replaced(torch.backends.cuda, is_flash_attention_available=lambda: True))
        stack.enter_context(replaced(torch.cuda.device_of, __enter__=lambda _: None, __exit__=lambda _, *__: None))
        stack.enter_context(replaced(grouped, sizes_of=_balanced))
        stack.enter_context(replaced(Tensor, is_cuda=property(lambda _: True)))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        library.impl("_scaled_mm.out", lambda *_, out, **__: out, "Meta")  # torch has none of the form that writes into a given result
        stack.enter_context(torch.no_grad())
        yield


@cache
def multiplies(kernel: Any) -> bool:
    """Whether a Triton kernel, or a Triton function that it calls, has a `dot`."""
    source = inspect.getsource(kernel.fn)
    if re.search(r"\bdot\(", source.partition("):")[2]):
        return True
    called = (kernel.fn.__globals__.get(name) for name in set(re.findall(r"\b(\w+)\(", source)))
    return any(multiplies(each) for each in called if isinstance(each, (JITFunction, InterpretedFunction)) and each is not kernel)


def _balanced(counts: Tensor, num_rows: int) -> list[int]:
    """Balanced group sizes, since the counts have no values; on CUDA they are copied to the host."""
    torch.ops.aten._local_scalar_dense(counts.sum())
    return list(spread(num_rows, counts.shape[0]))
