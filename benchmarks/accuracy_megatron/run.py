"""Replay published measurements of Megatron-Core, by NVIDIA and by SimuMax, and write docs/reference/accuracy-megatron.md.

python benchmarks/accuracy_megatron/run.py [--check]     with --check: nothing written, exit 1 if the page would change
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launches import graphed, offloaded, refusals, skewed, stage_of_launch, stale, unbalanced
from pages import write_page
from published import published_bytes
from recompute import recompute_lines
from stages import stage_lines

from megaplan.budget.fit import largest_skew
from megaplan.hosts.megatron.peak import MegatronMemory, memory
from megaplan.hosts.megatron.run import MegatronStage

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDENS = ROOT / "tests/megaplan/hosts/megatron/goldens.json"
PAGE = ROOT / "docs/reference/accuracy-megatron.md"
MIB = 2**20
SPREAD = Path(__file__).parent / "routing.json"
SPREAD_MODEL = "te_ep8_resume"
BAR = 5
OFFLOADED = "how many inputs are on the device at once is approximate: the last of each module, and one on its way"
GRAPHED = "torch counts what the pool of graphs holds between replays as free, and it is what the device must have"
ROUTING = "routing: the rows that reached the measured rank are not published"
CAUSES = {
    "zp_z3": "Megatron-FSDP's gathered parameters at the loss: as much as all layers but two have",
    "tp4_pp": "perhaps blocks up to 1 MiB larger than their tensors, which torch's allocator does not split: tensors of 1 to 4 MiB",
    "a2a_ovlp": "buffers of overlapped expert communication; routing",
    "lightning": ROUTING,
    "mtp": "scales and transposes of fp8 weights in the prediction module; routing",
    "fp8": "activations that fp8 kernels keep in 8 bits are counted in 16",
    "8experts": ROUTING,
    "4experts": ROUTING,
}


@dataclass(frozen=True, slots=True)
class Replay:
    """One measured run; errors in percent of the measurement, negative where the estimate is low.

    Attributes:
        peak: Estimated peak of the second step with balanced routing.
        run_peak: Estimated peak of the whole run with balanced routing.
        outside: Distance of the second step's measured peak from the quoted range; 0 inside it.
        run_outside: The same of the whole run's.
        implied_skew: Rows of the measured rank over its even share, if only routing misses; None without experts.
        ranged: Reason why no single number is quoted; None if one is.
        experts: Number of the rank's experts; 0 without.
    """

    name: str
    family: str
    platform: str
    gpus: int
    phase: str
    after_step: float
    peak: float
    run_peak: float
    outside: float
    run_outside: float
    implied_skew: float | None
    ranged: str | None
    experts: int
    published: float | None
    measured_mib: tuple[float, float, float]
    quoted_mib: tuple[float, ...]


def replay(row: dict[str, Any]) -> Replay:
    """Price one run."""
    stage = stage_of_launch(
        row["arguments"],
        row["gpus"],
        row["padded_vocab_size"],
        row["platform"],
        environment=row["environment"],
        month=row["measured"][:7],
    )
    found, spec, moe = memory(stage), stage.spec, stage.spec.model.moe
    ranged = unbalanced(row["arguments"])
    ends = [found.peak]
    if moe is not None and spec.mesh.ep > 1 and moe.capacity_factor is None:
        if ranged:
            ends = [memory(skewed(stage, 0)).peak]
        ends.append(memory(skewed(stage, largest_skew(spec.mesh.ep, moe.num_experts, moe.top_k))).peak)

    def outside(key: str) -> float:
        """Signed distance from the quote."""
        measured = row[key]
        return 100 * (max(ends[0] - measured, 0) + min(ends[-1] - measured, 0)) / measured

    published = published_bytes(stage, row["arguments"])
    return Replay(
        name=row["name"].partition("/")[2],
        family=" ".join(["MoE"] * (moe is not None) + ["hybrid"] * (spec.host.model == "hybrid")) or "dense",
        platform=row["platform"].removeprefix("dgx_"),
        gpus=row["gpus"],
        phase=found.peak_phase,
        after_step=_percent(found.after_step, row["after_step_bytes"]),
        peak=_percent(found.peak, row["peak_bytes"]),
        run_peak=_percent(found.peak, row["run_peak_bytes"]),
        outside=outside("peak_bytes"),
        run_outside=outside("run_peak_bytes"),
        implied_skew=_implied_skew(row, stage, found),
        ranged=ranged,
        experts=moe.num_experts // spec.mesh.ep if moe else 0,
        published=None if published is None else _percent(published, row["peak_bytes"]),
        measured_mib=(row["after_step_bytes"] / MIB, row["peak_bytes"] / MIB, row["run_peak_bytes"] / MIB),
        quoted_mib=tuple(end / MIB for end in ends),
    )


def _percent(estimate: float, measured: float) -> float:
    return 100 * (estimate / measured - 1)


def _implied_skew(row: dict[str, Any], stage: MegatronStage, balanced: MegatronMemory) -> float | None:
    """Routing skew that explains the second step's peak over the memory after it."""
    if stage.spec.model.moe is None:
        return None
    double = memory(skewed(stage, 2.0))
    even_share = (double.peak - double.after_step) - (balanced.peak - balanced.after_step)
    missing = (row["peak_bytes"] - row["after_step_bytes"]) - (balanced.peak - balanced.after_step)
    return 1 + missing / even_share if even_share else None


def page() -> str:
    """The page."""
    rows = json.loads(GOLDENS.read_text(encoding="utf-8"))["rows"]
    stated = [row for row in rows if row["gpus"] and row["padded_vocab_size"]]
    refused = [(row, why) for row in stated if (why := refusals(row["arguments"], row["gpus"], row["padded_vocab_size"]))]
    taken = [row for row in stated if not refusals(row["arguments"], row["gpus"], row["padded_vocab_size"])]
    from_graphs = [(row, GRAPHED) for row in taken if graphed(row["arguments"])]
    on_host = [(row, OFFLOADED) for row in taken if offloaded(row["arguments"])]
    priced = [row for row in taken if not graphed(row["arguments"]) and not offloaded(row["arguments"])]
    older = [(row, why) for row in priced if (why := stale(row)) and not unbalanced(row["arguments"])]
    replayed = [replay(row) for row in priced if unbalanced(row["arguments"]) or stale(row) is None]
    done, ranged = [one for one in replayed if not one.ranged], [one for one in replayed if one.ranged]
    counts = (len(rows), len(stated), len(done), len(ranged), len(older), len(from_graphs), len(on_host), len(refused))
    lines = [*_introduction(*counts), *_imported(rows), *_tables(done), *stage_lines(), *recompute_lines(), *_ranged(ranged)]
    lines += ["", "## Misses above 1 %", "", "| Run | After step | Peak, balanced | Suspected cause |", "|---|---|---|---|"]
    for one in done:
        if max(abs(one.after_step), abs(one.peak)) > 1:
            cause = next((why for key, why in CAUSES.items() if key in one.name), "not known")
            lines.append(f"| {one.name} ({one.platform}) | {one.after_step:+.2f} | {one.peak:+.2f} | {cause} |")
    lines += [
        *_uncounted("Measured on older software", older),
        *_uncounted("With CUDA graphs", from_graphs),
        *_uncounted("With activations on the host", on_host),
        "",
        "## Refused",
        "",
        "| Run | Why |",
        "|---|---|",
    ]
    lines += [
        f"| {row['name'].partition('/')[2]} ({row['platform'].removeprefix('dgx_')}) | {_cell('; '.join(why))} |" for row, why in refused
    ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """A text in a cell of a table."""
    return text.replace("|", r"\|").replace("\n", "; ")


def _uncounted(title: str, some: list[tuple[dict[str, Any], str]]) -> list[str]:
    """Runs that no summary counts, whatever their errors are."""
    lines = ["", f"## {title}", "", *_header("Run, Platform, Why, After step, Peak")]
    for row, why in some:
        one = replay(row)
        lines.append(f"| {one.name} | {one.platform} | {why} | {one.after_step:+.2f} | {one.peak:+.2f} |")
    return lines


def _introduction(runs: int, stated: int, priced: int, ranged: int, older: int, from_graphs: int, on_host: int, refused: int) -> list[str]:
    return [
        "# Accuracy for Megatron-Core",
        "",
        "`make accuracy-megatron` writes this page. Megatron-LM publishes torch's allocated memory on the last",
        "rank of its functional tests: after each step, and the maximum since the start. Of the",
        f"{runs} runs in the data {stated} state their GPU count and vocabulary; {priced} are priced, {ranged} have only a range because",
        f"nothing in them balances routing, {older} were measured on older software (a matter of their date, not",
        f"of their error), {from_graphs} ran from CUDA graphs, {on_host} had activations on the host, and {refused} are refused.",
        "The errors",
        "here are those of the priced runs.",
        "Errors are percent of the measurement, negative where the estimate is low. There is no multiplier. Most terms are",
        "tensors and workspaces read in the sources; five are approximate or inferred from measurements of this kind:",
        "tensors that interleaving leaves after a step and a pipeline's second attention mask; the workspace of overlapped expert",
        "communication; the router's 16 bytes per token and expert; a prediction module's 16 bytes per token and channel; and flash",
        "attention if a run leaves the choice of backend to Transformer Engine. These runs are therefore not a held-out test of",
        "those terms.",
        "",
        "*After step* and *peak* are of the second step, the first with all of the optimizer's state; *peak of the run* is the",
        "largest of all steps. Runs in fp16 skip their first steps until the loss scale fits: their values are those at the end",
        "of the run.",
        "All three assume balanced routing. *Outside* is the distance of the measurement from the range that an estimate quotes. Without",
        "experts the range is a single figure, and *outside* is its error. With experts spread over ranks an estimate always states",
        "two figures: one for balanced routing, and one for the most tokens that routing can send to one rank (every token chooses as",
        "many of that rank's experts as it can). A measurement between the two is 0 outside. That range is wide, so 0 outside proves "
        "little;",
        "*peak* shows how well balanced routing alone predicts. The last column is Megatron-LM's own estimator by its published",
        "formulas, which accepts no hybrids and prices the first stage.",
        "",
    ]


def _imported(rows: list[dict[str, Any]]) -> list[str]:
    """Text on the number of runs that the import accepts; runs without a stated vocabulary get their tokenizer's, or a thousand tokens."""
    taken = sum(not refusals(row["arguments"], row["gpus"], row["padded_vocab_size"] or 1024) for row in rows)
    return [
        "Every run here is imported as a user would: `megaplan import megatron` reads its launch arguments, with `--gpus` and",
        "the device, and",
        f"the resulting spec is priced. The command accepts {taken} of the {len(rows)} runs in the data.",
        "",
    ]


def _tables(done: list[Replay]) -> list[str]:
    lines = [
        *_header(
            "Family, Runs, After step mean, worst, Peak mean, worst, Peak of the run mean, worst, Outside worst, of the run worst, "
            "Megatron's own mean, worst"
        )
    ]
    for family in (*dict.fromkeys(one.family for one in done), "all"):
        lines.append(_summary(family, [one for one in done if family in (one.family, "all")]))
    past = [f"{one.name} on {one.platform} ({one.peak:+.2f})" for one in done if abs(one.peak) > BAR]
    lines += [
        "",
        f"Median signed error of the peak: {median(one.peak for one in done):+.2f} %.",
        f"Past {BAR} % with balanced routing: {', '.join(past) or 'none'}.",
        "The largest growth over the steps of a run is that of the MoE hybrid, whose balancing starts from zero: its peak rises until "
        "step 17.",
        "",
        "## Runs",
        "",
    ]
    lines += _header(
        "Run, Platform, After step MiB, error, Peak MiB, error, Peak of the run MiB, error, Quoted MiB, Outside, of the run, Phase, "
        "Megatron's own"
    )
    for one in done:
        errors = (one.after_step, one.peak, one.run_peak)
        pairs = (cell for size, error in zip(one.measured_mib, errors, strict=True) for cell in (f"{size:,.1f}", f"{error:+.2f}"))
        quoted = " – ".join(f"{size:,.0f}" for size in one.quoted_mib)
        own = f"{one.published:+.2f}" if one.published is not None else "–"
        cells = (one.name, one.platform, *pairs, quoted, _distance(one.outside), _distance(one.run_outside), one.phase, own)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _header(names: str) -> list[str]:
    cells = names.split(", ")
    return [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]


def _distance(value: float) -> str:
    return f"{value:+.2f}" if value else "0"


def _ranged(some: list[Replay]) -> list[str]:
    """The runs without a single number, what balanced routing would have said of them, and how far random first weights spread rows."""
    (why,) = {one.ranged for one in some}
    lines = [
        "",
        "## Ranged",
        "",
        f"`{why}`.",
        "The random initial weights therefore decide the rows of a rank, and any number between none and all is possible.",
        "*Balanced* is the error of the estimate for even routing; *rows* is the ratio of the measured rank's rows to the even",
        "share that would explain the gap between peak and after-step bytes.",
        "",
    ]
    lines += _header("Run, Platform, GPUs, After step MiB, error, Peak MiB, Balanced, Quoted MiB, Outside, of the run, Rows")
    for one in sorted(some, key=lambda one: (one.platform, one.gpus, one.name)):
        after, peak = one.measured_mib[:2]
        cells = [one.name, one.platform, str(one.gpus), f"{after:,.1f}", f"{one.after_step:+.2f}", f"{peak:,.1f}", f"{one.peak:+.2f}"]
        cells += [" – ".join(f"{size:,.0f}" for size in one.quoted_mib), _distance(one.outside), _distance(one.run_outside)]
        lines.append(f"| {' | '.join([*cells, f'{one.implied_skew:.3f}'])} |")
    return [*lines, *_spread(some)]


def _spread(some: list[Replay]) -> list[str]:
    found = json.loads(SPREAD.read_text(encoding="utf-8"))
    drawn = {row["experts"]: (row["least"], row["most"]) for row in found["ranks"]}
    same_model = [one for one in some if SPREAD_MODEL in one.name]
    within = [one for one in same_model if drawn[one.experts][0] <= (one.implied_skew or 0) <= drawn[one.experts][1]]
    lines = [
        "",
        f"{len(same_model)} of them are runs of one model of 12 layers, with Adam or with Muon (whose state is replicated or",
        "divided among ranks), on two platforms and two GPU counts. Their rows are the same under every optimizer and differ with the "
        "platform and the GPU count,",
        "both of which decide the random first weights: so Newton–Schulz's scratch and gathered matrices are not the cause. A",
        "rank has one of 8 experts on 8 GPUs and two on 4. `benchmarks/accuracy_megatron/routing.py` draws the first weights of that model",
        f"{found['models']} times and counts the rows of {found['tokens']:,} tokens of Zipf's law over all layers:",
        f"{len(within)} of the {len(same_model)} are in the range that it draws. The other run, with two stages and four experts",
        "per rank, is",
        "not; dense runs on as many stages are up to 0.8 % low too.",
        "",
    ]
    lines += _header("Experts a rank, Ranks drawn, Rows over the even share: least, 5 %, 95 %, most, Standard deviation")
    for row in found["ranks"]:
        cells = (str(row["experts"]), str(row["count"]), *(f"{row[key]:.3f}" for key in ("least", "low", "high", "most", "deviation")))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _summary(family: str, some: list[Replay]) -> str:
    own = [one.published for one in some if one.published is not None]
    cells = [family, str(len(some))]
    for key in ("after_step", "peak", "run_peak"):
        errors = [getattr(one, key) for one in some]
        cells += [f"{mean(map(abs, errors)):.2f}", f"{max(errors, key=abs):+.2f}"]
    cells += [_distance(max((getattr(one, key) for one in some), key=abs)) for key in ("outside", "run_outside")]
    cells += [f"{mean(map(abs, own)):.1f}", f"{max(own, key=abs):+.1f}"] if own else ["–", "–"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Write the page, or compare it."""
    return write_page(PAGE, page())


if __name__ == "__main__":
    sys.exit(main())
