"""Annotations are postponed only in files that need it: strings make a module of named tuples slow to import, which compiles each."""

import ast
import builtins
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "kernels", "benchmarks", "scripts", "tests")
POSTPONED = "from __future__ import annotations"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_typing_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def bound(body: Iterable[ast.AST]) -> set[str]:
    """Names that these statements bind."""
    found = set()
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
            continue
        for each in ast.walk(node):
            if isinstance(each, ast.alias):
                found.add((each.asname or each.name).partition(".")[0])
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                found.add(each.id)
    return found


def annotations(node: ast.AST) -> Iterator[ast.expr]:
    """The annotations of one function or variable."""
    if isinstance(node, Function):
        given = node.args
        each = *given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg
        yield from (argument.annotation for argument in each if argument is not None and argument.annotation is not None)
        yield from (node.returns,) if node.returns is not None else ()
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation


def names(node: ast.AST) -> set[str]:
    return {each.id for annotation in annotations(node) for each in ast.walk(annotation) if isinstance(each, ast.Name)}


def needs(body: list[ast.stmt], known: set[str], later: set[str]) -> bool:
    """True if an annotation has a name that is not bound before it, or one of `later` inside a function."""
    for node in body:
        if names(node) - known:
            return True
        if isinstance(node, Function) and any(names(each) & later for each in ast.walk(node) if each is not node):
            return True
        if isinstance(node, ast.ClassDef) and needs(node.body, set(known), later):
            return True
        if not is_typing_only(node):
            known |= bound([node])
    return False


def test_annotations_are_postponed_where_a_name_is_not_bound_yet() -> None:
    wrong = []
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if f"\n{POSTPONED}\n" in f"\n{text}":
            body = ast.parse(text).body
            later = bound(filter(is_typing_only, body)) - bound(node for node in body if not is_typing_only(node))
            if not needs(body, set(dir(builtins)), later):
                wrong.append(path.relative_to(ROOT).as_posix())
    assert wrong == [], f"remove the line {POSTPONED!r}"
