"""Run the CUDA code of an operation without a GPU, on meta tensors that report `is_cuda`, with Triton launches recorded.

An operation of `megakernels` selects its implementation by the device of its operands. Its Python code runs here as on CUDA, with the same
selection, copies and torch operations around its kernels; nothing is computed.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from megakernels.ops.moe import grouped
from megarun.kernels.target import Target
from megarun.parallel.groups.expert import spread
from megarun.trace.replaced import replaced

NAMESPACE = "megakernels"
Launched = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
WITHOUT_VALUES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._local_scalar_dense.default: lambda _: 0,
    torch.ops.aten.bincount.default: lambda values, _weights=None, minlength=0: values.new_empty(minlength, dtype=torch.int64),
}
"""Results of operations that depend on values: a scalar is 0 or False, and no index exceeds `minlength`."""


class Unvalued(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """Mode for meta tensors: operations whose results depend on values return the results in `WITHOUT_VALUES`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation."""
        return WITHOUT_VALUES.get(func, func)(*args, **(kwargs or {}))


def body_of(func: Any) -> Callable[..., Any]:
    """The Python code of an operation of `megakernels`, which selects and launches its implementation."""
    body: Callable[..., Any] = OPDEFS[f"{NAMESPACE}::{func._opname}"]._init_fn
    return body


def signature_of(value: Any) -> Any:
    """Arguments without values, hashable: shape, strides, place in the storage and dtype of each tensor."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype
    return tuple(signature_of(each) for each in value) if isinstance(value, (list, tuple)) else value


def without_values(value: Any) -> Any:
    """A meta tensor with the same shape, strides, dtype and place in a storage; other values unchanged."""
    if isinstance(value, Tensor):
        first = value.storage_offset()
        last = first + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        whole = torch.empty(last + 1 if value.numel() else first, dtype=value.dtype, device="meta")
        return whole.as_strided(value.shape, value.stride(), first)
    return [without_values(each) for each in value] if isinstance(value, list) else value


@contextmanager
def cuda_code(target: Target, launched: Launched) -> Iterator[None]:
    """Context in which operations run their CUDA code on meta tensors.

    Args:
        target: Device and libraries that the code sees.
        launched: Function of a kernel, its arguments and its options, called in place of each launch.
    """

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:  # noqa: ARG001  triton's own names
        launched(kernel, args, options)

    major, minor = target.capability
    properties = SimpleNamespace(multi_processor_count=target.num_sms, major=major, minor=minor, name=target.device_name)
    has_cudnn = target.cudnn_version is not None
    with ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(replaced(kind, run=run))
        stack.enter_context(replaced(torch.cuda, get_device_properties=lambda _: properties))
        stack.enter_context(replaced(torch.backends.cudnn, is_available=lambda: has_cudnn, version=lambda: target.cudnn_version))
        stack.enter_context(replaced(torch.backends.cuda, is_flash_attention_available=lambda: target.has_flash))
        stack.enter_context(replaced(torch.cuda.device_of, __enter__=lambda _: None, __exit__=lambda _, *__: None))
        stack.enter_context(replaced(grouped, sizes_of=_balanced))
        stack.enter_context(replaced(Tensor, is_cuda=property(lambda _: True)))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        library.impl("_scaled_mm.out", lambda *_, out, **__: out, "Meta")  # torch has no variant that writes into a given result
        library.impl("_fused_adamw_.tensor_lr", lambda *_, **__: None, "Meta")  # nor a variant whose learning rate is on the device
        stack.enter_context(torch.no_grad())
        yield


def _balanced(counts: Tensor, num_rows: int) -> list[int]:
    """Balanced group sizes, since the counts have no values; on CUDA they are copied to the host."""
    torch.ops.aten._local_scalar_dense(counts.sum())
    return list(spread(num_rows, counts.shape[0]))
