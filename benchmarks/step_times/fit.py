"""Fit the step-time model's constants to published rows and write `src/megaplan/cost/step/constants.json`.

python benchmarks/step_times/fit.py ROWS.json [--operations FOLDER] [--output FILE] [--page FILE --simumax CLONE]

Needs the extra `fit` (numpy, scipy). A fit takes seconds; the cross-validation that gives the intervals fits once a fold, and with `--page`
the error tables are written too. The rows stay outside the repository: their form is that of `rows.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices: threads of the linear algebra only wait for one another
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import numpy as np  # noqa: E402

from step_times import page, pins, simumax  # noqa: E402
from step_times.fitting import Fit, fit, predict, row_weights  # noqa: E402
from step_times.folds import Array, cross_validated, errors, interval, ratios, replayed, uncalibrated, usable  # noqa: E402
from step_times.machine import Replayed  # noqa: E402
from step_times.priors import priors  # noqa: E402
from step_times.rows import Row  # noqa: E402

OUTPUT = ROOT / "src" / "megaplan" / "cost" / "step" / "constants.json"


def main() -> None:
    """Read the arguments, fit, validate and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="rows in the form of rows.py")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--page", type=Path, help="write the error tables here")
    parser.add_argument("--simumax", type=Path, help="a checkout of MooreThreads/SimuMax: the page replays every row of its table")
    parser.add_argument("--operations", type=Path, help="folder of operations and layers measured alone: writes pinned.json first")
    arguments = parser.parse_args()
    if arguments.page and not arguments.simumax:
        parser.error("--page needs --simumax")
    if arguments.operations:
        pins.write(arguments.operations)
    rows, anomalies = usable(arguments.rows)
    fitted = fit(rows)
    own = ratios(predict(fitted, rows), rows)
    blind, megarun = cross_validated(rows), replayed(rows)
    foreign = uncalibrated(rows, fitted)
    document = {
        "format": "megaplan.step-constants/1",
        "rows": len(rows),
        "constants": constants(fitted),
        "intervals": {name: [round(bound, 4) for bound in bounds] for name, bounds in intervals(rows, blind, foreign, megarun).items()},
    }
    arguments.output.write_text(_text(document), encoding="utf-8")
    for name, found in (("in sample", own), ("cross-validated", blind), ("no device or framework on both sides", foreign)):
        print(name, errors(found))
    if arguments.page:
        table = simumax.rows_of(arguments.simumax)
        others = fit([row for row in rows if row["framework"] != simumax.FRAMEWORK], near=fitted)
        machine = Replayed(table, ratios(predict(fitted, table), table), ratios(predict(others, table), table))
        arguments.page.write_text(page.text(rows, anomalies, own, blind, foreign, megarun, machine), encoding="utf-8")


def constants(fitted: Fit) -> dict[str, dict[str, object]]:
    """Every constant as the data file has it."""
    known, found = priors(), {}
    for name, shift, spread, touched in zip(fitted.names, fitted.shifts, fitted.spreads, fitted.touched, strict=True):
        prior = known[name]
        basis = "fitted" if touched else "modelled"
        source = f"{prior.source}; {touched} rows" if touched else prior.source
        value = float(f"{prior.value * np.exp(shift):.4g}")
        found[name] = {"value": value, "spread": round(float(spread), 3), "unit": prior.unit, "basis": basis, "source": source}
    return found


def intervals(rows: list[Row], blind: Array, foreign: Array, megarun: Array) -> dict[str, tuple[float, float]]:
    """Measured over predicted: the middle 80 % of each family's cross-validated rows, of unseen devices and frameworks, and of no fit."""
    families, weights = np.array([row["family"] for row in rows]), row_weights(rows)
    found = {name: interval(blind[families == name], weights[families == name]) for name in ("dense", "moe", "hybrid")}
    return found | {"uncalibrated": interval(foreign, weights), "replayed": interval(megarun)}


def _text(document: dict[str, object]) -> str:
    """JSON with one constant a line."""
    constants_text = ",\n".join(f"    {json.dumps(name)}: {json.dumps(record)}" for name, record in document["constants"].items())  # type: ignore[attr-defined]
    rest = {key: value for key, value in document.items() if key != "constants"}
    head = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in rest.items())
    return f'{{\n{head},\n  "constants": {{\n{constants_text}\n  }}\n}}\n'


if __name__ == "__main__":
    main()
