"""The rows of a search as an SVG picture: step against peak."""

from collections.abc import Sequence
from typing import NamedTuple

from megaplan.foreign import xml
from megaplan.results import Row, cell_text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 320, 96, 616, 16, 272
"""Pixels of the picture, and the edges of its frame."""
STEP, PEAK = "step_seconds", "peak_bytes"


class _Axis(NamedTuple):
    """A quantity along an edge of the frame."""

    name: str
    least: float
    most: float
    start: int
    stop: int

    def place(self, value: float) -> float:
        """Position of a value in pixels; the middle of the axis if all values are equal."""
        span = self.most - self.least
        return self.start + (self.stop - self.start) * ((value - self.least) / span if span else 0.5)


def search_svg(rows: Sequence[Row], pareto: Sequence[bool]) -> str:
    """A point for each row, filled if no other row matches it in both. The ink is the page's own, in light and dark notebooks.

    Args:
        rows: Rows of a search's table, best first.
        pareto: True for each row that no other one matches.
    """
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'fill="none" stroke="currentColor" font-family="sans-serif" font-size="12">',
        "<title>layouts by step and peak</title>",
        f'<path d="M{LEFT},{TOP}V{BOTTOM}H{RIGHT}"/>',
        _text(
            (LEFT + RIGHT) / 2, BOTTOM + 36, "middle", "step, and peak on the left; filled: no other row is as fast with more memory free"
        ),
    ]
    if rows:
        across, up = _axis(rows, STEP, LEFT + 12, RIGHT - 24), _axis(rows, PEAK, BOTTOM - 12, TOP + 12)
        for value in dict.fromkeys((across.least, across.most)):
            lines.append(_text(across.place(value), BOTTOM + 18, "middle", cell_text(STEP, value)))
        for value in dict.fromkeys((up.least, up.most)):
            lines.append(_text(LEFT - 8, up.place(value) + 4, "end", cell_text(PEAK, value)))
        for number, (row, best) in enumerate(zip(rows, pareto, strict=True), 1):
            x, y = across.place(row[STEP]), up.place(row[PEAK])
            about = f"{number}: {row['mesh']}, {cell_text(STEP, row[STEP])}, {cell_text(PEAK, row[PEAK])}"
            fill = ' fill="currentColor"' if best else ""
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"{fill}><title>{xml(about)}</title></circle>')
            lines.append(_text(x + 8, y + 4, "start", str(number)))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _axis(rows: Sequence[Row], name: str, start: int, stop: int) -> _Axis:
    values = [row[name] for row in rows]
    return _Axis(name, min(values), max(values), start, stop)


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor" stroke="none">{xml(text)}</text>'
