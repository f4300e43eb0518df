"""Measured constants of a device (`h200.json`): time of each kind of kernel relative to its counted floor, and launch times of the host.

`megaplan calibrate SPECS --profile RESULTS` writes a file from profiled steps; `megaplan.layout.profile` describes the method.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = "megaplan.measured/1"
FOLDER = Path(__file__).parent
PARTS = 10_000
"""Unit of shares: ten-thousandths."""


STEP = "m2rnn.forward"
"""Name of the kind whose step is one of a recurrence."""


class Counts(NamedTuple):
    """Work of a kind of kernels in all reference specs; a change of the operation changes it."""

    num_bytes: int
    flops: int
    launches: int


class Change(NamedTuple):
    """A kind whose kernels changed after they were profiled.

    Attributes:
        factor: Share of the profiled time that its kernels take now.
        is_measured: True if its present kernels were measured.
        sources: Measurements that give the factor.
    """

    factor: float
    is_measured: bool
    sources: tuple[str, ...]


class Measured(NamedTuple):
    """One device's constants.

    Attributes:
        device: Name in specs.
        about: Device, versions, commit, date and mode of the profiled runs, copied from the results.
        dtypes: Dtypes of the parameters, or recipes.
        modes: Ways in which the host launched the kernels of profiled steps.
        shares: Shares of the counted floor, by kind of kernel, in ten-thousandths.
        spreads: Standard deviation of the logarithm over the runs, by kind.
        steps_ns: One dependent step of a recurrence, by kind.
        percent: Resulting percentages of the device: of linears' products and of memory.
        launch_ns: Start and tail of one kernel on the device.
        issue_ns: Host time for one launch of forward and backward.
        update_ns: Host time for one operation of clipping and the optimizer.
        counts: Counts of the reference specs by kind, at the measured commit.
        references: Specs whose operations have these counts.
        interval: Ratios of measured to modelled steps: a tenth is below the first, a tenth above the second.
        runs: Measured and modelled seconds of each run, and for fitted runs seconds modelled without the run.
        changes: Kinds whose kernels changed since; shares and steps are for today's kernels.
    """

    device: str
    about: Mapping[str, str]
    dtypes: tuple[str, ...]
    modes: tuple[str, ...]
    shares: Mapping[str, int]
    spreads: Mapping[str, float]
    steps_ns: Mapping[str, int]
    percent: Mapping[str, int]
    launch_ns: int
    issue_ns: int
    update_ns: int
    counts: Mapping[str, Counts]
    references: tuple[Mapping[str, Any], ...]
    interval: tuple[float, float]
    runs: Mapping[str, Mapping[str, float]]
    changes: Mapping[str, Change] = {}

    @property
    def step_ns(self) -> int:
        """One step of a recurrence's forward; 0 if none was measured."""
        return self.steps_ns.get(STEP, 0)


@cache
def measured(device: str) -> Measured | None:
    """The constants of a device; None if nothing was profiled on it."""
    path = FOLDER / f"{device}.json"
    return of_document(json.loads(path.read_text(encoding="utf-8"))) if os.path.isfile(path) else None


@cache
def profiled(device: str) -> Measured | None:
    """The constants of the kernels as they were profiled, with which the profiled steps are compared."""
    path = FOLDER / f"{device}.json"
    return of_document(json.loads(path.read_text(encoding="utf-8")) | {"changed": {}}) if os.path.isfile(path) else None


def of_document(document: Mapping[str, Any]) -> Measured:
    """The constants in a file's document, with the changes of kernels since."""
    kinds, host, (low, high) = document["kinds"], document["host"], document["interval"]
    changes = {
        name: Change(each["factor"], each["basis"] == "measured", tuple(each["sources"]))
        for name, each in document.get("changed", {}).items()
    }
    factors = {name: change.factor for name, change in changes.items()}
    return Measured(
        device=document["device"],
        about=document["about"],
        dtypes=tuple(document["dtypes"]),
        modes=tuple(document["modes"]),
        shares={name: min(PARTS, round(kind["share"] * PARTS / factors.get(name, 1.0))) for name, kind in kinds.items() if "share" in kind},
        spreads={name: kind["spread"] for name, kind in kinds.items()},
        steps_ns={name: round(kind["step_ns"] * factors.get(name, 1.0)) for name, kind in kinds.items() if "step_ns" in kind},
        percent=document["percent"],
        launch_ns=document["launch_ns"],
        issue_ns=host["issue_ns"],
        update_ns=host["update_ns"],
        counts={name: Counts(*kind["counts"]) for name, kind in kinds.items()},
        references=tuple(document["references"]),
        interval=(low, high),
        runs=document["runs"],
        changes=changes,
    )
