"""Terms of the glossary as topics of `explain`, from its page in the source tree, or from a file of the package where it is installed."""

import os
from functools import cache
from pathlib import Path

PACKAGED = "glossary.md"
"""The page in an installed package; `pyproject.toml` copies it there."""


@cache
def terms() -> dict[str, str]:
    """The meaning of every term, by the term in small letters with underscores for spaces; a row with several terms has each of them."""
    package = Path(__file__).parents[1]
    packaged = package / PACKAGED
    page = packaged if os.path.isfile(packaged) else package.parents[1] / "docs" / "reference" / "glossary.md"
    found: dict[str, str] = {}
    for line in page.read_text(encoding="utf-8").splitlines() if os.path.isfile(page) else ():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 2 and not set(cells[0]) <= set("-: ") and cells[0] != "Term":
            for name in cells[0].split(","):
                found.setdefault(name.strip().lower().replace("-", "_").replace(" ", "_"), cells[1].replace("`", ""))
    return found
