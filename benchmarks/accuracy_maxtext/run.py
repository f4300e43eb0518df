"""Estimates of the published runs in `recipes.yaml`, imported as a user imports them.

python benchmarks/accuracy_maxtext/run.py [--page FILE] [--tuning]

`--tuning` leaves out the rows that are held out; `--page` writes docs/reference/maxtext.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megaplan.budget.peaks import build_budget
from megaplan.errors import MegaplanError
from megaplan.importers.maxtext.spec import import_maxtext
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.layout.step_time import planned_time
from megaplan.partition.choose import choose_cuts

RECIPES = Path(__file__).with_name("recipes.yaml")


class Row(NamedTuple):
    """A published run: seconds of a step, and those of the estimate with its peak, or the reason that there is none."""

    name: str
    source: str
    held: bool
    measured: float
    seconds: float | None
    interval: tuple[float, float] | None
    peak_bytes: int
    usable_bytes: int
    parameters: int
    reason: str
    terms: dict[str, float]

    @property
    def ratio(self) -> float | None:
        """Predicted over measured seconds."""
        return None if self.seconds is None else self.seconds / self.measured


def rows(*, tuning: bool = False) -> list[Row]:
    """Every row of the file, or those that constants were chosen by."""
    listed: list[dict[str, Any]] = yaml.safe_load(RECIPES.read_text(encoding="utf-8"))
    return [estimated(record) for record in listed if not (tuning and record.get("held", False))]


def estimated(record: dict[str, Any]) -> Row:
    """The estimate of a row."""
    given = (record["name"], record["source"], bool(record.get("held", False)), float(record["seconds"]))
    try:
        spec = import_maxtext(record["arguments"].split()).loaded.spec
    except MegaplanError as error:
        first = error.diagnostics[0]
        return Row(*given, None, None, 0, 0, 0, f"refused: {first.detail.splitlines()[0]}", {})
    inventory = build_inventory(spec)
    spans = choose_cuts(spec, inventory).spans
    budget = build_budget(spec, inventory, build_layout(spec, inventory, spans))
    peak, usable = budget.worst.peak_bytes, budget.worst.usable_bytes
    time = planned_time(spec, spans, inventory)
    if isinstance(time, str):
        return Row(*given, None, None, peak, usable, inventory.parameters, time, {})
    return Row(*given, time.seconds, (time.low, time.high), peak, usable, inventory.parameters, "", dict(time.terms))


def main() -> None:
    """Print the rows, worst first, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--page", type=Path, help="write docs/reference/maxtext.md here")
    parser.add_argument("--tuning", action="store_true", help="without the rows that are held out")
    arguments = parser.parse_args()
    found = rows(tuning=arguments.tuning)
    if arguments.page:
        from page import text  # noqa: PLC0415  (in this folder)

        arguments.page.write_text(text(found), encoding="utf-8")
        return
    for row in sorted(found, key=lambda row: -abs((row.ratio or 1) - 1)):
        ratio = f"{100 * (row.ratio - 1):+.1f} %" if row.ratio else row.reason
        fits = f"{row.peak_bytes / 2**30:.1f} of {row.usable_bytes / 2**30:.1f} GiB" + (
            " DOES NOT FIT" * (row.peak_bytes > row.usable_bytes)
        )
        terms = ", ".join(
            f"{name} {100 * each / (row.seconds or 1):.0f}" for name, each in row.terms.items() if each > 0.01 * (row.seconds or 1)
        )
        print(f"{row.name:42} {row.measured:8.3f} {ratio:>9}  {fits:26} {terms}")


if __name__ == "__main__":
    main()
