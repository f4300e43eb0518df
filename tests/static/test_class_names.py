"""No class name or type alias is defined twice in one package, so that a name in an error, a page or a search means one thing."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("src/megaplan", "src/megarun", "kernels/megakernels")
LATER = ("src/megaplan",)
"""Packages that still have repeated names; a package leaves the list when its names are distinct, and does not come back."""


def defined(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and line of each class and type alias at the top of a module."""
    for node in module.body:
        match node:
            case ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if name[:1].isupper() and not name.isupper():
                    yield name, node.lineno
            case _ if type(node).__name__ == "TypeAlias":  # Python 3.12
                yield node.name.id, node.lineno  # type: ignore[attr-defined]


def repeated(package: str, root: Path = ROOT) -> dict[str, list[str]]:
    """Places of each name that several modules of the package define."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / package).rglob("*.py")):
        for name, line in defined(ast.parse(path.read_text(encoding="utf-8"))):
            places[name].append(f"{path.relative_to(root)}:{line}")
    return {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("package", [package for package in PACKAGES if package not in LATER])
def test_no_name_is_defined_twice(package: str) -> None:
    found = repeated(package)
    assert not found, "\n".join(f"{name}: {', '.join(places)}" for name, places in found.items())


@pytest.mark.parametrize("package", LATER)
def test_a_package_without_repeated_names_leaves_the_list(package: str) -> None:
    assert repeated(package), f"{package}: remove it from LATER"


def test_classes_and_aliases_are_found(tmp_path: Path) -> None:
    """Constants are not types; two modules with one class are a hit."""
    (tmp_path / "one.py").write_text("class Step: ...\nVectors = list[int]\nLIMIT = 3\n", encoding="utf-8")
    (tmp_path / "two.py").write_text("Step = int\nLIMIT = 4\n", encoding="utf-8")
    assert repeated(".", tmp_path) == {"Step": ["one.py:1", "two.py:1"]}
