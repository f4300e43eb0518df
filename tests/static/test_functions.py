"""No function of `src/` and `kernels/` is long or branches much; Triton kernels, one straight formula each, may be long.

Complexity is 1 and one more for each decision of the function itself: `if`, `elif`, loop, `except`, `case`, `assert`, comprehension and its
conditions, conditional expression, and each operand of `and` and `or` after the first. Ruff's C901 counts statements alone.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "src", ROOT / "kernels")
MOST_LINES, MOST_COMPLEX = 80, 20
Function = ast.FunctionDef | ast.AsyncFunctionDef
DECISIONS = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)

pytestmark = pytest.mark.skipif(not SOURCES[0].is_dir(), reason="needs the sources")


@cache
def functions() -> list[tuple[str, Function]]:
    """Every function, methods and inner functions among them, with its `path::name`; those of Triton left out."""
    found = []
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, Function)]
            found += [(f"{path.relative_to(ROOT).as_posix()}::{node.name}", node) for node in nodes if not is_triton(node)]
    return found


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.ClassDef):
            yield child
            yield from own_nodes(child)


def complexity(function: Function) -> int:
    """Complexity of a function by the rule above."""
    found = 1
    for node in own_nodes(function):
        if isinstance(node, DECISIONS):
            found += 1
        elif isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
    return found


def is_triton(function: Function) -> bool:
    """True if Triton compiles it."""
    return any("triton.jit" in ast.unparse(each) for each in function.decorator_list)


def test_no_function_is_longer_than_80_lines() -> None:
    spans = [(name, (node.end_lineno or node.lineno) - node.lineno + 1) for name, node in functions()]
    assert [(name, lines) for name, lines in spans if lines > MOST_LINES] == []


def test_no_function_is_more_complex_than_20() -> None:
    counts = [(name, complexity(node)) for name, node in functions()]
    assert [(name, count) for name, count in counts if count > MOST_COMPLEX] == []


def test_names_of_users_are_looked_up_without_exceptions() -> None:
    """`Path.is_file` and its like raise for a name that is too long, or in a folder that may not be searched; `os.path`'s are false."""
    found = []
    for path in sorted((SOURCES[0] / "megaplan").rglob("*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        names = (call.func for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in ("is_file", "is_dir", "exists"))
        found += [f"{path.relative_to(ROOT)}:{name.lineno}" for name in names if ast.unparse(name.value) != "os.path"]
    assert not found
