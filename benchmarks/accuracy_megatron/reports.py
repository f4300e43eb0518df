"""Write docs/reference/public-reports.md: memory that others measured under Megatron-Core and published with their configuration.

python benchmarks/accuracy_megatron/reports.py [--check]     --check exits 1 if the page is out of date
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy_megatron.launches import DEVICES, stage_of_launch, stages_of_spec
from accuracy_megatron.recompute import GB, RUNS, peak_gb
from bridge_recipes.page import RESULT
from pages import write_page

import megaplan
from megaplan.hosts.megatron.peak import memory
from megaplan.importers.megatron.spec import import_megatron
from megaplan.importers.torchtitan.spec import import_torchtitan
from megaplan.spec.host import FRAGMENTATION_PERCENT

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
imported by `megaplan import megatron`, and the estimate is compared with what was published: the largest bytes that torch *allocated* or
*reserved*, those allocated *after a step* on the first rank, or those of the *device* as the driver shows them, including its context and
NCCL's buffers. Figures of a device are whole GiB, and their launches do not state the lengths of texts. The worst are first. No term was
derived from those *held out*.

Megatron-Bridge's cards call their figures GiB, and they are taken as 10⁹ bytes. They equal the numbers that its log prints: `report_memory`
of
`training/utils/train_utils.py` divides by 1.0e9 and keeps five digits, so that all ten figures above 100 end in 0 in their third decimal.
As GiB all eleven compared here would be above the estimate by 4 to 12 %, whatever model, sharding, tokens and recompute. In their
container Transformer Engine writes gradients over logits, as before release 2.18: with 2.18's fp32 gradients two would be 12 % high.
"""

OPEN = """Of the jobs that fit by the estimate, four have non-expandable *segments*. They needed 48 to 73 % more than the estimated
allocated memory; two of
them are said to have failed in Triton at the first forward, and the other two ran once segments grew. Three narrow ones, of the same
kind, needed 25 to 37 %. At the failure of one job torch prints 28 % reserved above allocated, with segments that do not grow.

Four have *graphs*. Two are of attention, Mamba and the router: without the router's graphs, or with less kept, they ran, and the estimate
of the job that ran is the same as of the one that ran out. The third has graphs of whole layers and ran out in their capture:
Transformer Engine's warm-up holds the outputs of every microbatch since 30 July 2026 (4e755d888), until pull request 3427. By that
source 42 GiB that stay, 74 GiB of activations in the warm-up and again in the graphs' pool, and 40 GiB of outputs meet there, 229 of 182
GiB. Launches do not say which Transformer Engine they have, and that sum would refuse two jobs that ran; so no bytes are priced for a
capture. The fourth has a graph of the whole step on B200, and ran out with micro-batches of 4 and of 2; the same job with one of 8 ran
on B300. About 2 GiB are missing for each microbatch of a step, whatever its size.

Two run under Megatron-FSDP with double *buffers*, and 17 GiB are missing in each. The estimate of the first is of the language model
alone; the second failed in NCCL, whose registered memory its buffers are in.

torchtitan's peaks include the percentage that it reserves, which is fitted to dense runs. A V100 and a card of 48 GB are judged by their
capacity, with another device's workspaces.

Two failures print the allocated memory. The GPT-2 job asked for 786 MiB in addition to 28.82 GiB at the loss of its first step, 29.59 GiB
in all; the estimate has 27.28 there, and is of a later Megatron. Llama 3.1 405B on GB300 had 210.1 GiB, in a graph of the whole step;
the estimate has 193.5 there.""".splitlines()
"""Lines on what the verdicts of jobs leave open."""
MARGINS = 0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 40, 50
"""Percents by which a peak might be raised before it is compared."""


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
    """The sections on jobs that ran out of memory, on the same jobs changed so that they ran, and on what a margin would cost."""
    rows = [(row, estimate(row)) for row in json.loads(REPORTS.read_text(encoding="utf-8"))["threads"]]
    yield from (
        "",
        "## Jobs that ran out of memory",
        "",
        "*Fits narrowly* counts as a fit for the command's exit code and for searches, but the largest reserved memory in published runs",
        "would not fit. *Held out* are the jobs that were found last. They were judged before three terms were added: NCCL's buffers for",
        "an all-to-all, the memory that non-expandable segments keep from the steps before a capture, and the permanent buffers of",
        "Megatron-FSDP. The last of these terms was derived from three of these jobs. Wrong verdicts are first, then narrow ones.",
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
        yield f"| [{_named(row, 'last')}]({row['source']}) | {'ran' if row['ran'] else 'ran out'} | {sizes} | {said} |"
    yield from _margins(rows)


def _margins(rows: list[tuple[dict[str, Any], megaplan.Estimate]]) -> Iterator[str]:
    """The table of jobs that a margin would refuse: those that ran out, those that ran, and recipes."""
    recipes = [each for each in json.loads(RESULT.read_text(encoding="utf-8")) if each["peak"] is not None]
    yield from (
        "",
        "## What a margin would cost",
        "",
        "Jobs and [recipes](recipes-fit.md) that would be refused if every peak, or only that of segments that do not grow, were raised by",
        "a percentage. A margin that refuses nine in ten of the jobs that ran out of memory would also refuse most of those that ran:",
        "the missing memory is in a few jobs, and not a share of all. So no margin is added.",
        "",
        "| Percent | Ran out | Ran out, held out | Ran | Recipes | Ran out, only segments that do not grow | Ran, only those |",
        "|---|---|---|---|---|---|---|",
    )
    for margin in MARGINS:
        cells = [
            _refused(rows, margin, lambda row, _: not row["ran"] and not row.get("last")),
            _refused(rows, margin, lambda row, _: not row["ran"] and row.get("last", False)),
            _refused(rows, margin, lambda row, _: row["ran"]),
            f"{sum(each['peak'] * (100 + margin) > 100 * each['usable'] for each in recipes)} of {len(recipes)}",
            _refused(rows, margin, lambda row, _: not row["ran"], spared=_grows),
            _refused(rows, margin, lambda row, _: row["ran"], spared=_grows),
        ]
        yield f"| {margin} | {' | '.join(cells)} |"


def _refused(
    rows: list[tuple[dict[str, Any], megaplan.Estimate]],
    margin: int,
    counts: Callable[[dict[str, Any], megaplan.Estimate], bool],
    spared: Callable[[megaplan.Estimate], bool] = lambda _: False,
) -> str:
    """The number of some jobs that do not fit with a margin; estimates that are spared have none."""
    some = [found for row, found in rows if counts(row, found)]
    refused = [found for found in some if found.peak_bytes * (100 + margin * (not spared(found))) > 100 * found.worst.usable_bytes]
    return f"{len(refused)} of {len(some)}"


def _outside() -> Iterator[str]:
    """The table of memory outside torch's allocator, where a failure prints enough to know it."""
    yield from (
        "",
        "## Outside torch at a failure",
        "",
        "The table compares the device's capacity minus torch's reserved memory and the free memory with what the estimate counts",
        "outside torch: context, NCCL, driver, and buffers of HybridEP and of an all-to-all. Jobs of several nodes have 2.5 to 3.9 GiB "
        "more than is counted; their",
        "communicators are more than the four that the device's item of NCCL has. The largest has a graph of the whole step, and NVLink",
        "SHARP on in NCCL, which by its source takes 384 MiB for each communicator of eight B300 that reduces over it, and 256 MiB of",
        "eight H100. No measurement of that is published, Bridge's launcher turns it off, and it is not priced.",
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
    """Verdicts by what the jobs did: of those found before the last terms, of the others before and with them, and by segments."""
    said = [(row, found.verdict) for row, found in rows]
    last = [row for row, _ in rows if row.get("last")]
    groups = {
        "found first": [(row, verdict) for row, verdict in said if not row.get("last")],
        "held out, as judged when found": [(row, row["before"]) for row in last],
        "held out": [(row, verdict) for row, verdict in said if row.get("last")],
        "all whose segments grow": [(row, found.verdict) for row, found in rows if _grows(found)],
        "all whose segments do not grow": [(row, found.verdict) for row, found in rows if not _grows(found)],
    }
    for name, some in groups.items():
        for ran in (False, True):
            number = Counter(verdict for row, verdict in some if row["ran"] is ran)
            yield f"| {name} | {'ran' if ran else 'ran out'} | {number['does not fit']} | {number['fits narrowly']} | {number['fits']} |"


def _grows(found: megaplan.Estimate) -> bool:
    """True if torch's segments grow: torchtitan sets that itself."""
    host = found.job.spec.host
    return host.name == "torchtitan" or host.expands_segments


def _named(row: dict[str, Any], held: str = "held") -> str:
    return f"{row['name']} (held out)" if row.get(held) else str(row["name"])


def _pairs() -> Iterator[str]:
    """The section on what is reserved above what is allocated, from which the percentages are."""
    rows = json.loads(REPORTS.read_text(encoding="utf-8"))["pairs"]
    fitted = [row for row in rows if not row.get("held")]
    last = [row for row in rows if row.get("last")]
    yield from (
        "",
        "## Reserved above allocated",
        "",
        f"The default of `host.fragmentation_percent`, {FRAGMENTATION_PERCENT}, is a fitted figure: of the pairs that are not held out the",
        f"mean without graphs of layers is {_above(fitted, graphs=False)}, with them {_above(fitted, graphs=True)},",
        "and of 19 runs by SimuMax, whose segments do not grow, 4.5 % (0.7 to 9.3, 152 ranks).",
        f"Of the pairs found last the default percentage misses {_missed(last)} on average,",
        f"of every third of them, which was held back, {_missed([row for row in last if row.get('back')])}:",
        "it is not a model of a run's allocator.",
        "",
        f"*Fits narrowly* reads the largest of runs whose segments grow, {_most(rows, grows=True):.1f} %, and of those whose do not,",
        f"{_most(rows, grows=False):.1f} %. Runs with *room*, on devices of which a fifth or more was left, do not count: torch never had",
        "to release what it keeps for use again.",
        "",
        "| Run | Segments grow | Graphs of layers | Room | Allocated GiB | Reserved GiB | Above % |",
        "|---|---|---|---|---|---|---|",
    )
    for row in rows:
        sizes = f"{row['allocated'] * GB / GIB:.2f} | {row['reserved'] * GB / GIB:.2f} | {above(row):.1f}"
        grows = {True: "yes", False: "no", None: "not said"}[row.get("grows")]
        words = f"{grows} | {'yes' if row['graphs'] else 'no'} | {'room' if row.get('room') else ''}"
        yield f"| [{_named(row)}]({row['source']}) | {words} | {sizes} |"


def above(pair: dict[str, Any]) -> float:
    """Percent that a run reserved above what it allocated."""
    return 100 * (pair["reserved"] / pair["allocated"] - 1)


def _missed(pairs: list[dict[str, Any]]) -> str:
    """The mean error of the default percentage, in points."""
    errors = [abs(above(pair) - FRAGMENTATION_PERCENT) for pair in pairs]
    return f"{mean(errors):.1f} points ({min(errors):.1f} to {max(errors):.1f}, {len(errors)} runs)"


def _most(rows: list[dict[str, Any]], *, grows: bool) -> float:
    return max(above(row) for row in rows if row.get("grows") is grows and not row.get("room"))


def _above(rows: list[dict[str, Any]], *, graphs: bool) -> str:
    shares = [above(row) for row in rows if row["graphs"] is graphs]
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
