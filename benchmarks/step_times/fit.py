"""Fit the step-time model's constants to published rows and write `src/megaplan/cost/step/constants.json`.

python benchmarks/step_times/fit.py ROWS.json [--operations FOLDER] [--output FILE] [--page FILE --simumax CLONE]

Needs the extra `fit` (numpy, scipy). A fit takes seconds; the cross-validation that gives the intervals fits once a fold, and with `--page`
the error tables are written too. The rows stay outside the repository: their form is that of `rows.py`.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices: threads of the linear algebra only wait for one another
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import numpy as np  # noqa: E402

from megaplan.cost.step.constants import intervals as shipped  # noqa: E402
from megaplan.cost.step.fitted import OTHERS  # noqa: E402
from step_times import page, pins, simumax  # noqa: E402
from step_times.fitting import Fit, fit, predict  # noqa: E402
from step_times.folds import (  # noqa: E402
    Array,
    Interval,
    class_intervals,
    cross_validated,
    errors,
    interval,
    ratios,
    replayed,
    tuples_of,
    uncalibrated,
    usable,
    without_tuple,
)
from step_times.machine import Replayed  # noqa: E402
from step_times.priors import priors  # noqa: E402
from step_times.written import constants_text  # noqa: E402

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
    blind, megarun = cross_validated(rows, near=fitted), replayed(rows)
    foreign, alone = uncalibrated(rows, fitted), without_tuple(rows, fitted)
    classes = class_intervals(rows, blind, alone, foreign)
    document = {
        "format": "megaplan.step-constants/1",
        "rows": len(rows),
        "constants": constants(fitted),
        "intervals": intervals(classes, megarun),
        "tuples": sorted(set(tuples_of(rows))),
    }
    arguments.output.write_text(constants_text(document), encoding="utf-8")
    sides = {"in sample": own, "cross-validated": blind, "no combination on both sides": alone, "no device or framework": foreign}
    for name, found in sides.items():
        print(name, errors(found))
    for name, each in classes.items():
        print(name, each)
    if arguments.page:
        table = simumax.rows_of(arguments.simumax)
        others = fit([row for row in rows if row["framework"] != simumax.FRAMEWORK], near=fitted)
        machine = Replayed(table, ratios(predict(fitted, table), table), ratios(predict(others, table), table))
        arguments.page.write_text(page.text(rows, anomalies, own, blind, foreign, megarun, classes, machine), encoding="utf-8")


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


def intervals(classes: dict[str, Interval], megarun: Array) -> dict[str, list[float]]:
    """Measured over predicted time: the middle 80 % of the rows of each class, and of megarun's model without a fit.

    That of other people's runs stays: `benchmarks/unseen/run.py` writes it.
    """
    found = {name: (each.low, each.high) for name, each in classes.items()} | {"replayed": interval(megarun), OTHERS: shipped()[OTHERS]}
    return {name: [round(bound, 4) for bound in bounds] for name, bounds in found.items()}


if __name__ == "__main__":
    main()
