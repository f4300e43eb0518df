"""Docstrings are sentences or noun phrases: none, and no entry of a field list, begins as a fragment without a subject."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "kernels", "scripts", "src/megaplan", "src/megarun", "tests")
WORDS = (
    "Of|What|Whether|Beside|Besides|How|Which|Where|Who|Why|When|By|For|From|With|Within|Without|Same|Than|Until|As|Its|Their|Also|Likewise"
    "|Those|That|These"
)
_START = re.compile(rf"(?:{WORDS})\b")
_FIELD = re.compile(rf"^ +(?:[*\w][\w*, .]*: (?:{WORDS})|\w+: (?:{WORDS.lower()}))\b")


def docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring: of modules, classes, functions, and strings that follow an assignment."""
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for before, statement in zip([None, *body], body, strict=False):
            follows = isinstance(before, ast.Assign | ast.AnnAssign) or (before is None and documented)
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if follows:
                    yield statement.lineno, text


def hits(path: Path, root: Path = ROOT) -> list[str]:
    """One line per docstring, or entry of a docstring's field list, that begins as a fragment."""
    found = []
    for start, text in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
        for offset, line in enumerate(text.splitlines()):
            if (_START.match(line) and offset == 0) or _FIELD.match(line):
                found.append(f"{path.relative_to(root)}:{start + offset}: {line.strip()}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_begins_as_a_fragment(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [hit for path in files for hit in hits(path)]
    assert not found, "write a sentence, a noun phrase, or `True if …`:\n" + "\n".join(found)


def test_fragments_are_found_in_docstrings_and_fields(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    function = ["def f():", '    """A sum.', "", "    Args:", "        x: What it adds.", "        y: Number.", '    """', ""]
    file.write_text("\n".join(['"""Whether it is."""', "X = 1", '"""Of a rank."""', *function]), encoding="utf-8")
    assert hits(file, tmp_path) == ["some.py:1: Whether it is.", "some.py:3: Of a rank.", "some.py:8: x: What it adds."]
