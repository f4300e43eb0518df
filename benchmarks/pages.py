"""Pages that benchmarks generate."""

import sys
from pathlib import Path


def write_page(page: Path, text: str) -> int:
    """Write a page; with `--check` among the arguments compare it instead, and return 1 if it would change."""
    if "--check" in sys.argv[1:]:
        return int(page.read_text(encoding="utf-8") != text)
    page.write_text(text, encoding="utf-8")
    return 0
