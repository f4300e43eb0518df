"""`diagnostic` makes a diagnostic from its code and its values; the code's page has the fixed summary and the explanation.

MP1xx files, formats and types; MP2xx mesh; MP3xx pattern, schedule and split; MP4xx plan files and the command line; MP5xx budget;
MP6xx megarun; MP7xx model sections; MP8xx other projects' configs; MP9xx other hosts. A new code is one more page in `docs/errors`.
"""

from collections.abc import Iterable

from megaplan.diagnostics.pages import codes, page_text, summary_of
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity

__all__ = ["codes", "diagnostic", "page_text", "refuse", "summary_of"]


def diagnostic(
    code: str,
    detail: str,
    location: Location | None = None,
    hints: Iterable[str] = (),
    severity: Severity = Severity.ERROR,
) -> Diagnostic:
    """A diagnostic with the summary of its code's page; the last hint names the command that prints the page.

    Args:
        code: A code that has a page.
        detail: The equation with every value; newlines separate lines.
        location: Place in the input that it refers to.
        hints: Replacement text or commands, ready to paste.
        severity: Severity of the diagnostic.

    Raises:
        KeyError: If the code has no page.
    """
    return Diagnostic(code, severity, summary_of(code), detail, location or Location(), (*hints, f"megaplan explain {code}"))


def refuse(code: str, detail: str, *hints: str, file: str | None = None, key: str | None = None) -> MegaplanError:
    """An error with one diagnostic, to be raised."""
    return MegaplanError([diagnostic(code, detail, Location(file=file, key=key), hints)])
