"""Replay Megatron-LM's published measurements and write docs/reference/accuracy-megatron.md.

python benchmarks/accuracy_megatron/run.py [--check]     with --check: nothing written, exit 1 if the page would change
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from published import published_bytes

from megaplan.hosts.megatron.arguments import job_from_arguments, refusals
from megaplan.hosts.megatron.peak import memory

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDENS = ROOT / "tests/megaplan/hosts/megatron/goldens.json"
PAGE = ROOT / "docs/reference/accuracy-megatron.md"
MIB = 2**20
SKEW = 1.25
CAUSES = {
    "1node": "routing: the rows that reached the measured rank's two experts are not published",
    "ep8": "routing: the rows that reached the measured rank's expert are not published",
    "selective_recompute": "temporaries of recomputed latent attention in backward; routing",
    "a2a_ovlp": "routing; buffers of overlapped expert communication",
    "mtp": "scales and transposes of fp8 weights in the prediction module; routing",
    "7b": "this platform's fused attention keeps one more copy of the queries: 32 MiB in each of 32 layers",
    "fp8": "activations that fp8 kernels keep in 8 bits are counted in 16",
    "etp2": "routing over experts that are sharded too",
    "8experts": "routing: the rows that reached the measured rank's experts are not published",
    "4experts": "routing: the rows that reached the measured rank's experts are not published",
}


@dataclass(frozen=True, slots=True)
class Replay:
    """One measured run; errors in percent of the measurement, negative where the estimate is under."""

    name: str
    family: str
    platform: str
    phase: str
    after_step: float
    peak: float
    skewed: float | None
    published: float | None
    measured_mib: tuple[float, float]


def replay(row: dict[str, Any]) -> Replay:
    """Price one run."""
    job = job_from_arguments(row["arguments"], row["gpus"], row["padded_vocab_size"], row["platform"])
    found = memory(job)

    def error(estimate: float, key: str) -> float:
        return 100 * (estimate / row[key] - 1)

    skewed = None
    if job.moe is not None:
        skewed = error(memory(replace(job, moe=replace(job.moe, routing_skew=SKEW))).peak, "peak_bytes")
    published = published_bytes(job, row["arguments"])
    return Replay(
        name=row["name"].partition("/")[2],
        family="MoE hybrid" if job.hybrid and job.moe else "hybrid" if job.hybrid else "MoE" if job.moe else "dense",
        platform=row["platform"].removeprefix("dgx_"),
        phase=found.peak_phase,
        after_step=error(found.after_step, "after_step_bytes"),
        peak=error(found.peak, "peak_bytes"),
        skewed=skewed,
        published=None if published is None else error(published, "peak_bytes"),
        measured_mib=(row["after_step_bytes"] / MIB, row["peak_bytes"] / MIB),
    )


def page() -> str:
    """The page."""
    rows = json.loads(GOLDENS.read_text(encoding="utf-8"))["rows"]
    stated = [row for row in rows if row["gpus"] and row["padded_vocab_size"]]
    refused = [(row, why) for row in stated if (why := refusals(row["arguments"]))]
    done = [replay(row) for row in stated if not refusals(row["arguments"])]
    lines = [
        "# Accuracy for Megatron-Core",
        "",
        "`make accuracy-megatron` writes this page. Megatron-LM publishes what torch had allocated on the last rank of",
        "its functional tests, after a step and at the largest since the start. Of the",
        f"{len(rows)} runs in the data {len(stated)} state their GPU count and vocabulary; {len(done)} are priced, {len(refused)} refused.",
        "Errors are percent of the measurement, negative where the estimate is under. There is no multiplier. Most terms are",
        "tensors and workspaces read in the sources; five are inferred from measurements of this kind or approximate: what",
        "a pipeline leaves after a step and its second attention mask, the workspace of overlapped expert communication,",
        "the router's 16 bytes a token and expert, a prediction module's 16 bytes a token and channel, and flash attention",
        "where a run leaves the backend to Transformer Engine. So these runs are no held-out test of those terms.",
        "The peak is the largest of the whole run. Routing is taken as balanced; the column after it takes 1.25 times the",
        "even share, to show what routing weighs. The last column is Megatron-LM's own estimator by its published formulas,",
        "which takes no hybrids and prices the first stage. The causes of misses are suspected, none is traced.",
        "",
        "| Family | Runs | After step, mean | worst | Peak, mean | worst | Megatron's own, mean | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in (*dict.fromkeys(one.family for one in done), "all"):
        lines.append(_summary(family, [one for one in done if family in (one.family, "all")]))
    lines += ["", f"Median signed error of the peak: {median(one.peak for one in done):+.2f} %.", "", "## Runs", ""]
    lines += [
        "| Run | Platform | After step, MiB | error | Peak, MiB | error | error at skew 1.25 | Phase | Megatron's own |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in done:
        skewed, own = (f"{value:+.2f}" if value is not None else "–" for value in (one.skewed, one.published))
        cells = (
            one.name,
            one.platform,
            f"{one.measured_mib[0]:,.1f}",
            f"{one.after_step:+.2f}",
            f"{one.measured_mib[1]:,.1f}",
            f"{one.peak:+.2f}",
        )
        lines.append(f"| {' | '.join((*cells, skewed, one.phase, own))} |")
    lines += ["", "## Misses above 1 %", "", "| Run | After step | Peak | Suspected cause |", "|---|---|---|---|"]
    for one in done:
        if max(abs(one.after_step), abs(one.peak)) > 1:
            cause = next((why for key, why in CAUSES.items() if key in one.name), "not known")
            lines.append(f"| {one.name} ({one.platform}) | {one.after_step:+.2f} | {one.peak:+.2f} | {cause} |")
    lines += ["", "## Refused", "", "| Run | Why |", "|---|---|"]
    lines += [f"| {row['name'].partition('/')[2]} ({row['platform'].removeprefix('dgx_')}) | {'; '.join(why)} |" for row, why in refused]
    return "\n".join(lines) + "\n"


def _summary(family: str, some: list[Replay]) -> str:
    own = [one.published for one in some if one.published is not None]
    worst = [f"{max((getattr(one, key) for one in some), key=abs):+.2f}" for key in ("after_step", "peak")]
    means = [f"{mean(abs(getattr(one, key)) for one in some):.2f}" for key in ("after_step", "peak")]
    theirs = (f"{mean(map(abs, own)):.1f}", f"{max(own, key=abs):+.1f}") if own else ("–", "–")
    return f"| {' | '.join((family, str(len(some)), means[0], worst[0], means[1], worst[1], *theirs))} |"


def main() -> int:
    """Write the page, or compare it."""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
