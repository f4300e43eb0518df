"""The generated page of errors, `docs/reference/accuracy-time.md`: `page.md` with tables in it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from unseen import compare as unseen

from megaplan.cost.step import constants
from megaplan.cost.step.fitted import OTHERS
from step_times import folds
from step_times.folds import Array, Errors, Interval
from step_times.hosts import RECIPE_LAYOUTS, framework_of, release_of
from step_times.machine import Replayed, sections
from step_times.markdown import markdown
from step_times.rows import Row, launch_is_said
from step_times.specs import device_name

HERE = Path(__file__).parent
WRONG = 0.15
FAMILIES = ("dense", "moe", "hybrid")


def text(
    rows: Sequence[Row],
    anomalies: Sequence[Row],
    own: Array,
    blind: Array,
    foreign: Array,
    megarun: Array,
    classes: dict[str, Interval],
    machine: Replayed,
) -> str:
    """The whole page.

    Args:
        rows: Rows that count.
        anomalies: Rows that do not.
        own: Predicted over measured, constants fitted to all rows.
        blind: The same, cross-validated.
        foreign: The same, without the row's device or framework.
        megarun: Values of bf16 rows by megarun's model, see `folds.replayed`.
        classes: Intervals of the classes of steps.
        machine: SimuMax's whole table.
    """
    tables = "".join(f"## Cross-validated, by {title}\n\n{_table(title, folds.by(rows, blind, key))}\n\n" for title, key in _KEYS)
    parts = {
        "num_rows": len(rows),
        "num_frameworks": len({row["framework"] for row in rows}),
        "num_devices": len({row["device"] for row in rows}),
        "num_anomalies": len(anomalies),
        "anomalies": "; ".join(f"{row['id']} ({row['anomaly']})" for row in anomalies),
        "num_folds": folds.NUM_FOLDS,
        "summary": _summary(rows, own, blind),
        "num_recipes": sum(row["id"] in RECIPE_LAYOUTS for row in rows),
        "num_launches": sum(launch_is_said(row) for row in rows),
        "nulls": _nulls(rows, blind),
        "noise": _noise(rows),
        "foreign": _table("", {"all": folds.errors(foreign), **folds.by(rows, foreign, lambda row: row["family"])}),
        "few_rows": folds.FEW_ROWS,
        "intervals": _intervals(classes, megarun),
        "num_replayed": len(megarun),
        "ranking": _ranking(rows, blind),
        "tables": tables,
        "wrong": round(100 * WRONG),
        "causes": _causes(rows, blind),
        "rows": _rows(rows, own, blind),
        **sections(machine, rows),
    }
    return (HERE / "page.md").read_text(encoding="utf-8").format_map(parts)


def framework(row: Row) -> str:
    """The framework's name in the data file, with its release."""
    return f"{framework_of(row)} {release_of(row) or ''}".strip()


_KEYS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("device and dtype", lambda row: f"{device_name(row)}, {row['precision']}"),
    ("family and dtype", lambda row: f"{row['family']}, {row['precision']}"),
    ("framework", framework_of),
    ("release", framework),
    ("task", lambda row: row["task"]),
    ("whether the group was held back", lambda row: "held back" if folds.is_held_back(row) else "seen"),
)


def _cells(found: Errors) -> list[str]:
    percent = (f"{100 * found.median:.1f}", f"{100 * found.p90:.1f}", f"{100 * found.worst:.0f}", f"{100 * found.bias:+.1f}")
    return [str(found.rows), *percent]


def _table(title: str, found: dict[str, Errors]) -> str:
    return markdown([title, "rows", "median %", "p90 %", "worst %", "bias %"], [[name, *_cells(each)] for name, each in found.items()])


def _summary(rows: Sequence[Row], own: Array, blind: Array) -> str:
    parts: list[tuple[str, Array]] = [("all", np.ones(len(rows), bool))]
    parts += [(name, np.array([row["family"] == name for row in rows])) for name in FAMILIES]
    parts.append(("SimuMax's measured B200 runs", np.array([row["framework"] == "mcore-plain" for row in rows])))
    lines = []
    for name, here in parts:
        inside = folds.errors(own[here])
        lines.append([name, *_cells(folds.errors(blind[here])), f"{100 * inside.median:.1f}", f"{100 * inside.p90:.1f}"])
    head = ["", "rows", "cross-validated: median %", "p90 %", "worst %", "bias %", "in sample: median %", "p90 %"]
    return markdown(head, lines)


def _nulls(rows: Sequence[Row], blind: Array) -> str:
    found = {"this model, cross-validated": folds.errors(blind)}
    return _table("", found | {name: folds.errors(each) for name, each in folds.null_models(rows).items()})


def _noise(rows: Sequence[Row]) -> str:
    lines = []
    for across, name in ((False, "the same release"), (True, "any release")):
        pairs = 100 * folds.repeats(rows, across_releases=across)
        lines.append([name, len(pairs), f"{np.median(pairs):.1f}", f"{np.quantile(pairs, 0.9):.1f}"])
    return markdown(["one configuration measured twice", "pairs", "median %", "p90 %"], lines)


def _intervals(classes: dict[str, Interval], megarun: Array) -> str:
    lines = [
        [name, each.rows, each.combinations, *map(_bound, (each.low, each.high)), f"{100 * each.covered:.0f}", each.borrowed]
        for name, each in classes.items()
    ]
    lines.append(["replayed", len(megarun), "", *map(_bound, folds.interval(megarun)), "", ""])
    runs = unseen.outside(unseen.compared(row for row in unseen.read_rows() if not row["held"]))
    lines.append([OTHERS, len(runs), "", *map(_bound, constants.intervals()[OTHERS]), "", ""])
    return markdown(["class", "rows", "combinations", "from", "to", "covered %", "rows of"], lines)


def _bound(value: float) -> str:
    return f"{round(value, 4):.3f}"  # as the data file has it


def _ranking(rows: Sequence[Row], blind: Array) -> str:
    found = folds.ranking(rows, blind)
    cells = [found.groups, found.pairs, f"{found.tau:.2f}", f"{100 * found.mean_regret:.1f}", f"{100 * found.worst_regret:.1f}"]
    return markdown(["groups", "pairs", "Kendall's tau", "mean regret %", "worst regret %"], [cells], 0)


def _causes(rows: Sequence[Row], blind: Array) -> str:
    known = json.loads((HERE / "causes.json").read_text(encoding="utf-8"))
    groups: dict[str, list[float]] = {}
    for row, ratio in zip(rows, blind, strict=True):
        if abs(ratio - 1) > WRONG:
            groups.setdefault(f"{row['framework']}, {row['model']}", []).append(100 * (ratio - 1))
    lines = [
        [name, known.get(name, "not known"), len(off), f"{min(off):+.0f}", f"{max(off):+.0f}"]
        for name, off in sorted(groups.items(), key=lambda pair: -len(pair[1]))
    ]
    return markdown(["framework of the table, model", "cause", "rows", "from %", "to %"], lines, 2)


def _rows(rows: Sequence[Row], own: Array, blind: Array) -> str:
    lines = []
    for number in np.argsort(-np.abs(blind - 1)):
        row = rows[number]
        layout = " ".join(f"{key}{row[key]}" for key in ("tp", "pp", "vp", "cp", "ep", "mbs") if (row[key] or 1) > 1)
        about = (row["id"], framework(row), row["model"], device_name(row), row["precision"], layout, row["source"])
        errors = (f"{100 * (blind[number] - 1):+.1f}", f"{100 * (own[number] - 1):+.1f}")
        lines.append([*about, row["gpus"], f"{row['step_s']:.4g}", *errors])
    head = ["row", "framework", "model", "device", "dtype", "layout", "source", "devices", "measured s", "cross-validated %", "in sample %"]
    return markdown(head, lines, 7)
