"""Launches of the kernels without a GPU: the part of the launcher's compilation for sm_90 that a test needs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from compile import SM_90
from triton._C.libtriton import ir
from triton.compiler import ASTSource
from triton.compiler.code_generator import CodeGenerator, flatten_values_to_ir
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature


@dataclass(frozen=True)
class Launch:
    """A kernel with its compiled types and constants, and its call's arguments; a source alone has no arguments."""

    source: ASTSource
    options: Any
    arguments: dict[str, Any]
    grid: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Properties of a call that decide the code."""
        return f"{self.source.hash()} {self.options}"


@cache
def binder_of(kernel: JITFunction[Any]) -> Any:
    """Triton's own function that specialises the arguments of a launch."""
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(SM_90))


def launch_of(kernel: JITFunction[Any], arguments: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> Launch:
    """Launch of a call, as the launcher specialises it."""
    options = {"debug": False, **options}
    bound, specialization, left = binder_of(kernel)(*arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(make_backend(SM_90), options, bound, specialization, left)
    sizes = grid(bound) if callable(grid) else grid
    return Launch(ASTSource(kernel, signature, constants, attributes), parsed, dict(bound), tuple(sizes))


@contextmanager
def launches_to(taken: Callable[[Launch], None]) -> Iterator[None]:
    """Context in which each launch of a kernel goes to `taken` instead of a GPU."""

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        taken(launch_of(kernel, arguments, grid, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        yield


def first_ir(source: ASTSource, options: Any = None) -> Any:
    """The module that the frontend makes: no pass has run."""
    backend = make_backend(SM_90)
    if options is None or isinstance(options, dict):
        options = backend.parse_options(dict(options or {}))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return source.make_ir(SM_90, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


def optimised_ttir(launch: Launch) -> str:
    """The text of the module after all passes over Triton's own operations."""
    backend = make_backend(SM_90)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, launch.options, launch.source.language)
    return str(stages["ttir"](first_ir(launch.source, launch.options), {}).str_nodebug())


@dataclass(frozen=True)
class Lost:
    """A variable of a function that a loop changes and does not carry into its next turn."""

    function: str
    line: int
    name: str


@contextmanager
def watched_loops(lost: set[Lost], loops: set[tuple[str, int]]) -> Iterator[None]:
    """Context that records variables lost by the frontend's loops in `lost`, and each loop in `loops`.

    The frontend runs a loop's body on trial, and carries each variable whose value has changed by then. With the carried ones in place it
    runs the body again: a variable that is live before the loop, not carried, and another value at the body's end keeps its first value.
    """
    find, visit = CodeGenerator._find_carries, CodeGenerator.visit_compound_statement

    def find_carries(self: Any, node: Any, *arguments: Any, **named: Any) -> Any:
        self.trials = getattr(self, "trials", 0) + 1
        names, *rest = find(self, node, *arguments, **named)
        self.trials -= 1
        self.bodies = {**getattr(self, "bodies", {}), id(node.body): (node, names)}
        return names, *rest

    def visit_statements(self: Any, statements: Any) -> None:
        node, carried = getattr(self, "bodies", {}).get(id(statements), (None, ()))
        before = dict(self.lscope)
        visit(self, statements)
        if node is None or getattr(self, "trials", 0):
            return
        loops.add((self.function_name, node.lineno))
        own = node.target.id if hasattr(node, "target") else None
        for name, value in before.items():
            held = name not in carried and name != own and hasattr(value, "_flatten_ir")
            if held and flatten_values_to_ir([value]) != flatten_values_to_ir([self.lscope[name]]):
                lost.add(Lost(self.function_name, node.lineno, name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CodeGenerator, "_find_carries", find_carries)
        patch.setattr(CodeGenerator, "visit_compound_statement", visit_statements)
        yield
