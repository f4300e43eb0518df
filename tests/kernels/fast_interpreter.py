"""Triton's interpreter without work that it repeats; values are the same.

Each call of a jitted function inside a kernel searches all of `triton.language` for functions to replace, which the launch has replaced
already, and each conversion builds the table of dtypes again.
"""

import functools
import inspect
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def replaced(module: ModuleType) -> bool:
    return not tl.core.is_builtin(module.program_id)


@functools.cache
def language_modules(function: Any) -> tuple[ModuleType, ...]:
    return tuple(value for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core))


def speed_up() -> None:
    """Patch the interpreter of this process, once."""
    replace = interpreter._patch_lang

    def replace_once(function: Any) -> Any:
        modules = language_modules(function)
        return interpreter._LangPatchScope() if modules and all(map(replaced, modules)) else replace(function)

    plain, cached = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return plain(scalar) if scalar.is_ptr() else cached(scalar)  # types of blocks and pointers have no hash

    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = numpy_dtype
