"""A plan's results as a row of a committed table: numbers that a reader can compare, digests of what is too long to read."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import megaplan
from megaplan.budget.values import Budget
from megaplan.exporters.hosts import EXPORTERS
from megaplan.exporters.values import Source
from megaplan.layout.step_time import PlannedTime

ESTIMATED = ("refused", "cuts", "peak_bytes", "memory", "step_microseconds", "time", "exports", "said")


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def estimated(document: Any) -> dict[str, str]:
    """The cuts, the bytes of every rank, the time of a step, the launch files of other hosts, the messages; or the codes of a refusal."""
    row = dict.fromkeys(ESTIMATED, "")
    try:
        found = megaplan.estimate(document)
    except megaplan.MegaplanError as error:
        return row | {"refused": codes_of(error)}
    time = found.step_time
    if isinstance(time, PlannedTime):
        row |= {"step_microseconds": str(round(time.seconds * 1e6)), "time": digest(time.as_document())}
    routing = None if found.routing is None else [part[:5] if isinstance(part, Budget) else part for part in found.routing]  # no pools
    memory = [(rank.ranks, rank.cells, rank.peak_places, rank.parameters) for rank in found.ranks], found.serving, routing
    return row | {
        "cuts": " ".join(str(slot.stop) for slot in found.job.layout.slots),
        "peak_bytes": str(found.peak_bytes),
        "memory": digest(memory),
        "exports": digest([*_exports_of(found.job)]),
        "said": digest([*_said_of(found)]),
    }


def codes_of(error: megaplan.MegaplanError) -> str:
    return " ".join(sorted({item.code for item in error.diagnostics}))


def _said_of(found: megaplan.Estimate) -> Iterator[tuple[str, ...]]:
    """Diagnostics, and what a split says of its cuts; the advice for a plan that does not fit has its own tests."""
    if found.fits:
        yield from ((item.code, item.detail, *item.hints) for item in found.diagnostics)
        yield megaplan.split(found.job).notes


def _exports_of(job: megaplan.LoadedJob) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Host, text and lost keys of each exporter that takes the plan, or the codes of its refusal."""
    source = Source(job.spec, job.inventory, job.layout)
    for host in EXPORTERS:
        try:
            exported = EXPORTERS[host](source)
            yield host, exported.text, tuple(loss.key for loss in exported.losses)
        except megaplan.MegaplanError as error:
            yield host, "", tuple(item.code for item in error.diagnostics)
