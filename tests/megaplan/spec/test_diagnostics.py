"""A diagnostic reads as promised, and its summary is the title of its code's page; `docs/test_error_pages.py` is about the pages."""

import re
from pathlib import Path

import pytest

import megaplan
from megaplan.diagnostics import codes, diagnostic, page_text, summary_of
from megaplan.errors import Diagnostic, Diagnostics, Location, MegaplanError, Severity, render_diagnostic, render_location

SOURCES = list(Path(megaplan.__file__).parent.rglob("*.py"))
RAISED = {code for path in SOURCES for code in re.findall(r'"(MP\d{3})"', path.read_text(encoding="utf-8"))}


def test_every_code_that_is_raised_has_a_page() -> None:
    """In an installed package too, which has the pages in its own folder."""
    assert len(RAISED) > 100
    assert RAISED - set(codes()) == set()


def test_the_summary_is_the_title_of_the_page() -> None:
    found = diagnostic("MP203", "detail")
    assert page_text("MP203").startswith(f"# MP203: {found.summary}\n")
    assert found.hints == ("megaplan explain MP203",)


def test_summaries_are_different() -> None:
    summaries = [summary_of(code) for code in codes()]
    assert len(summaries) == len(set(summaries))


@pytest.mark.parametrize("code", ["MP000", "../MP203", "mp203", ""])
def test_an_unknown_code_is_a_mistake_of_ours(code: str) -> None:
    with pytest.raises(KeyError, match="no page for the diagnostic code"):
        diagnostic(code, "nothing")


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
    with pytest.raises(MegaplanError, match=r"MP304\]: the pattern is empty") as caught:
        found.raise_errors()
    assert caught.value.diagnostics == (error, warning)
