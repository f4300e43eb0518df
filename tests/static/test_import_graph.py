"""The import graph of `src/` and `kernels/` has no cycle.

Counted: every `import` and `from … import` of a module of megaplan, megarun or megakernels, at module level and inside functions, so that a
lazy import hides no cycle. Importing `a.b.c` also runs `a/__init__.py` and `a/b/__init__.py`, so these count too unless they contain the
importer. Imports under `if TYPE_CHECKING:` never run; they are checked separately, with the cycles that they still close listed by name.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "src", ROOT / "kernels")
MOST_MODULES_AT_ROOT = 12
ONLY_FOR_TYPES = {("megaplan.budget.casts", "megaplan.budget.chunk")}
"""Imports for annotations alone, whose other direction is imported when the program runs."""

pytestmark = pytest.mark.skipif(not SOURCES[0].is_dir(), reason="needs the sources")


@cache
def modules() -> Mapping[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_statements(node: ast.AST, *, for_types: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The import statements below a node, and whether each is for annotations alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, for_types
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for each in child.body:
                yield from import_statements(ast.Module([each], []), for_types=True)
            for each in child.orelse:
                yield from import_statements(ast.Module([each], []), for_types=for_types)
        else:
            yield from import_statements(child, for_types=for_types)


def targets(statement: ast.Import | ast.ImportFrom, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a statement names: of `from a import b`, `a.b` where that is a module, else `a`."""
    if isinstance(statement, ast.Import):
        yield from (name.name for name in statement.names)
        return
    assert statement.level == 0, "imports are absolute"
    for name in statement.names:
        yield full if (full := f"{statement.module}.{name.name}") in known else str(statement.module)


def graph(known: Mapping[str, Path], *, with_types: bool) -> dict[str, set[str]]:
    """What each module imports."""
    found: dict[str, set[str]] = {}
    for importer, path in known.items():
        found[importer] = set()
        for statement, for_types in import_statements(ast.parse(path.read_text(encoding="utf-8"))):
            if for_types and not with_types:
                continue
            for target in targets(statement, known):
                parts = target.split(".")
                packages = [".".join(parts[:count]) for count in range(1, len(parts))]
                run = {package for package in packages if importer != package and not importer.startswith(f"{package}.")}
                found[importer] |= {name for name in {target, *run} if name in known and name != importer}
    return found


def cycle_of(edges: Mapping[str, set[str]]) -> list[str]:
    """The modules of one cycle, in order; none if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_cycle_of_imports_that_run() -> None:
    """At module level and inside functions."""
    assert cycle_of(graph(modules(), with_types=False)) == []


def test_no_further_cycle_of_imports_for_types() -> None:
    """With `if TYPE_CHECKING:` there are the listed ones, and each of these closes one."""
    edges = graph(modules(), with_types=True)
    for importer, target in ONLY_FOR_TYPES:
        assert cycle_of(edges) != [], f"{importer} -> {target} closes no cycle any more"
        edges[importer].discard(target)
    assert cycle_of(edges) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("import b", "import a"),
        ("def f():\n    from b import x", "from a import f"),
        ("try:\n    import b\nexcept ImportError:\n    pass", "class C:\n    import a"),
    ],
    ids=["module level", "inside a function", "nested"],
)
def test_a_cycle_is_found(tmp_path: Path, first: str, second: str) -> None:
    """Of two modules, wherever the statements are."""
    known = {"a": tmp_path / "a.py", "b": tmp_path / "b.py"}
    known["a"].write_text(first)
    known["b"].write_text(second)
    assert set(cycle_of(graph(known, with_types=False))) == {"a", "b"}


def test_imports_for_types_are_checked_separately(tmp_path: Path) -> None:
    """They close a cycle only where they are asked for."""
    known = {"a": tmp_path / "a.py", "b": tmp_path / "b.py"}
    known["a"].write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b")
    known["b"].write_text("import a")
    assert cycle_of(graph(known, with_types=False)) == []
    assert set(cycle_of(graph(known, with_types=True))) == {"a", "b"}


def test_few_modules_lie_at_the_root_of_megarun() -> None:
    """All other modules are in folders with descriptive names."""
    root = SOURCES[0] / "megarun"
    assert len(list(root.glob("*.py"))) <= MOST_MODULES_AT_ROOT
    for package in sorted(root.rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8")))
        assert docstring, f"{package.relative_to(ROOT)} says nothing of its folder"
