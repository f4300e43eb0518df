"""HBM bytes, FLOPs and launches of one aten operation from operand shapes: one CUDA kernel each, except views and metadata operations."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rooflines.work import Kernel

aten = torch.ops.aten

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "alias", "detach", "_unsafe_view"}
"""Operations without a kernel whose results do not share storage with an operand."""
OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "set_", "normal_", "uniform_"}
"""In-place operations that do not read their destination."""
LIKE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
"""Operations that read the shape of their first operand, not its elements."""
GATHERS = {"embedding", "index", "index_select", "gather", "take_along_dim", "_unsafe_index"}
"""Operations that read only the selected elements of their first operand."""
SCATTERS = {"index_put_", "_index_put_impl_", "index_add_", "scatter_", "scatter_add_", "index_copy_", "scatter_reduce_"}
"""Operations that write only the selected elements of their first operand."""
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "bincount",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}
"""Operations whose result, or its size, is read by the host."""
UNTOUCHED = {"_fused_adamw_": ("grads",), "_fused_adam_": ("grads",)}
"""Arguments that are mutable in the schema but written only with a gradient scaler."""
ATTENTION = {
    "_scaled_dot_product_cudnn_attention": (0, 2),
    "_scaled_dot_product_flash_attention": (0, 2),
    "_scaled_dot_product_efficient_attention": (0, 2),
    "_flash_attention_forward": (0, 1),
    "_scaled_dot_product_cudnn_attention_backward": (1, 2),
    "_scaled_dot_product_flash_attention_backward": (1, 2),
    "_scaled_dot_product_efficient_attention_backward": (1, 2),
    "_flash_attention_backward": (1, 1),
}
"""Index of the query among the arguments, followed by key and value, and its dim of positions; a backward has the gradient first."""
MULTI_TENSOR_CHUNK, MULTI_TENSOR_BLOCKS = 65536, 320
"""Elements of a chunk and largest number of chunks of a multi-tensor launch.

Source: aten/src/ATen/native/cuda/MultiTensorApply.cuh, kChunkSize and depth_to_max_blocks.
"""


def kernel_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Kernel | None:
    """The kernel of an executed operation; None if it has none."""
    name = func._opname
    operands, results = tensors_of((args, kwargs)), tensors_of(out)
    if name in WAITS:
        return Kernel(name, sum(map(tensor_bytes, operands)) + sum(map(tensor_bytes, results)), syncs=1)
    if name in ALLOCATES or not (operands or results) or func.namespace == "prim":
        return None
    written = list(_written(func, args, kwargs))
    fresh = [each for each in results if not any(_same_storage(each, other) for other in operands)]
    if not written and not fresh:
        return None  # a view or a metadata operation
    if name == "copy_" and _is_same_data(args[0], args[1]):
        return None  # `x[i] += y` ends with this operation; torch returns early
    return Kernel(
        name,
        _read_bytes(name, func, args, kwargs, operands, written, results) + _written_bytes(name, args, written, fresh),
        _products(func, args, kwargs, out),
        max((each.numel() for each in (*operands, *results)), default=0) if func._overloadpacket not in flop_registry else 0,
        _launches(name, args),
        int(_leaves_device(operands, fresh)),
        library=name in ATTENTION,
    )


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of nested arguments, without duplicates; a tensor descriptor is that of its tensor."""
    leaves = (getattr(leaf, "base", leaf) for leaf in tree_leaves(value))
    found: dict[int, Tensor] = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    return list(found.values())


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor; an expanded dim counts once."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0) * tensor.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """Short dtype name, as in the peak rates of a device."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Operands that the operation mutates."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name not in UNTOUCHED.get(func._opname, ()):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tensors_of(value)


def _is_overwritten(name: str, func: Any) -> bool:
    return name in OVERWRITES or any(argument.is_out for argument in func._schema.arguments)


def _read_bytes(
    name: str,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Iterable[Tensor],
    written: list[Tensor],
    results: list[Tensor],
) -> int:
    untouched = {id(each) for each in written} if _is_overwritten(name, func) else set()
    if name in LIKE:
        untouched.add(id(args[0]))
    if name in GATHERS:
        source = args[0]
        others = sum(tensor_bytes(each) for each in operands if each is not source)
        return others + sum(map(tensor_bytes, results))
    if name in SCATTERS:
        adds = "add" in name or "reduce" in name or (name.endswith("put_") and len(args) > 3 and bool(args[3])) or kwargs.get("accumulate")
        given = sum(tensor_bytes(each) for each in operands if each is not args[0])
        return given + (_values_bytes(args) if adds else 0)
    return sum(tensor_bytes(each) for each in operands if id(each) not in untouched)


def _written_bytes(name: str, args: tuple[Any, ...], written: list[Tensor], fresh: list[Tensor]) -> int:
    if name in SCATTERS:
        return _values_bytes(args)
    distinct = {id(each): each for each in (*written, *fresh)}
    return sum(map(tensor_bytes, distinct.values()))


def _values_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of the elements written by a scatter: the elements of its last tensor, in the dtype of the destination."""
    values = tensors_of(args[1:])[-1]
    return values.numel() * int(args[0].element_size())


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _is_same_data(one: Tensor, other: Tensor) -> bool:
    """True if both are the same view of the same storage. Source: pytorch, aten/src/ATen/native/Copy.cpp, copy_."""
    views = [(each.shape, each.stride(), each.storage_offset(), each.dtype) for each in (one, other)]
    return _same_storage(one, other) and views[0] == views[1]


def _leaves_device(operands: list[Tensor], fresh: list[Tensor]) -> bool:
    """True if a tensor of another device is copied to the host."""
    return any(each.device.type != "cpu" for each in operands) and any(each.device.type == "cpu" for each in fresh)


def _products(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> dict[str, int]:
    """FLOPs of a matrix product by operand dtype, by the formulas of torch.utils.flop_counter; attention with a causal mask counts half."""
    packet, operands = func._overloadpacket, tensors_of(args)
    if packet in (aten._grouped_mm, aten._scaled_grouped_mm):
        left, right = args[0], args[1]
        flops = 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]  # each row is multiplied with one matrix or one other row
    elif func._opname in ATTENTION:
        flops = _attention_flops(func._opname, args) // (2 if _named(func, args, kwargs, "is_causal") else 1)
    elif packet in flop_registry:
        given = [value for value in args if not isinstance(value, torch.dtype)]  # the formulas do not know the dtype of the result
        flops = int(flop_registry[packet](*given, **kwargs, out_val=out))
    else:
        return {}
    return {dtype_name(next(each.dtype for each in operands if each.is_floating_point())): flops}


def _attention_flops(name: str, args: tuple[Any, ...]) -> int:
    """FLOPs over all pairs of positions: two products forward; backward recomputed scores and four gradients."""
    first, positions = ATTENTION[name]
    query, key, value = args[first : first + 3]
    batch, num_heads, width, value_width = query.shape[0], query.shape[3 - positions], query.shape[3], value.shape[3]
    pairs = batch * num_heads * query.shape[positions] * key.shape[positions]
    return 2 * pairs * (3 * width + 2 * value_width if first else width + value_width)


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The value of an argument by its name; None if there is none."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return None


def _launches(name: str, args: tuple[Any, ...]) -> int:
    """Number of launches: one, or for a list of tensors the number that its chunks need."""
    first = args[0] if args else None
    if not isinstance(first, (list, tuple)) or not (name.startswith(("_foreach", "_fused"))):
        return 1
    chunks = sum(-(-each.numel() // MULTI_TENSOR_CHUNK) for each in first if isinstance(each, Tensor))
    return max(1, -(-chunks // MULTI_TENSOR_BLOCKS))
