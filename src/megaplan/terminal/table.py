"""Plain-text tables, and their width."""

import os
import sys
from collections.abc import Iterable, Sequence

from megaplan.foreign import one_line

WIDTH = 80
"""Columns if there is no terminal."""
LEAST = 40


def line_width() -> int:
    """Columns of a line: `COLUMNS` if it is set, else those of the terminal on stdout, else `WIDTH`; at least `LEAST`."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return max(LEAST, int(given))
    try:
        return max(LEAST, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError, AttributeError):  # a file, a pipe, or no stream at all
        return WIDTH


def table(rows: Sequence[Sequence[str]], *, left: Iterable[int] = (0,), gap: int = 2, indent: str = "") -> list[str]:
    """Rows of cells as aligned lines; the first row is the head.

    Args:
        rows: Equally long rows.
        left: Columns aligned left; the others are aligned right, like numbers.
        gap: Spaces between columns.
        indent: Text before every line.
    """
    aligned_left = set(left)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in aligned_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(indent + (" " * gap).join(cells).rstrip())
    return lines


def wrap(text: str, *, indent: str = "", width: int | None = None) -> list[str]:
    """Words of `text` in lines of at most `width`, `line_width` if None; later lines are indented."""
    import textwrap  # noqa: PLC0415

    return textwrap.wrap(
        text, line_width() if width is None else width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def markdown_table(rows: Sequence[Sequence[str]], *, left: Iterable[int] = (0,)) -> list[str]:
    """The same as a Markdown table."""
    aligned_left = set(left)
    rule = [":--" if column in aligned_left else "--:" for column in range(len(rows[0]))]
    return ["| " + " | ".join(one_line(cell).replace("|", "\\|") for cell in row) + " |" for row in (rows[0], rule, *rows[1:])]
