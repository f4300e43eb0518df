"""Results as Python shows them: a summary of a few lines, a table for notebooks, plain values, a DataFrame, a picture.

A class of results gives its summary and the rows of its table, in raw units; names of cells have the house's suffixes (`_bytes`,
`_seconds`, `_share`), by which the table for notebooks writes them. Everything else is here.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from megaplan.foreign import xml
from megaplan.units import format_bytes

Row: TypeAlias = dict[str, Any]
"""Values of a table's row by the names of its columns."""
MOST_ROWS, MOST_ACROSS = 24, 8
"""Rows that a table for notebooks shows: below each other, or side by side if they have many cells. The rest is counted."""
WIDE = 8
"""The smallest number of cells with which rows of a table are placed next to each other."""


class Picture(str):
    """The text of an SVG picture, which notebooks draw."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"Picture({len(self):,} characters of SVG; write it to a file that ends in .svg)"


class Result:
    """Base of all results of the public functions."""

    __slots__ = ()

    def _summary(self) -> Sequence[str]:
        """A few lines: the subject, the verdict, the step."""
        raise NotImplementedError

    def _rows(self) -> Sequence[Row]:
        """The table, in raw units: bytes, seconds, shares of 1."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """The summary, with the name of the class."""
        return f"{type(self).__name__}: " + "\n  ".join(self._summary())

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        """The summary and the table, without colours, so that a notebook's own scheme applies."""
        first, *others = self._summary()
        lines = "<br/>".join([f"<b>{xml(first)}</b>", *map(xml, others)])
        return f"<p>{lines}</p>{html_table(self._rows())}"

    def to_dict(self) -> dict[str, Any]:
        """The document that the command prints with `--json`: plain values, sizes in bytes, times in seconds."""
        from dataclasses import asdict  # noqa: PLC0415

        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # type: ignore[call-overload]
        return found

    def to_frame(self) -> Any:
        """The table as a pandas DataFrame, in raw units.

        Raises:
            ImportError: pandas is not installed.
        """
        from importlib import import_module  # noqa: PLC0415

        try:
            pandas = import_module("pandas")
        except ImportError:
            raise ImportError("to_frame() needs pandas: pip install pandas; to_dict() needs nothing") from None
        return pandas.DataFrame(list(self._rows()))

    def plot(self) -> Picture:
        """A picture as SVG text, which notebooks draw.

        Raises:
            TypeError: The class has no picture.
        """
        raise TypeError(f"{type(self).__name__} has no picture; to_frame() has its numbers, and megaplan.report(...) makes a page")


def verdict_text(fits: bool, peak_bytes: int, headroom_bytes: int, where: str = "", *, narrowly: bool = False) -> str:
    """`fits: peak 79.06 GiB on ranks 0-3, headroom 58.40 GiB`; `fits narrowly: …`; `DOES NOT FIT: …, over by 1.20 GiB`."""
    peak = f"peak {format_bytes(peak_bytes)}{f' on {where}' if where else ''}"
    free = f"headroom {format_bytes(headroom_bytes)}" if headroom_bytes >= 0 else f"over by {format_bytes(-headroom_bytes)}"
    return f"{'DOES NOT FIT' if not fits else 'fits narrowly' if narrowly else 'fits'}: {peak}, {free}"


def html_table(rows: Sequence[Row]) -> str:
    """A table of rows; names and texts are escaped. Columns in which no row has a value are omitted."""
    if not rows:
        return ""
    names = [name for name in rows[0] if any(row.get(name) not in (0, None, "") for row in rows)]
    across = len(names) > WIDE
    texts = [[cell_text(name, row.get(name)) for name in names] for row in rows]
    if across:
        texts = _joined(texts)
    shown = texts[: MOST_ACROSS if across else MOST_ROWS]
    table = [[_label(name) for name in names], *shown]
    if across:
        table = [list(line) for line in zip(*table, strict=True)]
    head, *body = [
        "".join(f"<{tag}>{xml(cell)}</{tag}>" for tag, cell in _tagged(line, first=not index)) for index, line in enumerate(table)
    ]
    more = f"<p>and {len(texts) - len(shown):,} more</p>" if len(texts) > len(shown) else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in body)}</tbody></table>{more}"


def _joined(lines: Iterable[list[str]]) -> list[list[str]]:
    """Lines that differ only in the first cell, such as ranks with nearly equal memory, are merged."""
    found: dict[tuple[str, ...], list[str]] = {}
    for first, *others in lines:
        found.setdefault(tuple(others), []).append(first)
    return [[", ".join(names), *others] for others, names in found.items()]


def _tagged(line: Sequence[str], *, first: bool) -> list[tuple[str, str]]:
    """Cells with their tags: the first line and the first cell of every line are heads."""
    return [("th" if first or not index else "td", cell) for index, cell in enumerate(line)]


def _label(name: str) -> str:
    """The name of a column without its unit, in words: `peak_bytes` as `peak`."""
    for suffix in ("_bytes", "_seconds", "_share"):
        name = name.removesuffix(suffix)
    return name.replace("_", " ")


def cell_text(name: str, value: Any) -> str:
    """A value as its column's name says: a size with its unit, seconds, a percentage, a number."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, (int, float)):
        if name.endswith("_bytes"):
            return format_bytes(int(value))
        if name.endswith("_share"):
            return f"{100 * value:.1f} %"
        number = f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return f"{number} s" if name.endswith("_seconds") else number
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
