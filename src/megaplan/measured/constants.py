"""Measured constants of a device (`h200.json`): what each kind of kernel reaches of its counted floor, and what the host takes to launch.

`megaplan calibrate SPECS --profile RESULTS` writes a file from profiled steps; `megaplan.layout.profile` says how.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = "megaplan.measured/1"
FOLDER = Path(__file__).parent
PARTS = 10_000
"""Shares are whole ten-thousandths."""


STEP = "m2rnn.forward"
"""The kind whose step is the device's."""


class Counts(NamedTuple):
    """Work of a kind of kernels in the reference specs together, by which a later change of the operation is noticed."""

    num_bytes: int
    flops: int
    launches: int


class Measured(NamedTuple):
    """One device's constants.

    Attributes:
        device: As specs name it.
        about: Device, versions, commit, date and mode of the profiled runs, as the results have them.
        dtypes: Of the parameters, or the recipe in their place.
        shares: Of the counted floor, by kind of kernel, in ten-thousandths.
        spreads: Standard deviation of the logarithm over the runs, by kind.
        steps_ns: One dependent step of a recurrence, by kind.
        percent: What the device's percentages become: of linears' products and of memory.
        launch_ns: Start and tail of one kernel on the device.
        issue_ns: Host time for one launch of forward and backward.
        update_ns: The same of one operation of clipping and the optimizer.
        counts: By kind, for the reference specs, at the commit that was measured.
        references: Specs whose operations have these counts.
        interval: Ratio of measured to modelled steps below which a tenth lies, and above which.
        runs: Of each run: measured and modelled seconds, and modelled without the run among those that were fitted.
    """

    device: str
    about: Mapping[str, str]
    dtypes: tuple[str, ...]
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

    @property
    def step_ns(self) -> int:
        """One step of a recurrence's forward; 0 where none was measured."""
        return self.steps_ns.get(STEP, 0)


@cache
def measured(device: str) -> Measured | None:
    """The constants of a device; None where nothing was profiled on it."""
    path = FOLDER / f"{device}.json"
    return of_document(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def of_document(document: Mapping[str, Any]) -> Measured:
    """The value of a file."""
    kinds, host, (low, high) = document["kinds"], document["host"], document["interval"]
    return Measured(
        device=document["device"],
        about=document["about"],
        dtypes=tuple(document["dtypes"]),
        shares={name: round(kind["share"] * PARTS) for name, kind in kinds.items() if "share" in kind},
        spreads={name: kind["spread"] for name, kind in kinds.items()},
        steps_ns={name: kind["step_ns"] for name, kind in kinds.items() if "step_ns" in kind},
        percent=document["percent"],
        launch_ns=document["launch_ns"],
        issue_ns=host["issue_ns"],
        update_ns=host["update_ns"],
        counts={name: Counts(*kind["counts"]) for name, kind in kinds.items()},
        references=tuple(document["references"]),
        interval=(low, high),
        runs=document["runs"],
    )
