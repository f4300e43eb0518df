"""Each published run through `megaplan import torchtitan`, and the page of its errors."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from accuracy_torchtitan.rows import ROWS, Published

from megaplan.budget.peaks import build_budget
from megaplan.importers.torchtitan.spec import import_torchtitan
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.host import RESERVED_PERCENT

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/accuracy-torchtitan.md"
GIB = 2**30
SOURCES = tuple(dict.fromkeys(row.source for row in ROWS))


class Compared(NamedTuple):
    """A row and its estimate.

    Attributes:
        row: The published row.
        peak_bytes: Estimated reserved bytes of the fullest rank.
        allocated_bytes: Estimated bytes of that rank without the part that is reserved above the pools.
        where: Time of its peak.
        usable_bytes: Bytes that the device has for it.
    """

    row: Published
    peak_bytes: int
    allocated_bytes: int
    where: str
    usable_bytes: int

    @property
    def error(self) -> float:
        """Error of the peak in percent."""
        return 100 * (self.peak_bytes / GIB / self.row.gib - 1)

    @property
    def reserved_percent(self) -> float:
        """Percentage reserved above the pools, from the published peak."""
        return 100 * (self.row.gib * GIB / self.allocated_bytes - 1)


def compare(row: Published) -> Compared:
    """One row, as the command and `megaplan estimate` would price it."""
    spec = import_torchtitan(row.job, "row.toml", row.sets, row.gpus).loaded.spec
    inventory = build_inventory(spec)
    spans = choose_cuts(spec, inventory).spans
    worst = build_budget(spec, inventory, build_layout(spec, inventory, spans)).worst
    return Compared(row, worst.peak_bytes, worst.allocated_bytes, worst.peak_places[worst.peak_phase], worst.usable_bytes)


def compared() -> list[Compared]:
    """Every row."""
    return [compare(row) for row in ROWS]


def text(found: Sequence[Compared]) -> str:
    """The whole page."""
    fitted, held = [one for one in found if one.row.fitted], [one for one in found if not one.row.fitted]
    shares = [one.reserved_percent for one in fitted]
    near = [one for one in held if abs(one.error) <= 5]
    unseen = [one for one in held if one.row.unseen]
    nearer = [one for one in unseen if abs(one.error) <= 5]
    figures = {
        "count": len(found),
        "num_fitted": len(fitted),
        "num_held": len(held),
        "percent": RESERVED_PERCENT,
        "least": min(shares),
        "most": max(shares),
        "mean": mean(shares),
        "fitted_error": mean(abs(one.error) for one in fitted),
        "held_error": mean(abs(one.error) for one in held),
        "near": len(near),
        "num_unseen": len(unseen),
        "unseen_error": mean(abs(one.error) for one in unseen),
        "nearer": len(nearer),
        "nearer_error": mean(abs(one.error) for one in nearer),
        "others_least": min(one.reserved_percent for one in held),
        "others_most": max(one.reserved_percent for one in held),
    }
    ordered = sorted(found, key=lambda one: -abs(one.error))
    lines = [_line(one) for one in ordered]
    sources = [f"{number}. {source}" for number, source in enumerate(SOURCES, 1)]
    return INTRODUCTION.format_map(figures) + "\n".join(lines) + "\n\nSources:\n\n" + "\n".join(sources) + "\n" + OPEN


def _line(one: Compared) -> str:
    where = one.where.partition(",")[0]
    cells = [one.row.name, str(SOURCES.index(one.row.source) + 1), f"{one.row.gib:.2f}", f"{one.peak_bytes / GIB:.2f}", f"{one.error:+.1f}"]
    return f"| {' | '.join([*cells, f'{one.reserved_percent:.1f}', where, 'yes' if one.row.fitted else 'no'])} |"


INTRODUCTION = """# Accuracy: torchtitan

`make accuracy-torchtitan` writes this page. Each of {count} published runs of torchtitan is written as its own job file, with the defaults
of its version where a table does not state a key, read by `megaplan import torchtitan`, and estimated. torchtitan logs torch's largest
reserved bytes, so the estimates are of reserved memory: live tensors, the separate pools of the streams of FSDP2's collectives (gradient
shards, outputs of two gathers), and {percent} % for memory that the allocator reserves beyond these.

**That percentage is the only fitted constant.** It is from {num_fitted} runs of one model (8B, tables 1 and 3 of December 2024), where it
was {least:.1f} to {most:.1f} % (mean {mean:.1f}). The mean error of those runs is {fitted_error:.1f} %; of the {num_held} others, on which
no number was tuned, it is {held_error:.1f} %, and {near} of them are within 5 %. There it would be {others_least:.1f} to
{others_most:.1f} %, errors of everything else included: set `host.reserved_percent` to what your own runs show.

The formulas were written from the sources, with December's tables known. The {num_unseen} rows of other tables were estimated only after
they were final: mean {unseen_error:.1f} %, and {nearer} of them, all except those of B200, {nearer_error:.1f} %. Two terms came later,
from the source: until July 2025 the last block stays gathered together with the head, at most 1 % of a row; and with flex attention
the version of October 2025 checkpoints attention and experts separately (`host.checkpoints: halves`), without which the two rows of
DeepSeek-V3 are +5.2 and +4.1 %.

Worst first; *reserved* is the published peak above live tensors and pools, *fitted* marks rows from which the percentage was fitted. The
time of a
step has [a separate page](accuracy-time.md), with many of the same rows.

| Run | Source | Published GiB | Estimate GiB | Error % | Reserved % | Peak at | Fitted |
|---|---|---|---|---|---|---|---|
"""
OPEN = """
## What stays open

- The B200 rows are of the same job and month as those of MI300X, which are 5.4 to 5.7 GiB higher; the difference between them is not
  stated.
- The tables do not say how many microbatches a pipeline had. Their version took as many as there are ranks unless set otherwise; with
  more, estimates of the 405B runs are lower.
- At the longest contexts of the 405B runs the published peak rises, and the estimate does not: ring attention's buffers are counted as one
  gather of keys and values and an fp32 copy of its output.
- Tensor parallelism with async TP on symmetric memory is priced as if without async TP; of the table's two 2D runs,
  the one without it has the higher peak.
- Under `checkpoint_every` a pipeline rank counts its own blocks, and the estimate the model's: they can differ by one checkpoint per stage.
- The run without expert parallelism is said to use "almost 96 %" of its memory; 75.9 GiB are that share of 79.09.
- Experts or latent attention with tensor parallelism and masks of packed documents are refused; flex attention is priced as if without
  masks, and the chunked loss of 2026 as whole.
"""
