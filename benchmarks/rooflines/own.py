"""Count operations of `megakernels` by running their CUDA code without values and recording torch operations and Triton launches.

An operation that runs plain torch on CUDA counts as its torch operations, a fused one as its kernels and the operations around them.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megakernels._common import registered_cost
from megaplan.devices import Device
from megarun.kernels.cuda_code import NAMESPACE, WITHOUT_VALUES, body_of, cuda_code, signature_of, without_values
from megarun.kernels.target import Target
from rooflines.aten import DTYPE_NAMES, kernel_of, tensor_bytes, tensors_of
from rooflines.products import multiplies
from rooflines.work import Kernel, Work

TF32_PRODUCTS = 3
"""Number of TF32 products of an fp32 product in a Triton kernel (`megakernels._common.tiles.dot`)."""


class Bodies:
    """Counts each operation once per signature of operands: shapes, strides, dtypes and constants."""

    def __init__(self, device: Device) -> None:
        self._target = Target.planned(device)
        self._known: dict[tuple[Any, ...], Work] = {}

    def work_of(self, func: Any, args: tuple[Any, ...], out: Any) -> Work:
        """Count one call. Must not run under a counting mode.

        Raises:
            ValueError: An operation whose Triton kernels have products registers no cost.
        """
        key = func, signature_of(args)
        if key not in self._known:
            self._known[key] = self._run(func, args, out)
        return self._known[key]

    def _run(self, func: Any, args: tuple[Any, ...], out: Any) -> Work:
        kernels: list[Kernel] = []
        multiplying: list[str] = []

        def launched(kernel: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
            name, operands = kernel.fn.__name__, _distinct(tensors_of((given, options)))
            kernels.append(Kernel(name, sum(map(tensor_bytes, operands)), other_flops=_largest(operands), triton=True))
            if multiplies(kernel):
                multiplying.append(name)

        with cuda_code(self._target, launched), Noted(kernels):
            body_of(func)(*map(without_values, args))
        cost = registered_cost(str(func), args) if any(kernel.triton for kernel in kernels) else None
        products = {} if cost is None else dict(_products(cost.products))
        if multiplying and not products:
            names = ", ".join(multiplying)
            raise ValueError(f"{func}: {names} use `dot`, but the operation registers no products; see megakernels._common.register_cost")
        ideal = sum(map(tensor_bytes, tensors_of((args, out))))
        return Work(
            f"{NAMESPACE}.{func._opname}",
            _touched(kernels, 0 if cost is None else cost.untouched_bytes),
            products,
            0 if cost is None else cost.steps,
            0 if cost is None else cost.repeated_bytes,
            ideal,
        )


class Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    """Records the kernel of each aten operation."""

    def __init__(self, kernels: list[Kernel]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels = kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operation and record it; composite operations are decomposed first."""
        given = kwargs or {}
        if _is_composite(func):
            with self:
                return func.decompose(*args, **given)
        made = WITHOUT_VALUES.get(func)
        out = func(*args, **given) if made is None else made(*args, **given)
        kernel = kernel_of(func, args, given, out)
        if kernel is not None:
            self._kernels.append(kernel)
        return out


def _touched(kernels: list[Kernel], untouched: int) -> tuple[Kernel, ...]:
    """The kernels, each Triton kernel less its share of the bytes that launches over parts of operands do not touch."""
    given = sum(kernel.num_bytes for kernel in kernels if kernel.triton)
    if not untouched:
        return tuple(kernels)
    return tuple(
        replace(kernel, num_bytes=kernel.num_bytes - kernel.num_bytes * untouched // given) if kernel.triton else kernel
        for kernel in kernels
    )


@cache
def _is_composite(func: Any) -> bool:
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _products(stated: Any) -> Any:
    for dtype, flops in stated.items():
        yield ("tf32", TF32_PRODUCTS * flops) if dtype == torch.float32 else (DTYPE_NAMES[dtype], flops)


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors without duplicates of the same memory: an unused pointer argument gets any tensor."""
    found = {(each.untyped_storage()._cdata, each.storage_offset(), each.shape): each for each in tensors}
    return list(found.values())


def _largest(tensors: list[Tensor]) -> int:
    return max((each.numel() for each in tensors), default=0)
