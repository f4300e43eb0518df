"""The page's section on SimuMax's runs: every row of its table, with its own prediction."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megaplan.cost.step.constants import intervals
from step_times.folds import Array, errors
from step_times.markdown import markdown
from step_times.rows import Row


class Replayed(NamedTuple):
    """Rows of one machine, all of them replayed and some of them fitted.

    Attributes:
        rows: Rows from `simumax.rows_of`.
        own: Predicted over measured, by the constants of the data file.
        others: The same, by constants fitted without any row of the machine.
    """

    rows: Sequence[Row]
    own: Array
    others: Array


def sections(found: Replayed, fitted: Sequence[Row]) -> dict[str, object]:
    """Parts of `page.md`: tables, and how many rows are in the fit."""
    known = {row["source"] for row in fitted}
    seen = np.array([row["source"] in known for row in found.rows])
    theirs = np.array([row["simumax_s"] / row["step_s"] for row in found.rows])
    lines: list[Sequence[object]] = []
    for who, ratios in (("this model", found.own), ("this model, no row of the machine fitted", found.others), ("SimuMax", theirs)):
        for name, here in (("all", np.ones(len(seen), bool)), ("in the fit", seen), ("held back", ~seen)):
            off = errors(ratios[here])
            size = [f"{100 * value:.1f}" for value in (off.median, off.p90, off.worst)]
            lines.append([who, name, off.rows, *size, f"{100 * (ratios[here] - 1).mean():+.1f}"])
    head = ["predicted by", "which rows", "rows", "median %", "p90 %", "worst %", "mean signed %"]
    bounds = [intervals()[row["family"]] for row in found.rows]
    inside = np.array([low <= 1 / ratio <= high for (low, high), ratio in zip(bounds, found.own, strict=True)])
    return {
        "num_machine": len(seen),
        "num_seen": int(seen.sum()),
        "num_unseen": int((~seen).sum()),
        "num_inside": int(inside[~seen].sum()),
        "scatter": 100 * errors(found.others / np.median(found.others)).median,
        "machine": markdown(head, lines, 2),
        "machine_rows": _rows(found, seen, theirs),
    }


def _rows(found: Replayed, seen: Array, theirs: Array) -> str:
    lines = []
    for number in np.argsort(-np.abs(found.own - 1)):
        row = found.rows[number]
        percent = [f"{100 * (ratios[number] - 1):+.1f}" for ratios in (found.own, found.others, theirs)]
        lines.append([row["id"], "in the fit" if seen[number] else "held back", f"{row['step_s']:.4f}", *percent])
    return markdown(["case", "", "measured s", "this model %", "no row of the machine fitted %", "SimuMax %"], lines, 2)
