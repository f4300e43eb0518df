"""The catalogue of diagnostic codes, and `diagnostic`, which makes a diagnostic from it.

MP1xx files, formats and types; MP2xx mesh; MP3xx pattern, schedule and split; MP4xx plan files; MP5xx budget; MP6xx megarun;
MP7xx model sections; MP8xx other projects' configs; MP9xx other hosts.
Each hundred has its own file, `mp<hundred>xx.py`, and MP650 to MP699 `mp65x.py`; a new code is one more entry there.
"""

from __future__ import annotations

from collections.abc import Iterable

from megaplan.diagnostics.info import CodeInfo
from megaplan.diagnostics.mp1xx import FILES
from megaplan.diagnostics.mp2xx import MESH
from megaplan.diagnostics.mp3xx import SPLIT
from megaplan.diagnostics.mp4xx import PLANS
from megaplan.diagnostics.mp5xx import BUDGET
from megaplan.diagnostics.mp6xx import RUNTIME
from megaplan.diagnostics.mp7xx import MODEL
from megaplan.diagnostics.mp8xx import IMPORTS
from megaplan.diagnostics.mp9xx import HOSTS
from megaplan.diagnostics.mp65x import JOBS
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity

__all__ = ["CODES", "CodeInfo", "diagnostic", "refuse"]

CODES: dict[str, CodeInfo] = {**FILES, **MESH, **SPLIT, **PLANS, **BUDGET, **RUNTIME, **JOBS, **MODEL, **IMPORTS, **HOSTS}


def diagnostic(
    code: str,
    detail: str,
    location: Location | None = None,
    hints: Iterable[str] = (),
    severity: Severity = Severity.ERROR,
) -> Diagnostic:
    """A diagnostic with the catalogue's summary; the last hint names the page that explains the code.

    Args:
        code: A key of `CODES`.
        detail: The equation with every value; newlines separate lines.
        location: Place in the input that it refers to.
        hints: Replacement text or commands, ready to paste.
        severity: Severity of the diagnostic.

    Raises:
        KeyError: If the catalogue has no such code.
    """
    if code not in CODES:
        raise KeyError(f"no diagnostic code {code!r} in the catalogue")
    return Diagnostic(code, severity, CODES[code].summary, detail, location or Location(), (*hints, f"megaplan explain {code}"))


def refuse(code: str, detail: str, *hints: str, file: str | None = None, key: str | None = None) -> MegaplanError:
    """An error of one diagnostic, to raise."""
    return MegaplanError([diagnostic(code, detail, Location(file=file, key=key), hints)])
