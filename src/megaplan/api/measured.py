"""Measured steps to calibrate with: a table of specs with seconds, one spec with its seconds, or the folder of a run of megarun."""

import csv
import io
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from megaplan.api.load import load
from megaplan.diagnostics import refuse
from megaplan.errors import MegaplanError
from megaplan.layout.calibrate import MeasuredStep, measured_step
from megaplan.spec.document import parse_document
from megaplan.spec.read import read_text

SHORTEST, LONGEST = 1e-6, 1e6
"""Seconds of a step that was measured."""
FORM = '[{"spec": "spec.yaml", "set": ["host.name=megatron"], "step_seconds": 1.2}]'
COLUMNS = "spec", "step_seconds"
"""Columns of a table of measured steps; every other column is a key of the spec."""
PLAN, METRICS = "plan.json", "metrics.jsonl"
LAST_BYTES = 1 << 20
"""Bytes read from the end of a run's metrics, enough for hundreds of steps."""
FEWEST_STEPS = 3
FARTHEST = 20
"""Largest factor between a measured step and its model; a larger one means that the step is of another device, such as a run on a CPU."""


def measured_steps(path: str, seconds: float | None = None, changes: tuple[str, ...] = ()) -> list[MeasuredStep]:
    """The measured steps of a file of rows, the median step of a run, or the step of one spec.

    Args:
        path: Rows of spec, set and step_seconds as JSON or YAML, or a CSV file whose other columns are keys of the spec; the folder that
            `megarun train --out` wrote; with `seconds` a spec, plan or config.
        seconds: Seconds of one step of that spec; None for a file or folder of steps.
        changes: `KEY=VALUE` texts of that spec.

    Raises:
        MegaplanError: MP487: no such rows, rows of several hosts, too few steps, or a spec whose time cannot be modelled. Also the errors
            of `megaplan.load`.
    """
    if seconds is not None:
        if not SHORTEST <= seconds <= LONGEST:
            raise refuse("MP487", f"--step-seconds {seconds:g}, but a step takes {SHORTEST:g} to {LONGEST:g} s", "--step-seconds 1.2")
        return [_step("the step", path, changes, seconds)]
    if os.path.isdir(path):
        return [_step(f"median step of {path}", f"{Path(path) / PLAN}", (), _run_seconds(Path(path)))]
    found = [_of_row(path, number, row) for number, row in enumerate(_rows(path))]
    hosts = sorted({step.host for step in found})
    if len(hosts) > 1:
        detail = f"{path} has steps of hosts {' and '.join(hosts)}, whose shares of the peak cannot be compared"
        raise refuse("MP487", detail, "one file for each host")
    return found


def measured_subject(path: str) -> tuple[str, tuple[str, ...]]:
    """The spec or plan of the first measured step of `measured_steps`, and its changes."""
    if os.path.isdir(path):
        return f"{Path(path) / PLAN}", ()
    row = _rows(path)[0]
    return row["spec"], tuple(row.get("set") or ())


def _rows(path: str) -> list[Any]:
    """The rows of a file; a table of one step may be a single mapping."""
    text = read_text(path)
    if path.endswith(".csv"):
        rows: Any = [_of_columns(row) for row in csv.DictReader(io.StringIO(text), skipinitialspace=True)]
    elif path.endswith(".json") or text.lstrip().startswith(("[", "{")):
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise refuse("MP487", f"{path} is not JSON: {error}", FORM) from None
    else:
        document = parse_document(text, path)
        if document.faults:
            raise MegaplanError(document.faults)
        rows = document.value
    if isinstance(rows, dict) and ("steps" in rows or set(COLUMNS) <= rows.keys()):
        rows = rows.get("steps", [rows])
    if not isinstance(rows, list) or not rows:
        raise refuse("MP487", f"{path} has no list of measured steps", FORM, "megaplan calibrate SPEC --step-seconds 1.2")
    return rows


def _of_columns(row: dict[str | None, Any]) -> dict[str, Any]:
    """A row of a CSV file: seconds as a number, and a change of the spec for every other cell that is not empty."""
    cells = {name: value.strip() for name, value in row.items() if name is not None and isinstance(value, str) and value.strip()}
    found: dict[str, Any] = {name: cells.pop(name) for name in COLUMNS if name in cells}
    with suppress(KeyError, ValueError):  # refused with its row
        found["step_seconds"] = float(found["step_seconds"])
    return found | {"set": [f"{key}={value}" for key, value in cells.items()]}


def _of_row(path: str, number: int, row: Any) -> MeasuredStep:
    seconds: Any = row.get("step_seconds") if isinstance(row, dict) else None
    timed = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and SHORTEST <= seconds <= LONGEST
    if not timed or not isinstance(row.get("spec"), str):
        needed = f"a row has spec, and step_seconds from {SHORTEST:g} to {LONGEST:g}"
        raise refuse("MP487", f"row {number} of {path} = {json.dumps(row)[:80]}, but {needed}", FORM)
    changes = row.get("set") or []
    if not isinstance(changes, list) or not all(isinstance(text, str) for text in changes):
        raise refuse("MP487", f"row {number} of {path}: set = {json.dumps(changes)[:80]}, but set must be a list of KEY=VALUE", FORM)
    return _step(f"row {number}", row["spec"], tuple(changes), float(seconds))


def _step(name: str, subject: str, changes: tuple[str, ...], seconds: float) -> MeasuredStep:
    given = load(subject, *changes)
    found = measured_step(f"{name}, {given.spec.name}", given.spec, given.spans, seconds)
    if isinstance(found, str):
        raise refuse("MP487", f"{name}: no step time for {subject}: {found}", '"set": ["host.name=megatron"]')
    if not 1 / FARTHEST <= seconds / found.modelled <= FARTHEST:
        detail = f"{name} took {seconds:.4g} s, but the model predicts {found.modelled:.4g} s: a factor of more than {FARTHEST}"
        raise refuse("MP487", detail, f"give the device.name of the GPU that it ran on, instead of {found.device}")
    return found


def _run_seconds(run: Path) -> float:
    """Median of the last steps of a run, without the time for reading rows, which is not modelled; the first step compiles and connects."""
    path = run / METRICS
    seconds = [each["step_seconds"] - each["data_seconds"] for each in _lines(path) if each["step"] > 1]
    if len(seconds) < FEWEST_STEPS:
        raise refuse("MP487", f"{path} has {len(seconds)} steps after the first; at least {FEWEST_STEPS} are needed", "train longer")
    found = float(median(seconds))
    if not SHORTEST <= found <= LONGEST:
        raise refuse(
            "MP487", f"the median step of {path} takes {found:g} s, but it must be from {SHORTEST:g} to {LONGEST:g}", "train longer"
        )
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The steps among the last lines of a run's metrics; records of other kinds and truncated lines are skipped."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LAST_BYTES))
            data = file.read(LAST_BYTES)
    except OSError as error:
        raise refuse("MP487", f"{path}: {error.strerror}", "a folder that megarun train --out has written") from None
    for line in data.decode("utf-8", "replace").splitlines():
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and all(_is_number(found.get(key)) for key in ("step", "step_seconds", "data_seconds")):
            yield found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
