"""Differentiable operations with explicit saved sets, and their facts.

Every operation is a function of this module: `from megakernels import rms_norm`. docs/reference/kernels.md lists them with their shapes and
saved tensors; docs/reference/ops.md is their contract. `ops/` has one folder per operation: `facts.py` has its sizes, tiles, work and
memory as plain integers, `op.py` the public function and its registration, `reference.py` the plain torch formulas, `kernel.py` the Triton
kernels, if any.

The first use of an operation imports torch; the facts do not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megakernels.api import *  # noqa: F403
    from megakernels.api import __all__ as __all__


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'megakernels' has no attribute {name!r}")
    return getattr(import_module("megakernels.api"), name)
