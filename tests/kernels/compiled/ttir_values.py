"""TTIR's operations on numpy values, each by its name there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

COMPUTED: dict[str, Any] = {
    **{"i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64},
    **{"f16": np.float16, "bf16": np.float32, "f32": np.float32, "f64": np.float64},
}
STORED = {**COMPUTED, "bf16": np.uint16}
UNSIGNED = {np.dtype(f"int{bits}"): np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)}
i32 = np.int32


def quiet() -> AbstractContextManager[None]:
    """Integers wrap and floats overflow without a warning, as on a GPU."""
    return np.errstate(all="ignore")


def size_of(kind: str) -> int:
    return int(np.dtype(STORED[kind]).itemsize)


def argument(value: Any, kind: str) -> Any:
    """An argument of a launch: the address of a tensor, a descriptor itself, or a number of the type it is declared with."""
    if isinstance(value, Tensor):
        return np.int64(value.data_ptr())
    if isinstance(value, TensorDescriptor):
        return value
    return COMPUTED[{"fp32": "f32", "fp64": "f64", "u1": "i1"}.get(kind, kind)](value)


def rounded(x: Any) -> Any:
    """fp32 rounded to bf16, to the nearest, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    nearest = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), x, nearest)


def from_stored(x: Any, kind: str) -> Any:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32) if kind == "bf16" else x


def to_stored(x: Any, kind: str) -> Any:
    return (x.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else x


def constant(text: str, element: str, shape: tuple[int, ...]) -> Any:
    word = text.removeprefix("dense<").removesuffix(">")
    if word in ("true", "false"):
        value: Any = word == "true"
    elif word.startswith("0x"):  # of a float: its bits
        value = np.array(int(word, 16), dtype=f"u{size_of(element)}").view(STORED[element])
        value = from_stored(value, element)
    else:
        value = int(word) if element.startswith("i") else float(word)
    made = np.full(shape, value, dtype=COMPUTED[element])
    return made if shape else made[()]


def steps(first: Any, stop: Any, step: Any) -> Iterator[Any]:
    kind = type(first)
    return (kind(each) for each in range(int(first), int(stop), int(step)))


def signless(x: Any) -> Any:
    return x.view(UNSIGNED[x.dtype])


def divsi(a: Any, b: Any) -> Any:
    """Towards zero."""
    found = a // b
    return found + ((found * b != a) & ((a < 0) != (b < 0)))


def remsi(a: Any, b: Any) -> Any:
    return a - divsi(a, b) * b


def divui(a: Any, b: Any) -> Any:
    return (signless(a) // signless(b)).view(a.dtype)


def remui(a: Any, b: Any) -> Any:
    return (signless(a) % signless(b)).view(a.dtype)


def shrui(a: Any, b: Any) -> Any:
    return (signless(a) >> signless(b)).view(a.dtype)


def cmpi(how: str, a: Any, b: Any) -> Any:
    if how.startswith("u"):
        a, b, how = signless(a), signless(b), "s" + how[1:]
    return {"eq": np.equal, "ne": np.not_equal, "slt": np.less, "sle": np.less_equal, "sgt": np.greater, "sge": np.greater_equal}[how](a, b)


def cmpf(how: str, a: Any, b: Any) -> Any:
    """Ordered ones (`o`) are false where a value is NaN, the others (`u`) true."""
    plain = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    unordered = np.isnan(a) | np.isnan(b)
    if how in ("ord", "uno"):
        return unordered if how == "uno" else ~unordered
    found = plain[how[1:]](a, b)
    return found | unordered if how.startswith("u") else found & ~unordered


def select(condition: Any, a: Any, b: Any) -> Any:
    return np.where(condition, a, b)


addf, subf, mulf, divf = np.add, np.subtract, np.multiply, np.divide
negf, absf = np.negative, np.abs
maxnumf, minnumf, maximumf, minimumf = np.fmax, np.fmin, np.maximum, np.minimum
maxsi, minsi = np.maximum, np.minimum
exp, exp2, log, log2, sqrt, floor, cos, sin, precise_sqrt = np.exp, np.exp2, np.log, np.log2, np.sqrt, np.floor, np.cos, np.sin, np.sqrt
precise_divf = np.divide


def fma(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


def rsqrt(x: Any) -> Any:
    return (1 / np.sqrt(x)).astype(x.dtype)


def extf(x: Any, _given: str, wanted: str) -> Any:
    found = np.asarray(x).astype(COMPUTED[wanted])
    return rounded(found) if wanted == "bf16" else found if found.shape else found[()]


truncf = fp_to_fp = sitofp = fptosi = trunci = extf


def extsi(x: Any, given: str, wanted: str) -> Any:
    found = extf(x, given, wanted)
    return -found if given == "i1" else found


def extui(x: Any, given: str, wanted: str) -> Any:
    return extf(x if given == "i1" else signless(x), given, wanted)


uitofp = extui


def bitcast(x: Any, given: str, wanted: str) -> Any:
    if given == wanted or "ptr" in given:
        return x
    return from_stored(to_stored(np.asarray(x), given).view(STORED[wanted]), wanted)[()]


def ptr_to_int(x: Any, *_kinds: str) -> Any:
    return x


def splat(x: Any, shape: tuple[int, ...]) -> Any:
    return np.broadcast_to(x, shape)


broadcast = splat


def reshape(x: Any, shape: tuple[int, ...]) -> Any:
    return x.reshape(shape)


def make_range(ends: Sequence[int]) -> Any:
    return np.arange(min(ends), max(ends), dtype=np.int32)


def expand_dims(x: Any, axis: Sequence[int]) -> Any:
    return np.expand_dims(x, axis[0])


def trans(x: Any, order: Sequence[int]) -> Any:
    return x.transpose(order)


def join(a: Any, b: Any) -> Any:
    return np.stack([a, b], -1)


def split(x: Any) -> Any:
    return x[..., 0], x[..., 1]


def dot(a: Any, b: Any, sums: Any) -> Any:
    return sums + a.astype(np.float32) @ b.astype(np.float32)


def reduce(given: Sequence[Any], axis: int, _reverse: bool, combine: Callable[..., tuple[Any, ...]]) -> Any:
    """A tree: halves are combined with each other."""
    parts = [np.moveaxis(each, axis, 0) for each in given]
    while len(parts[0]) > 1:
        half = len(parts[0]) // 2
        parts = list(combine(*(each[:half] for each in parts), *(each[half:] for each in parts)))
    return [each[0] for each in parts]


def scan(given: Sequence[Any], axis: int, reverse: bool, combine: Callable[..., tuple[Any, ...]]) -> Any:
    """Twice as many positions are combined in each step."""
    turn = (lambda each: each[::-1]) if reverse else (lambda each: each)
    parts, distance = [turn(np.moveaxis(each, axis, 0)) for each in given], 1
    while distance < len(parts[0]):
        later = combine(*(each[:-distance] for each in parts), *(each[distance:] for each in parts))
        parts = [np.concatenate([each[:distance], new]) for each, new in zip(parts, later, strict=True)]
        distance *= 2
    return [np.moveaxis(turn(each), 0, axis) for each in parts]


def flushed(x: Any) -> Any:
    """Subnormal fp32 numbers as zero, as `ftz` has them."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


ASSEMBLY: dict[str, Callable[[Any], Any]] = {
    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;": lambda x: x,  # two of bf16 in fp32
    "mov.b32 $0, $1;": lambda x: x,
    "ex2.approx.ftz.f32 $0, $1;": lambda x: flushed(np.exp2(flushed(x))),
    "rcp.approx.ftz.f32 $0, $1;": lambda x: flushed(np.float32(1) / flushed(x)),
    "cos.approx.ftz.f32 $0, $1;": np.cos,
    "sin.approx.ftz.f32 $0, $1;": np.sin,
}


def elementwise_inline_asm(x: Any, code: str) -> Any:
    return ASSEMBLY[code](x)
