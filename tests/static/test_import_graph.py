"""The import graph of `src/` and `kernels/` has no cycle, and the contracts of import-linter cover every folder.

Counted: every `import` and `from … import` of a module of megaplan, megarun or megakernels, at module level, inside functions and under
`if TYPE_CHECKING:`, so that neither a lazy import nor an annotation hides a cycle. Importing `a.b.c` also runs `a/__init__.py` and
`a/b/__init__.py`, so these count too unless they contain the importer.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "src", ROOT / "kernels")
MOST_MODULES_AT_ROOT = 12
TWO_WAY = {
    ("megaplan.families", "megaplan.inventory"): "a family makes tensors (inventory.tensors); inventory.build asks every family for them",
    (
        "megaplan.hosts",
        "megaplan.spec",
    ): "hosts read a spec; its section host reads their values (hosts.registry)",
    ("megaplan.inventory", "megaplan.spec"): "inventory.build reads a spec; the rules of LoRA name the tensors that take adapters",
    ("megarun.data", "megarun.parallel"): "data cuts rows by parallel.groups; parallel.apply feeds batches to a schedule",
    ("megarun.model", "megarun.parallel"): "blocks call parallel.groups; parallel.apply wraps built stages",
}
"""Folders that import each other, through different modules. The contracts order their modules instead of the folders."""

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


def targets(statement: ast.Import | ast.ImportFrom, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a statement names: of `from a import b`, `a.b` where that is a module, else `a`."""
    if isinstance(statement, ast.Import):
        yield from (name.name for name in statement.names)
        return
    assert statement.level == 0, "imports are absolute"
    for name in statement.names:
        yield full if (full := f"{statement.module}.{name.name}") in known else str(statement.module)


def graph(known: Mapping[str, Path]) -> dict[str, set[str]]:
    """Imports of each module."""
    found: dict[str, set[str]] = {}
    for importer, path in known.items():
        found[importer] = set()
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for target in [target for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for target in targets(node, known)]:
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


def test_no_cycle_of_imports() -> None:
    """At module level, inside functions and for annotations."""
    assert cycle_of(graph(modules())) == []


def test_folders_that_import_each_other_are_listed() -> None:
    """Each pair has a reason, and every listed pair still exists."""
    edges = {
        tuple(".".join(name.split(".")[:2]) for name in (importer, target))
        for importer, imported in graph(modules()).items()
        for target in imported
        if importer.count(".") and target.count(".")
    }
    assert {(first, second) for first, second in edges if first < second and (second, first) in edges} == set(TWO_WAY)


def contract(package: str) -> tuple[set[str], set[str]]:
    """Modules that the contract of a package's layers orders, and those that it leaves to entries of their children."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = [each for each in contracts if each["type"] == "layers" and each["containers"] == [package]]
    return {name.strip() for layer in layers["layers"] for name in layer.split("|")}, set(layers["exhaustive_ignores"])


def children_of(folder: Path) -> set[str]:
    """Modules and packages directly in a folder."""
    found = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    return found - {"__init__", "__main__"}


@pytest.mark.parametrize("package", ["megaplan", "megarun"])
def test_the_contract_orders_every_module(package: str) -> None:
    """A folder that the contract does not order as a whole is ordered module by module; families have their own contract."""
    listed, by_children = contract(package)
    root = SOURCES[0] / package
    assert {name for name in listed if "." not in name} | (by_children - {"__main__"}) == children_of(root)
    for folder in sorted(by_children - {"__main__"}):
        modules_of = {f"{folder}.{name}" for name in children_of(root / folder) if not (root / folder / name / "section.py").is_file()}
        assert {name for name in listed if name.startswith(f"{folder}.")} == modules_of


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("import b", "import a"),
        ("def f():\n    from b import x", "from a import f"),
        ("try:\n    import b\nexcept ImportError:\n    pass", "class C:\n    import a"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b", "import a"),
    ],
    ids=["module level", "inside a function", "nested", "for annotations"],
)
def test_a_cycle_is_found(tmp_path: Path, first: str, second: str) -> None:
    """A cycle of two modules is found wherever their import statements are."""
    known = {"a": tmp_path / "a.py", "b": tmp_path / "b.py"}
    known["a"].write_text(first)
    known["b"].write_text(second)
    assert set(cycle_of(graph(known))) == {"a", "b"}


def test_few_modules_lie_at_the_root_of_megarun() -> None:
    """All other modules are in folders with descriptive names."""
    root = SOURCES[0] / "megarun"
    assert len(list(root.glob("*.py"))) <= MOST_MODULES_AT_ROOT
    for package in sorted(root.rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8")))
        assert docstring, f"{package.relative_to(ROOT)} says nothing of its folder"
