"""Figures of a run that no spec has to give, each with its basis and source (`figures.json`)."""

import json
from functools import cache
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import NamedTuple

from megaplan.columns import Basis

DATA = Path(__file__).with_name("figures.json")
REQUEUE_SECONDS = ((2048, 454.0), (4096, 545.0), (8192, 635.0), (16384, 768.0))
"""Pairs of a number of devices and the seconds from the request to the resumed job, if the whole job is queued again (arXiv:2509.16293,
table 7).
"""
RESTART_SECONDS = ((2048, 46.0), (4096, 51.0), (8192, 54.0), (16384, 65.0))
"""The same if every node keeps its environment."""
TABLE = "arXiv:2509.16293, table 7, 2,048 to 16,384 GPUs, linear in the logarithm of the number; the ends hold beyond"


class RunFigure(NamedTuple):
    """A figure of a run.

    Attributes:
        name: Key of the section `run`, or name of a figure without a key.
        value: Number.
        unit: Unit of the number.
        basis: Basis of the number.
        source: Document, table or measurement.
    """

    name: str
    value: float
    unit: str
    basis: Basis
    source: str


@cache
def figures() -> dict[str, RunFigure]:
    """Every figure, by name."""
    records = json.loads(DATA.read_text(encoding="utf-8"))
    return {name: RunFigure(name, each["value"], each["unit"], Basis(each["basis"]), each["source"]) for name, each in records.items()}


def given(name: str, value: float, unit: str) -> RunFigure:
    """A figure that the spec or the command line gives."""
    return RunFigure(name, value, unit, Basis.GIVEN, f"run.{name}")


def by_devices(name: str, table: tuple[tuple[int, float], ...], num_devices: int) -> RunFigure:
    """The figure of a table of devices and seconds, between two entries linear in the logarithm of the devices."""
    value = table[0][1] if num_devices <= table[0][0] else table[-1][1]
    for (fewer, low), (more, high) in pairwise(table):
        if fewer <= num_devices <= more:
            value = low + (high - low) * log2(num_devices / fewer) / log2(more / fewer)
    return RunFigure(name, value, "s", Basis.PUBLISHED, TABLE)
