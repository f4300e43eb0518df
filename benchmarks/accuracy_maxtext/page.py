"""Each published run through `megaplan import maxtext`, and the page of its errors."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from megaplan.budget.peaks import build_budget
from megaplan.errors import MegaplanError
from megaplan.importers.maxtext.spec import import_maxtext
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.layout.step_time import planned_time
from megaplan.partition.choose import choose_cuts

ROOT = Path(__file__).resolve().parents[2]
PAGE, RECIPES = ROOT / "docs/reference/maxtext.md", Path(__file__).with_name("recipes.yaml")
GIB = 2**30


class Compared(NamedTuple):
    """A published run and its estimate.

    Attributes:
        name: Model and devices.
        source: File with the seconds and the arguments.
        held: True if it took no part in the choice of constants.
        measured: Published seconds of a step.
        seconds: Estimated seconds; None without an estimate.
        inside: True if the published seconds are in the interval of the estimate.
        peak_bytes: Estimated peak of a device.
        usable_bytes: Usable memory of a device.
        reason: Reason that there is no estimate.
    """

    name: str
    source: str
    held: bool
    measured: float
    seconds: float | None = None
    inside: bool = False
    peak_bytes: int = 0
    usable_bytes: int = 0
    reason: str = ""

    @property
    def error(self) -> float:
        """Error of the estimated seconds in percent; 0 without an estimate."""
        return 0.0 if self.seconds is None else 100 * (self.seconds / self.measured - 1)


def compare(record: dict[str, Any]) -> Compared:
    """One run, as the command and `megaplan estimate` would price it."""
    given = Compared(record["name"], record["source"], bool(record.get("held")), float(record["seconds"]))
    try:
        spec = import_maxtext(record["arguments"].split()).loaded.spec
    except MegaplanError as error:
        return given._replace(reason=error.diagnostics[0].detail.splitlines()[0].partition(";")[0])
    inventory = build_inventory(spec)
    spans = choose_cuts(spec, inventory).spans
    worst = build_budget(spec, inventory, build_layout(spec, inventory, spans)).worst
    given = given._replace(peak_bytes=worst.peak_bytes, usable_bytes=worst.usable_bytes)
    time = planned_time(spec, spans, inventory)
    if isinstance(time, str):
        return given._replace(reason=time)
    return given._replace(seconds=time.seconds, inside=time.low <= given.measured <= time.high)


def compared() -> list[Compared]:
    """Every run, worst first; runs without an estimate last."""
    found = [compare(record) for record in yaml.safe_load(RECIPES.read_text(encoding="utf-8"))]
    return sorted(found, key=lambda one: (one.seconds is None, -abs(one.error), one.name))


def text(found: Sequence[Compared]) -> str:
    """The whole page."""
    timed = [one for one in found if one.seconds is not None]
    tuned, held = [one for one in timed if not one.held], [one for one in timed if one.held]
    sized = [one for one in found if one.usable_bytes]
    over = [one for one in sized if one.peak_bytes > one.usable_bytes]
    figures = {
        "count": len(found),
        "timed": len(timed),
        "num_tuned": len(tuned),
        "num_held": len(held),
        "tuned": _errors(tuned),
        "held": _errors(held),
        "num_inside": sum(one.inside for one in held),
        "sized": len(sized),
        "over": len(over),
        "fullest": max(100 * one.peak_bytes / one.usable_bytes for one in sized),
        "share": median(100 * one.peak_bytes / one.usable_bytes for one in sized),
    }
    sources = sorted({one.source for one in found})
    return (
        INTRODUCTION.format_map(figures)
        + "\n".join(map(_line, found))
        + "\n\nSources:\n\n"
        + "\n".join(f"- {each}" for each in sources)
        + "\n"
    )


def _errors(found: Sequence[Compared]) -> str:
    errors = sorted(abs(one.error) for one in found)
    return f"median {median(errors):.1f} %, nine tenths below {errors[int(0.9 * (len(errors) - 1))]:.1f} %, worst {errors[-1]:.1f} %"


def _line(one: Compared) -> str:
    seconds = [f"{one.measured:.3f}", "", one.reason, ""]
    if one.seconds is not None:
        seconds = [f"{one.measured:.3f}", f"{one.seconds:.3f}", f"{one.error:+.1f}", "yes" if one.inside else "no"]
    size = f"{one.peak_bytes / GIB:.1f} of {one.usable_bytes / GIB:.1f}" if one.usable_bytes else ""
    return f"| {' | '.join([one.name, *seconds, size, 'yes' if one.held else 'no'])} |"


INTRODUCTION = """# MaxText: published and estimated

`make accuracy-maxtext` writes this page. Each of {count} published runs of MaxText on TPUs is imported with the arguments of its recipe
(`benchmarks/accuracy_maxtext/recipes.yaml`), as `megaplan import maxtext` reads them, and estimated. Seconds are those of the recipe's own
log or table: one number, of a version of JAX and libtpu that differs from row to row, with flags of XLA that the estimate does not know.

**{num_held} rows are held out.** A third of all rows was drawn once, before any constant was chosen; three more, of Gemma 4, could not be
imported at that time. Eight constants were chosen from the {num_tuned} other rows, near their priors: the share of the peak that large
products reach on
each device and in fp8, the rates of attention's forward and backward and of experts, and the exposed share of gathers. Their errors:
{tuned}.
Errors of the rows that are held out: {held}; {num_inside} of {num_held} are in the
interval of the estimate, which is that of steps without a fitted combination: *uncalibrated*. No constant was changed after these rows were
seen. Most of them have a row of the same model on another slice among the others; int8 has a share that no row was used for.

**Memory.** No recipe states its memory; all of them ran, so an estimate above the usable memory is a false alarm: {over} of {sized}
are.
The fullest is estimated at {fullest:.1f} % of the usable memory, and the median at {share:.0f} %. These runs cannot show by how much an
estimate may be too low. One rule was derived from these rows: three rows of Gemma 3, none of them held out, were false alarms until a layer
whose input is saved was modelled as recomputed without its neighbours in the scanned block.

The reasons of the large errors are not measured. gpt-oss has heads of width 64 and experts of width 2,880, of which neither is a
multiple of the 256 columns of a matrix unit, and clamped activations with biases; Llama 4 Maverick has one expert of 128 a token under
tensor parallelism. Layers of gated delta nets (Qwen3-Next) have no time, and the small Gemma 4 models, with embeddings of layers, are
not read. The batch of llama2-70b on v6e-256 is that of the published log, 8,192 tokens per device; its recipe lists another.

Worst first. *Inside*: the published seconds are in the interval.

| Run | Published s | Estimate s | Error % | Inside | Peak GiB | Held out |
|---|---|---|---|---|---|---|
"""
