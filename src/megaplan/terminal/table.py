"""Plain-text tables that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDTH = 80


def table(rows: Sequence[Sequence[str]], *, left: Iterable[int] = (0,), gap: int = 2, indent: str = "") -> list[str]:
    """Rows of cells as aligned lines; the first row is the head.

    Args:
        rows: Equally long rows.
        left: Columns aligned left; the others are aligned right, as numbers are.
        gap: Spaces between columns.
        indent: Before every line.
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


def wrap(text: str, *, indent: str = "", width: int = WIDTH) -> list[str]:
    """Words of `text` in lines of at most `width`; later lines are indented."""
    import textwrap  # noqa: PLC0415

    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def markdown_table(rows: Sequence[Sequence[str]], *, left: Iterable[int] = (0,)) -> list[str]:
    """The same as a Markdown table."""
    aligned_left = set(left)
    rule = [":--" if column in aligned_left else "--:" for column in range(len(rows[0]))]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (rows[0], rule, *rows[1:])]
