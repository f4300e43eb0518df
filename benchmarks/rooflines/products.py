"""Triton kernels that multiply matrices."""

import inspect
import re
from functools import cache
from typing import Any

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


@cache
def multiplies(kernel: Any) -> bool:
    """True if a Triton kernel, or a Triton function that it calls, has a `dot`."""
    source = inspect.getsource(kernel.fn)
    if re.search(r"\bdot\(", source.partition("):")[2]):
        return True
    called = (kernel.fn.__globals__.get(name) for name in set(re.findall(r"\b(\w+)\(", source)))
    return any(multiplies(each) for each in called if isinstance(each, (JITFunction, InterpretedFunction)) and each is not kernel)
