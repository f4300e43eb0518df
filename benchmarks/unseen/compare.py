"""Runs of other people that no term or constant was made from, each estimated by the users' path."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy_torchtitan.rows import Published

import megaplan
from megaplan.errors import MegaplanError
from megaplan.importers.maxtext.spec import import_maxtext
from megaplan.importers.megatron.spec import import_megatron
from megaplan.importers.torchtitan.spec import import_torchtitan
from megaplan.layout.step_time import PlannedTime

ROWS = Path(__file__).with_name("rows.json")
GIB = 2**30
UNITS = {"GiB": GIB, "GB": 10**9, "1000 MiB": 1000 * 2**20}
Row = dict[str, Any]


class Compared(NamedTuple):
    """A published run and its estimate.

    Attributes:
        row: The record of `rows.json`.
        measured_gib: Published memory; None without one.
        gib: Estimated memory of the same kind.
        measured_seconds: Published seconds of a step; None without them.
        time: Estimated time; None without one.
        verdict: Verdict on memory: fits, fits narrowly, does not fit.
        reason: Reason that there is no time, or that the run is refused.
    """

    row: Row
    measured_gib: float | None = None
    gib: float = 0.0
    measured_seconds: float | None = None
    time: PlannedTime | None = None
    verdict: str = ""
    reason: str = ""

    @property
    def memory_error(self) -> float | None:
        """Percent of the published memory."""
        return None if self.measured_gib is None or not self.verdict else 100 * (self.gib / self.measured_gib - 1)

    @property
    def time_error(self) -> float | None:
        """Percent of the published seconds."""
        return None if self.measured_seconds is None or self.time is None else 100 * (self.time.seconds / self.measured_seconds - 1)

    @property
    def inside(self) -> bool | None:
        """True if the published seconds are in the interval."""
        return None if self.time_error is None or self.time is None else self.time.low <= (self.measured_seconds or 0.0) <= self.time.high

    @property
    def wrong(self) -> bool:
        """True if the verdict is not what happened; a narrow fit says both."""
        return is_wrong(self.row, self.verdict)


def is_wrong(row: Row, verdict: str) -> bool:
    """True if a verdict is not what happened; a run with figures ran."""
    return verdict == ("does not fit" if row.get("ran", True) else "fits")


def read_rows() -> list[Row]:
    """Every record."""
    found: list[Row] = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
    return found


def document(row: Row) -> dict[str, Any]:
    """The spec that the import of a run gives, or the run's own."""
    sets, gpus = [f"device.name={row['device']}", *row.get("sets", [])], row["gpus"]
    if "keys" in row:
        job = Published(row["name"], row["source"], 0.0, gpus, row["keys"]).job
        return import_torchtitan(job, "job.toml", sets, gpus).document
    if "maxtext" in row:
        return import_maxtext(row["maxtext"].split(), sets, gpus).document
    return row["spec"] if "spec" in row else import_megatron(row["arguments"], "launch", sets, gpus, environment={}).document


def compare(row: Row) -> Compared:
    """One run."""
    try:
        found = megaplan.estimate(document(row))
    except MegaplanError as error:
        return Compared(row, reason=f"refused: {error}")
    spec, worst, time = found.job.spec, found.worst, found.step_time
    published = row.get("memory")
    outside = sum(item.bytes for item in found.budget.device.reserve) if published and published["kind"] == "device" else 0
    seconds = row.get("seconds") or (spec.global_batch_tokens / row["gpus"] / row["tokens"] if "tokens" in row else None)
    return Compared(
        row,
        published and published["size"] * UNITS[published["unit"]] / GIB,
        (worst.peak_bytes + outside) / GIB,
        seconds,
        None if isinstance(time, str) or seconds is None else time,
        found.verdict,
        time if isinstance(time, str) and seconds is not None else "",
    )


def compared(rows: Iterable[Row]) -> list[Compared]:
    """Every run of some rows."""
    return [compare(row) for row in rows]


def outside(found: Iterable[Compared]) -> list[Compared]:
    """Timed runs of the tuning half outside the fitted combinations; steps of megarun's own model have their own interval."""
    return [one for one in found if not one.row["held"] and one.time is not None and one.time.missing]


def others(found: Sequence[Compared]) -> tuple[float, float]:
    """The 10 % and 90 % quantiles of measured over predicted time of `outside`; each source counts as one."""
    some = outside(found)
    sizes = {one.row["group"]: sum(other.row["group"] == one.row["group"] for other in some) for one in some}
    ratios = sorted(
        (one.measured_seconds / one.time.seconds, 1 / sizes[one.row["group"]]) for one in some if one.time and one.measured_seconds
    )
    return _quantile(ratios, 0.1), _quantile(ratios, 0.9)


def _quantile(ratios: Sequence[tuple[float, float]], share: float) -> float:
    passed, total = 0.0, sum(weight for _, weight in ratios)
    for ratio, weight in ratios:
        passed += weight
        if passed >= share * total:
            return ratio
    return ratios[-1][0]
