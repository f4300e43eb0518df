"""One launch of a Triton kernel as data: its arguments without values, which another process can give to the launcher again."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import make_backend
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from megarun.kernels.target import WARP_SIZE, Target
from megarun.trace.replaced import replaced

MULTIPLE = 16
"""The launcher specialises on pointers, in bytes, and on integers that are multiples of this."""
_LAUNCH: Any = JITFunction.run
"""The launcher, which `cuda_code` replaces for a while."""


class Operand(NamedTuple):
    """A tensor argument as the launcher sees it."""

    dtype: torch.dtype
    aligned: bool


class Described(NamedTuple):
    """A tensor descriptor as the launcher sees it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


class Function(NamedTuple):
    """A Triton function, by the module and the name that it has there."""

    module: str
    name: str


class KernelLaunch(NamedTuple):
    """One launch, up to the values of tensors.

    Attributes:
        kernel: The kernel.
        args: Positional arguments, tensors as `Operand`.
        options: Arguments by name: constants, warps, stages.
        key: The launcher's own key: types, specialisations, constants and options. Launches with equal keys run one compiled kernel.
    """

    kernel: Function
    args: tuple[Any, ...]
    options: dict[str, Any]
    key: str = ""

    @property
    def identity(self) -> tuple[Function, str]:
        """The key that decides which compiled kernel runs."""
        return self.kernel, self.key


class CompilingDriver:
    """A Triton driver for a device that may be absent: it compiles kernels but launches none."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget("cuda", target.arch, WARP_SIZE)

    def get_current_target(self) -> GPUTarget:
        """The device to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Number of the GPU."""
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002  triton's own names
        """No stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Device of torch's tensors."""
        return torch.device("cpu")


def compile_for(target: Target) -> None:
    """Make this process compile for a device, whatever it has: it can launch no kernel afterwards."""
    driver.set_active(CompilingDriver(target))


def recorded(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> KernelLaunch:
    """A launch of a kernel with these arguments, without its key."""
    return KernelLaunch(
        _function(kernel), tuple(map(_without_values, args)), {name: _without_values(each) for name, each in options.items()}
    )


def keyed(launch: KernelLaunch) -> KernelLaunch:
    """The launch with its key, as the launcher makes it; after `compile_for`."""
    found: list[str] = []

    def seen(*, key: str, **_: Any) -> bool:
        found.append(key)
        return True  # compiles nothing

    with _cache_hook(seen):
        replay(launch)
    (key,) = found
    return launch._replace(key=str(key))


def replay(launch: KernelLaunch) -> Any:
    """Pass the launch to the launcher, which compiles the kernel or reads it from the cache without running it; after `compile_for`."""
    options = {name: _operand(each) for name, each in launch.options.items()}
    return _LAUNCH(_named(launch.kernel), *map(_operand, launch.args), grid=(1,), warmup=True, **options)


class _MissingError(Exception):
    """The cache has no entry."""


def missing(launch: KernelLaunch) -> bool:
    """True if the launcher would compile the kernel, because the cache does not have it; after `compile_for`."""

    def stop(*_: Any) -> None:
        raise _MissingError

    try:
        with replaced(CUDABackend, add_stages=stop):  # the launcher queries the compilation stages after its cache look-up
            replay(launch)
    except _MissingError:
        return True
    return False


def build_launcher(compiled: Any) -> None:
    """Compile the C code that starts a kernel: Triton 3.6 generates it for each signature and keeps it in the same cache, 3.9 does not.

    Where there is no CUDA driver it cannot be linked, and the machine that launches does it.
    """
    with suppress(Exception):
        nvidia.CudaLauncher(compiled.src, compiled.metadata)


def shared_key(target: Target) -> str:
    """The common part of all keys of this Triton: its version, its own files and ptxas. It is cached, and a forked process inherits it."""
    backend: Any = make_backend(GPUTarget("cuda", target.arch, WARP_SIZE))
    return f"{triton_key()}-{backend.hash()}"


@contextmanager
def _cache_hook(hook: Any) -> Iterator[None]:
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def _function(kernel: Any) -> Function:
    return Function(kernel.fn.__module__, kernel.fn.__qualname__)


def _named(function: Function) -> Any:
    return getattr(importlib.import_module(function.module), function.name)


def _without_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Operand(value.dtype, value.data_ptr() % MULTIPLE == 0)
    if isinstance(value, TensorDescriptor):
        return Described(value.base.dtype, tuple(value.shape), tuple(value.strides), tuple(value.block_shape))
    if isinstance(value, tuple):
        parts = map(_without_values, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return _function(value) if hasattr(value, "fn") else value


def _operand(value: Any) -> Any:
    match value:
        case Operand():
            whole = torch.empty(MULTIPLE, dtype=value.dtype, device="meta")
            return whole if value.aligned else whole[1:]
        case Described():
            base = torch.empty(0, dtype=value.dtype, device="meta")
            return TensorDescriptor(base, list(value.shape), list(value.strides), list(value.block))
        case Function():
            return _named(value)
        case tuple():
            parts = map(_operand, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
