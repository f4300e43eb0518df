"""Every path, module, name, make target and command that a hand-written page names in code marks exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from megaplan.cli import main as planner
from megarun.cli.main import app as runtime

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    )
    if "decisions" not in path.parts  # a record names files as they were when it was written
    and path.name != "kernels.md"  # lists torch ops, which `tests/kernels/test_reference_page.py` compares with the registered ones
]
FOLDERS = ("src", "kernels", "tests", "docs", "scripts", "benchmarks", "plans")
SOURCES = {"megaplan": ROOT / "src", "megarun": ROOT / "src", "megakernels": ROOT / "kernels"}
COMMANDS = {"megaplan": typer.main.get_command(planner._app(())), "megarun": typer.main.get_command(runtime)}
ELSEWHERE = ("docs/fp8_optimization_session_2026_04_13.md",)
"""Files of other repositories."""


def marks(page: Path) -> Iterator[str]:
    """Inline code of a page, without its fenced blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", text)


@cache
def names_of(path: Path) -> frozenset[str]:
    """Names that a module binds, and those of its classes' bodies."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias():
                found.add(node.asname or node.name.rpartition(".")[2])
            case ast.Constant(value=str(name)):  # `__all__` and tables of lazy names
                found.add(name)
    return frozenset(found)


def module_exists(dotted: str) -> bool:
    """True if a dotted name is a module of the sources, or a name in one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        place = SOURCES[parts[0]].joinpath(*parts[:count])
        module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        if module.is_file() or place.is_dir():
            rest = parts[count:]
            return not rest or any(rest[0] in names_of(file) for file in (module, place / "api.py") if file.is_file())
    return False


def path_exists(path: str) -> bool:
    """True if a path of the repository, with `*` and `<placeholders>`, leads to something."""
    pattern = re.sub(r"<[^>]*>|\{[^}]*\}|[A-Z]{4,}|…", "*", path.rstrip("/").partition("::")[0])
    first = pattern.split("/", 1)[0]
    bases = (ROOT, ROOT / "tests", *([SOURCES[first]] if first in SOURCES else []))
    return path in ELSEWHERE or any(any(base.glob(pattern)) for base in bases)


def wrong(mark: str) -> str:
    """The part of a code mark that names nothing; empty if there is none."""
    word, _, rest = mark.partition(" ")
    if word == "make" and rest:
        target = rest.partition(" ")[0]
        return "" if re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE) else mark
    if found := re.match(r"(megaplan|megarun) ([a-z]\S*)", mark):
        main = SOURCES[found[1]] / found[1] / "cli/main.py"  # groups are loaded when they are named
        known = {*getattr(COMMANDS[found[1]], "commands", {}), *names_of(main)}
        return "" if all(name in known for name in found[2].split("|")) else mark
    if re.fullmatch(r"(megaplan|megarun|megakernels)(\.\w+)+", word) and not word.endswith((".json", ".yaml")):
        return "" if module_exists(word) or re.search(r"\.(spec|plan|checkpoint|search)$", word) else word
    if re.match(rf"(?:{'|'.join((*FOLDERS, *SOURCES))})/\S", word) and not re.search(r"/\d+$", word):
        return "" if path_exists(word) else word
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page: Path) -> None:
    found = [name for mark in marks(page) if (name := wrong(mark))]
    assert not found, f"{page.relative_to(ROOT)} names what does not exist: {', '.join(dict.fromkeys(found))}"


@pytest.mark.parametrize(
    "mark", ["make nothing", "megaplan nothing SPEC", "megaplan.nothing.at_all", "megaplan.units.nothing", "src/nothing.py"]
)
def test_a_name_without_a_thing_is_found(mark: str) -> None:
    assert wrong(mark)


@pytest.mark.parametrize(
    "mark", ["make test", "megaplan estimate SPEC", "megarun.training", "megaplan.units", "plans/*.json", "src/megaplan/families"]
)
def test_a_name_of_a_thing_is_right(mark: str) -> None:
    assert not wrong(mark)
