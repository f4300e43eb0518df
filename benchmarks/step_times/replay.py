"""Predict published steps with the committed constants.

python benchmarks/step_times/replay.py ROWS.json [--json OUT]

Each row becomes a spec, is timed as users' specs are, and is printed with its error, worst first. A row that cannot be timed is named with
its reason; what a row does not state is taken from `DEFAULTS`, which is reported once. Needs neither numpy nor scipy.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from megaplan.cost.step.predict import predict_step  # noqa: E402
from megaplan.errors import MegaplanError  # noqa: E402
from step_times.rows import Row, step_of_row  # noqa: E402

FORMAT = "megaplan.replay/1"
LEAST = {"step_s": 1e-9, "gpus": 1, "seq": 1, "gbs": 1} | dict.fromkeys(("mbs", "tp", "pp", "cp", "vp", "ep", "etp", "dp", "nmb"), 0)
"""The smallest values of a row; 0 is for axes that it does not state."""

_AXES: dict[str, Any] = dict.fromkeys(("tp", "pp", "cp", "vp", "ep", "etp", "mbs"), 1)
_OFF: dict[str, Any] = dict.fromkeys(("sp", "tp_overlap", "a2a_overlap", "fp8_gather", "fp8_attention", "tokendrop"), 0)
DEFAULTS: dict[str, Any] = {"precision": "bf16", "task": "pretrain", "schedule": "1f1b", "zero": 1, "compiled": 1, **_AXES, **_OFF}
DEFAULTS |= {"release": None, "dispatcher": None, "fsdp": None, "recompute": {}, "cuda_graph": []}


def main() -> None:
    """Read the rows, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="rows in the form of rows.py")
    parser.add_argument("--json", type=Path, help="write every row with its terms here")
    arguments = parser.parse_args()
    given: list[Row] = json.loads(arguments.rows.read_text(encoding="utf-8"))
    rows = [DEFAULTS | row for row in given]
    if missing := sorted({key for row in given for key in DEFAULTS if key not in row}):
        print(f"not in every row, and taken as usual: {', '.join(f'{key} = {DEFAULTS[key]}' for key in missing)}")
    found = [replayed(row) for row in rows]
    timed = sorted((each for each in found if "error" in each), key=lambda each: -abs(each["error"]))
    for each in timed:
        times = f"{each['measured_s']:10.4f} s  predicted {each['predicted_s']:10.4f} s  {100 * each['error']:+6.1f} %"
        print(f"{each['id']:12s} {times}")
    for each in found:
        if "reason" in each:
            print(f"{each['id']:12s} not timed: {each['reason']}")
    for line in summary(timed, len(rows)):
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps({"format": FORMAT, "rows": found}, indent=1) + "\n", encoding="utf-8")


def replayed(row: Row) -> dict[str, Any]:
    """One row with its prediction, or with the reason why there is none."""
    own: dict[str, Any] = {"id": row.get("id", "?"), "family": row.get("family"), "anomaly": row.get("anomaly")}
    try:
        if low := [f"{key} = {row[key]}" for key, least in LEAST.items() if row.get(key) is not None and row[key] < least]:
            return own | {"reason": f"too small: {', '.join(low)}"}
        step, measured = predict_step(step_of_row(row)), float(row["step_s"])
    except KeyError as error:
        return own | {"reason": f"there is no {error} in the row, or in what the model of step times knows"}
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError, MegaplanError) as error:
        return own | {"reason": f"{type(error).__name__}: {error}"}
    figures = {"measured_s": measured, "predicted_s": step.seconds, "error": step.seconds / measured - 1}
    return own | figures | {"terms": step.terms}


def summary(timed: Sequence[dict[str, Any]], count: int) -> list[str]:
    """Median, ninth decile, worst and mean signed error of each family, anomalies left out."""
    lines = [f"{len(timed)} of {count} rows timed"]
    for family in ("dense", "moe", "hybrid", None):
        signed = [each["error"] for each in timed if not each["anomaly"] and family in (None, each["family"])]
        if signed:
            off = sorted(map(abs, signed))
            ninth = off[min(len(off) - 1, int(0.9 * len(off)))]
            percent = f"median {100 * median(off):.1f} %  p90 {100 * ninth:.1f} %  worst {100 * off[-1]:.0f} %"
            lines.append(f"{family or 'all':8s} {len(off):4d} rows  {percent}  mean signed {100 * mean(signed):+.1f} %")
    return lines


if __name__ == "__main__":
    main()
