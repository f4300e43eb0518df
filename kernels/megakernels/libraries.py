"""Optional packages of CUDA kernels by other authors, which a plan may name and a machine may have; needs no torch.

Their internal functions are called, and their internal memory is a fact here, so each is supported in one version only.
"""

from collections.abc import Collection
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Literal, NamedTuple

LibraryName = Literal["flash-attn-4", "quack-kernels"]
FLASH4: LibraryName = "flash-attn-4"
QUACK: LibraryName = "quack-kernels"
GENERATION = "hopper"
"""Generation of the devices on which they are used; elsewhere their tiles, and with them their bytes, are others."""
HOPPER = 9
"""Major compute capability of that generation."""


class Known(NamedTuple):
    """The functions of a package that are called.

    Attributes:
        version: The version whose calls and bytes are known.
        module: The module of the functions.
        functions: Names of the functions.
        replaces: Own kernels that run where it is missing or refuses.
    """

    version: str
    module: str
    functions: tuple[str, ...]
    replaces: str


LIBRARIES: dict[LibraryName, Known] = {
    FLASH4: Known("4.0.0b36", "flash_attn.cute.interface", ("_flash_attn_fwd", "_flash_attn_bwd"), "attention's own kernels"),
    QUACK: Known("0.6.5", "quack.gemm_interface", ("gemm_symmetric",), "Muon's own symmetric products"),
}


class Loaded(NamedTuple):
    """A package of this process.

    Attributes:
        module: The module of its functions; None where it is not used.
        reason: Reason that it is not used; None if it is.
    """

    module: ModuleType | None
    reason: str | None


_chosen: set[LibraryName] = set()  # per process, like the kernels


def use_libraries(names: Collection[LibraryName]) -> None:
    """Choose, for this process, the packages that may run in place of own kernels on CUDA; none by default."""
    _chosen.clear()
    _chosen.update(names)


def uses_library(name: LibraryName) -> bool:
    """True if the package may run in this process; `loaded` says if it can."""
    return name in _chosen


def installed_version(name: LibraryName) -> str | None:
    """The version that is installed, read without importing the package; None if there is none."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  (it takes as long as the rest of a short command)

    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def loaded(name: LibraryName) -> Loaded:
    """The package, imported at the first call; a package that cannot be imported, or of another version, is as good as none."""
    known, found = LIBRARIES[name], installed_version(name)
    if found is None:
        return Loaded(None, "not installed")
    if found != known.version:
        return Loaded(None, f"version {found} is installed, and the calls and bytes of {known.version} are known")
    try:
        module = import_module(known.module)
    except Exception as error:
        return Loaded(None, f"its import fails: {type(error).__name__}: {error}")
    missing = [each for each in known.functions if not hasattr(module, each)]
    return Loaded(None, f"it has no {missing[0]}") if missing else Loaded(module, None)
