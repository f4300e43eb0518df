"""The pages of diagnostic codes: `docs/errors/MP301.md` in the source tree, a folder of the package where it is installed.

A page's title, `# MP301: summary`, is the only place of the code's fixed summary. A page is read when its code is used for the first time.
"""

import os
from functools import cache
from pathlib import Path

PACKAGED = "error_pages"
"""The folder in an installed package; `pyproject.toml` copies the pages there."""


@cache
def codes() -> tuple[str, ...]:
    """All codes that have a page, in ascending order."""
    return tuple(sorted(path.stem for path in _folder().glob("MP*.md")))


@cache
def summary_of(code: str) -> str:
    """The fixed summary of a code, without user values.

    Raises:
        KeyError: If the code has no page.
    """
    title = page_text(code).partition("\n")[0]
    return title.removeprefix(f"# {code}: ")


def page_text(code: str) -> str:
    """The page of a code in Markdown, placeholders not filled.

    Raises:
        KeyError: If the code has no page.
    """
    if code not in codes():
        raise KeyError(f"no page for the diagnostic code {code!r}")
    return (_folder() / f"{code}.md").read_text(encoding="utf-8")


@cache
def _folder() -> Path:
    package = Path(__file__).parents[1]
    packaged = package / PACKAGED
    return packaged if os.path.isdir(packaged) else package.parents[1] / "docs" / "errors"
