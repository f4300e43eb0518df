"""Write docs/reference/public-reports.md: memory that others measured under Megatron-Core and published with their configuration.

python benchmarks/accuracy_megatron/reports.py [--check]     --check exits 1 if the page is out of date
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy_megatron.launches import DEVICES, stage_of_launch, stages_of_spec
from accuracy_megatron.recompute import GB, RUNS, peak_gb
from pages import write_page

import megaplan
from megaplan.hosts.megatron.peak import memory
from megaplan.importers.megatron.spec import import_megatron
from megaplan.importers.torchtitan.spec import import_torchtitan

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs/reference/public-reports.md"
REPORTS = HERE / "reports.json"
STAGES = HERE.parent.parent / "tests/megaplan/hosts/megatron/simumax.json"
SIMUMAX = "https://github.com/MooreThreads/SimuMax"
STUDY = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/376a9cbf/skills/nemo-mbridge-perf-activation-recompute/card.yaml"
GIB = 2**30
UNITS = {"GB": GB, "GiB": GIB}
HEAD = """# Public reports: what others measured

`make accuracy-reports` writes this page from runs of Megatron-Core that their authors published with the whole configuration. Each is
imported by `megaplan import megatron`, and the estimate is compared with what was published: bytes that torch had *allocated* or
*reserved* at most, those allocated *after a step* on the first rank, or those of the *device* as the driver shows them, its context and
NCCL's buffers included. Figures of a device are whole GiB, and their launches leave lengths of texts open. Worst first. No term was
made from those *held out*.

Megatron-Bridge's cards call their figures GiB, and they are taken as 10⁹ bytes. They are as its log prints them: `report_memory` of
`training/utils/train_utils.py` divides by 1.0e9 and keeps five digits, so that all ten figures above 100 end in 0 in their third decimal.
As GiB all eleven compared here would be above the estimate by 4 to 12 %, whatever model, sharding, tokens and recompute. In their
container Transformer Engine writes gradients over logits, as before release 2.18: with 2.18's fp32 gradients two would be 12 % high.
"""

OPEN = """Three of those that are missed ran again with growing *segments* alone: without, they needed at least 30, 37 and 56 % more
than the estimate has allocated, beyond the 21 % of published pairs. Two more, one job in two precisions, would need 48 and 73 % more;
their failure is said to be in Triton at the first forward, and no one says that growing segments mended it. Two have *graphs* of
attention, Mamba and the router, and one of them is said to have run out while these were captured; without the router's graphs, or
with less kept, they ran. A third has graphs of whole layers and ran out in the capture: Transformer Engine's warm-up holds the
outputs of every microbatch since 30 July 2026 (4e755d888), until pull request 3427. By that source 42 GiB that stay, 74 GiB of
activations in the warm-up and again in the graphs' pool, and 40 GiB of outputs meet there, 229 of 182 GiB. Launches do not say which
Transformer Engine they have, and that sum, which is below the device for the other two, would refuse two jobs that ran; so no bytes
are priced for a capture. The last one has a graph of the whole step on B200, and ran out with micro-batches of 4 and of 2; the same
job with one of 8 ran on B300. What is missing would be above 12 GiB with 16 micro-batches a step, above 54 GiB with 32 and below 18
GiB with 8, so it is no constant. Of the narrow ones two are one job without growing segments, which ran out in 30 to 60 % of its
attempts. torchtitan's peaks include the percentage that it reserves, which is fitted to dense runs. A V100 and a card of 48 GB are
judged by their capacity, with another device's workspaces.

One failure prints what was allocated: the GPT-2 job asked for 786 MiB in addition to 28.82 GiB at the loss of its first step, 29.59
GiB in all; the estimate has 27.28 there, and is of a later Megatron.""".splitlines()
"""Lines on what the verdicts of jobs leave open."""


class Report(NamedTuple):
    """A published figure and the estimate of it, in bytes."""

    name: str
    source: str
    kind: str
    measured: float
    estimated: float
    cause: str = ""
    held: bool = False

    @property
    def error(self) -> float:
        """Percent of the measurement."""
        return 100 * (self.estimated / self.measured - 1)


def reports() -> list[Report]:
    """Every report, worst first."""
    found = [*_published(), *_stages(), *_study()]
    return sorted(found, key=lambda one: (-abs(one.error), one.name))


def _published() -> Iterator[Report]:
    for row in json.loads(REPORTS.read_text(encoding="utf-8"))["rows"]:
        found = estimate(row)
        measured, held = row["size"] * UNITS[row["unit"]], row.get("held", False)
        yield Report(row["name"], row["source"], row["kind"], measured, estimated(row["kind"], found), row["cause"], held)


def estimated(kind: str, found: megaplan.Estimate) -> float:
    """Bytes of the estimate that a kind of measurement is compared with."""
    if kind == "after a step":
        return memory(stages_of_spec(found.job.spec)[0]).after_step
    worst, outside = found.worst, sum(item.bytes for item in found.budget.device.reserve)
    return {"allocated": worst.allocated_bytes, "reserved": worst.peak_bytes, "device": worst.peak_bytes + outside}[kind]


def _threads() -> Iterator[str]:
    """The section on jobs that ran out of memory, and on the same jobs changed so that they ran."""
    rows = [(row, estimate(row)) for row in json.loads(REPORTS.read_text(encoding="utf-8"))["threads"]]
    yield from (
        "",
        "## Jobs that ran out of memory",
        "",
        "*Fits narrowly* is a fit for the command's exit code and for searches: what is reserved at most in published runs would not fit.",
        "*Held out* are jobs that were found after the rules and terms that judge them. Wrong ones first, then narrow ones.",
        "",
        "| Jobs | It | Do not fit | Fit narrowly | Fit |",
        "|---|---|---|---|---|",
        *_counts(rows),
        "",
        *OPEN,
        "",
        "| Job | It | Peak GiB | Usable GiB | Estimate |",
        "|---|---|---|---|---|",
    )
    for row, found in sorted(rows, key=lambda each: (each[1].fits is each[0]["ran"], each[1].verdict != "fits narrowly")):
        wrong = f": wrong ({row['open']})" if "open" in row else ": wrong"
        said = f"{found.verdict}{'' if found.fits is row['ran'] or found.narrow is not None else wrong}"
        sizes = f"{found.peak_bytes / GIB:.1f} | {found.worst.usable_bytes / GIB:.1f}"
        yield f"| [{_named(row)}]({row['source']}) | {'ran' if row['ran'] else 'ran out'} | {sizes} | {said} |"


def _outside() -> Iterator[str]:
    """The table of memory outside torch's allocator, where a failure prints enough to know it."""
    yield from (
        "",
        "## Outside torch at a failure",
        "",
        "The device's capacity without what torch had reserved and what was free, and what the estimate counts there: context, NCCL,",
        "driver, buffers of HybridEP. The third has a graph of the whole step, and NVLink SHARP on in NCCL, which takes buffers for each",
        "communicator and which Bridge's launcher turns off; what is missing there is not priced.",
        "",
        "| Job | Measured GiB | Counted GiB |",
        "|---|---|---|",
    )
    for row in sorted((row for row in json.loads(REPORTS.read_text(encoding="utf-8"))["threads"] if "outside" in row), key=_outside_gib):
        counted = sum(item.bytes for item in estimate(row).budget.device.reserve)
        yield f"| [{row['name']}]({row['source']}) | {row['outside']:.2f} | {counted / GIB:.2f} |"


def _outside_gib(row: dict[str, Any]) -> float:
    return float(row["outside"])


def _counts(rows: list[tuple[dict[str, Any], megaplan.Estimate]]) -> Iterator[str]:
    """Verdicts by what the jobs did: of all, of those held out, and of those whose segments grow and do not."""
    held = [each for each in rows if each[0].get("held")]
    grown = [each for each in rows if _grows(each[1])]
    others = [each for each in rows if not _grows(each[1])]
    for name, some in (("all", rows), ("held out", held), ("segments grow", grown), ("segments do not grow", others)):
        for ran in (False, True):
            said = Counter(found.verdict for row, found in some if row["ran"] is ran)
            yield f"| {name} | {'ran' if ran else 'ran out'} | {said['does not fit']} | {said['fits narrowly']} | {said['fits']} |"


def _grows(found: megaplan.Estimate) -> bool:
    """True if torch's segments grow: torchtitan sets that itself."""
    host = found.job.spec.host
    return host.name == "torchtitan" or host.expands_segments


def _named(row: dict[str, Any]) -> str:
    return f"{row['name']} (held out)" if row.get("held") else str(row["name"])


def _pairs() -> Iterator[str]:
    """The section on what is reserved above what is allocated, from which the percentages are."""
    rows = json.loads(REPORTS.read_text(encoding="utf-8"))["pairs"]
    fitted = [row for row in rows if not row.get("held")]
    yield from (
        "",
        "## Reserved above allocated",
        "",
        "`host.fragmentation_percent` with expandable segments is the mean of these pairs, rounded: a fitted figure. Without graphs of",
        f"layers it is {_above(fitted, graphs=False)}, with them {_above(fitted, graphs=True)}. Two were found later and",
        f"are no part of it; with them it is {_above(rows, graphs=False)} without graphs. *Fits narrowly* reads the largest of all.",
        "",
        "| Run | Graphs of layers | Allocated GiB | Reserved GiB | Above % |",
        "|---|---|---|---|---|",
    )
    for row in rows:
        above = 100 * (row["reserved"] / row["allocated"] - 1)
        sizes = f"{row['allocated'] * GB / GIB:.2f} | {row['reserved'] * GB / GIB:.2f} | {above:.1f}"
        yield f"| [{_named(row)}]({row['source']}) | {'yes' if row['graphs'] else 'no'} | {sizes} |"


def _above(rows: list[dict[str, Any]], *, graphs: bool) -> str:
    shares = [100 * (row["reserved"] / row["allocated"] - 1) for row in rows if row["graphs"] is graphs]
    return f"{mean(shares):.1f} % ({min(shares):.1f} to {max(shares):.1f}, {len(shares)} runs)"


def estimate(row: dict[str, Any]) -> megaplan.Estimate:
    """The estimate of a row's launch or job file."""
    changes = [f"device.name={DEVICES.get(row['platform'], row['platform'])}", *row.get("sets", [])]
    if "job" in row:
        return megaplan.estimate(import_torchtitan(row["job"], "job.toml", changes, row["gpus"]).document)
    text = row["arguments"]
    name = "launch.json" if text.startswith("{") else "launch"
    return megaplan.estimate(import_megatron(text, name, changes, row["gpus"], environment=row["environment"]).document)


def _stages() -> Iterator[Report]:
    for row in json.loads(STAGES.read_text(encoding="utf-8"))["rows"]:
        for rank, measured in enumerate(row["peak_mib"]):
            more = {"pp_rank": rank, "month": row["month"]}
            stage = stage_of_launch(row["arguments"], row["gpus"], row["padded_vocab_size"], row["platform"], **more)
            yield Report(f"{row['name']}, stage {rank}", SIMUMAX, "allocated", measured * 2**20, memory(stage).peak)


def _study() -> Iterator[Report]:
    for model in json.loads(RUNS.read_text(encoding="utf-8"))["models"]:
        for run in model["runs"]:
            name = f"{model['model']}, recompute of {run['modules'].replace(' ', ' and ') or 'nothing'}"
            yield Report(name, STUDY, "allocated", run["peak_gb"] * GB, peak_gb(model, run) * GB)


def _groups(found: list[Report]) -> Iterator[tuple[str, list[Report]]]:
    """Reports by what was measured."""
    for kind in ("allocated", "after a step", "reserved", "device"):
        yield kind, [one for one in found if one.kind == kind]
    yield "allocated or reserved", [one for one in found if one.kind in ("allocated", "reserved")]
    yield "held out: allocated, or after a step", [one for one in found if one.held]
    yield "all", found


def page() -> str:
    """The page's text."""
    found = reports()
    lines = [HEAD, "| Measured | Figures | Mean error % | Worst % |", "|---|---|---|---|"]
    for name, some in _groups(found):
        errors = [one.error for one in some]
        lines.append(f"| {name} | {len(errors)} | {mean(map(abs, errors)):.2f} | {max(errors, key=abs):+.2f} |")
    lines.append("")
    lines += ["| Run | Measured GiB | | Estimate GiB | Error % | Suspected cause |", "|---|---|---|---|---|---|"]
    for one in found:
        sizes = f"{one.measured / GIB:.2f} | {one.kind} | {one.estimated / GIB:.2f} | {one.error:+.2f}"
        lines.append(f"| [{one.name}{' (held out)' if one.held else ''}]({one.source}) | {sizes} | {one.cause} |")
    return "\n".join([*lines, *_threads(), *_outside(), *_pairs()]) + "\n"


def main() -> int:
    """Write the page, or compare it."""
    return write_page(PAGE, page())


if __name__ == "__main__":
    sys.exit(main())
