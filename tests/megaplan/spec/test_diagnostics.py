"""The catalogue: every code that is raised is in it, every entry is whole, and a diagnostic reads as promised."""

import re
from pathlib import Path

import pytest

import megaplan
from megaplan.diagnostics import CODES, diagnostic
from megaplan.errors import Diagnostic, Diagnostics, Location, MegaplanError, Severity, render_diagnostic, render_location

SOURCES = [path for path in Path(megaplan.__file__).parent.rglob("*.py") if path.parent.name != "diagnostics"]
RAISED = {code for path in SOURCES for code in re.findall(r'"(MP\d{3})"', path.read_text(encoding="utf-8"))}


def test_every_code_that_is_raised_has_an_entry() -> None:
    assert RAISED - set(CODES) == set()


@pytest.mark.parametrize("code", sorted(CODES))
def test_an_entry_is_whole(code: str) -> None:
    info = CODES[code]
    assert re.fullmatch(r"MP[1-9]\d\d", code)
    assert not info.summary.endswith(".")
    assert info.summary == info.summary.strip()
    for text in (info.means, info.why, info.fix):
        assert text.endswith((".", ".)")), text
    assert info.example.strip()


def test_summaries_are_different() -> None:
    summaries = [info.summary for info in CODES.values()]
    assert len(summaries) == len(set(summaries))


def test_an_unknown_code_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError, match="MP000"):
        diagnostic("MP000", "nothing")


@pytest.mark.parametrize(
    ("location", "text"),
    [
        (Location("plans/nam56r.yaml", 22, 3, "mesh.ep"), "plans/nam56r.yaml:22: mesh.ep"),
        (Location("a.yaml", 3, 1), "a.yaml:3"),
        (Location("a.yaml", key="mesh"), "a.yaml: mesh"),
        (Location("--set mesh.ep=6", key="mesh.ep"), "--set mesh.ep=6: mesh.ep"),
        (Location(line=3), "line 3"),
        (Location(key="mesh.ep"), "mesh.ep"),
        (Location(), ""),
    ],
)
def test_a_place_is_shown_as_far_as_it_is_known(location: Location, text: str) -> None:
    assert render_location(location) == text


def test_a_bare_diagnostic_is_one_line() -> None:
    assert render_diagnostic(Diagnostic("MP101", Severity.NOTE, "the file does not exist")) == "note[MP101]: the file does not exist"


def test_errors_come_before_warnings() -> None:
    warning = diagnostic("MP309", "w", severity=Severity.WARNING)
    error = diagnostic("MP304", "e")
    found = Diagnostics([warning])
    found.raise_errors()
    found.extend([error])
    with pytest.raises(MegaplanError, match="MP304: the pattern is empty") as caught:
        found.raise_errors()
    assert caught.value.diagnostics == (error, warning)
