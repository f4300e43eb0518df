"""Reserved memory of measured runs and of the estimate, phase by phase."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpu.measured.results import FITTED, document, kept_model, spec_of

from megaplan.api.profiled import label_of
from megaplan.budget.megarun import megarun_budget
from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.streams import SHARDS, ShardsPool
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts

RUN_WITH: Mapping[str, ShardsPool] = {"2ee927c8": ShardsPool.REDUCE_SCATTER}
"""Place where the runtime of a commit made gradient shards; for other commits today's place applies."""


class ReservedRow(NamedTuple):
    """A phase of a run.

    Attributes:
        run: Name of its spec.
        expandable_segments: True if the allocator had them.
        phase: Phase of the step.
        allocated: Measured bytes.
        estimated_allocated: Allocated bytes of the estimate.
        reserved: Measured bytes.
        estimated: Reserved bytes of the estimate, for the runtime at that commit.
        today: Estimate for the runtime as it is.
        device: Measured bytes that the device has in use; None where another run shared it.
        estimated_device: Estimate with the reserve.
    """

    run: str
    expandable_segments: bool
    phase: Phase
    allocated: int
    estimated_allocated: int
    reserved: int
    estimated: int
    today: int
    device: int | None
    estimated_device: int

    @property
    def error(self) -> float:
        """The error of the estimate of reserved bytes, as a share of the measured bytes."""
        return (self.estimated - self.reserved) / self.reserved


def reserved_rows(results: Path = FITTED) -> Iterator[ReservedRow]:
    """Every phase of every run of a results file; as estimated at the time where the file keeps that."""
    found = document(results)
    if (kept := kept_model(found)) is not None:
        for name, expandable, phase, *sizes in kept["reserved"]:
            yield ReservedRow(name, expandable, Phase(phase), *sizes)
        return
    shards = RUN_WITH.get(found["commit"], SHARDS)
    for run in [*found["runs"], *found.get("memory", ())]:
        yield from _of_run(run, shards)


def _of_run(run: dict[str, Any], shards: ShardsPool) -> Iterator[ReservedRow]:
    expandable = bool(run["expandable_segments"])
    spec = spec_of(run["run"], *run.get("overrides", ()), f"host.expandable_segments={str(expandable).lower()}")
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, choose_cuts(spec, inventory).spans)
    budget = megarun_budget(spec, inventory, layout, shards=shards)
    then, today = budget.worst, megarun_budget(spec, inventory, layout).worst
    for phase, measured in ((Phase(name), values) for name, values in run["phases"].items()):
        estimated = then.phases[phase]
        yield ReservedRow(
            label_of(run),
            expandable,
            phase,
            measured["allocated"],
            estimated - then.cells[phase][Column.OVERHEAD],
            measured["reserved"],
            estimated,
            today.phases[phase],
            measured["device"],
            estimated + budget.device.reserve_bytes,
        )


def reserved_table(results: Path = FITTED) -> str:
    """The runs' last phase as a table of Markdown: what a run has reserved when it ends, in GiB."""
    lines = [
        "| run | expandable segments | allocated | reserved | estimate | error | today's runtime | device | estimate |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    peaks: dict[tuple[str, bool], int] = {}
    for row in reserved_rows(results):
        key = row.run, row.expandable_segments
        peaks[key] = max(peaks.get(key, 0), row.allocated)
        if row.phase is Phase.OPTIMIZER:
            sizes = [peaks[key], row.reserved, row.estimated]
            more = [row.today, *([] if row.device is None else [row.device, row.estimated_device])]
            words = [row.run, "on" if row.expandable_segments else "off", *(f"{size / 2**30:.2f}" for size in sizes), f"{row.error:+.1%}"]
            words += [f"{size / 2**30:.2f}" for size in more] + [""] * (3 - len(more))
            lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"
