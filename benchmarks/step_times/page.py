"""The generated page of errors: docs/reference/accuracy-time.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from step_times import folds
from step_times.folds import Array, Errors
from step_times.rows import FRAMEWORKS, Row, release_of, spec_path
from step_times.specs import device_name

CAUSES = {
    ("bridge", "gpt-oss-120b"): "sinks, clamped activation and biases: kernels changed from release to release, and one table repeats one configuration 1.6 times apart",
    ("bridge", "qwen3-30b-a3b"): "host-bound casts of every expert: how many of them a release fuses is not published",
    ("bridge", "qwen3-235b-a22b"): "exchange over nodes by different dispatchers, with and without overlap",
    ("bridge", "deepseek-v3"): "full-iteration graphs and delayed weight gradients hide more than is modelled; routing limited to nodes under NCCL all-to-all",
    ("bridge", "nemotron3-super"): "tensor-parallel Mamba and latent experts serialise more than is modelled",
    ("bridge", "llama3-405b"): "which layers stay in bf16 under nvfp4 is not published",
    ("nemo", "grok1-314b"): "token drop, and experts one after another in early releases",
    ("nemo", "llama3-8b"): "fine-tuning rows may be packed; small products run nearer to boost clocks",
    ("automodel", "nemotron3-super"): "which blocks are checkpointed is not stated",
    ("torchtitan", "llama3-405b"): "ring attention over long sequences; schedule and overlap of the pipeline are not stated",
    ("torchtitan", "llama3-8b"): "compile flag or power limit of some rows is not stated; ring attention over long sequences",
    ("nanotron", "nt-1.34b"): "unbucketed gradients over the adapters of 256 to 512 devices, one microbatch a step",
    ("nanotron", "nt-80b"): "tensor groups of 16 over nodes",
    ("nanotron", "nt-8.86b"): "unbucketed gradients over nodes, few microbatches",
    ("mcore-ci", "gpt3-7b"): "deterministic kernels",
    ("llm-foundry", "mpt-30b"): "attention of 2023 at 8,192 tokens",
    ("llm-foundry", "mpt-70b"): "memory was nearly full: allocations retry",
}
"""Why rows of a framework and model stay wrong, where a cause is known."""
WRONG = 0.15


def text(rows: Sequence[Row], anomalies: Sequence[Row], own: Array, blind: Array, foreign: Array) -> str:
    """The whole page."""
    lines = [
        "# Accuracy of step times",
        "",
        "Written by `python benchmarks/step_times/fit.py ROWS.json --page docs/reference/accuracy-time.md`. Errors are |predicted / measured − 1|.",
        "",
        f"{len(rows)} published steps of {len({row['framework'] for row in rows})} frameworks on {len({row['device'] for row in rows})} devices;",
        f"{len(anomalies)} more are anomalies of their tables, and are in no figure: {_anomalies(anomalies)}.",
        "",
        f"**Cross-validated**: {folds.NUM_FOLDS} folds; a fold's rows are predicted by constants fitted to the others, and no framework, model and device stand on both sides.",
        "The terms of the model and their form were chosen while looking at all rows but those of the groups held back (below); only the constants are blind.",
        "",
        *_summary(rows, own, blind),
        "",
        "## How rows become workloads",
        "",
        *_paths(rows),
        "",
        "## Beside models without terms, and the noise",
        "",
        *_nulls(rows, blind),
        "",
        "## A device or framework that no row has",
        "",
        "The same rows, predicted by constants fitted without their device, and without their framework, whichever is farther off: the interval of an uncalibrated time.",
        "",
        *_table("", {"all": folds.errors(foreign), **folds.by(rows, foreign, lambda row: row["family"])}),
        "",
        "## Intervals",
        "",
        "Measured over predicted time: the middle 80 % of the cross-validated rows of a family. `covered` is the share of a fold's rows inside the interval that the other folds give.",
        "",
        *_intervals(rows, blind, foreign),
        "",
        "## Ranking of layouts",
        "",
        *_ranking(rows, blind),
        "",
    ]
    for title, key in _KEYS:
        lines += [f"## Cross-validated, by {title}", "", *_table(title, folds.by(rows, blind, key)), ""]
    lines += ["## What stays wrong", "", *_wrong(rows, blind), "", "## Every row, worst first", "", *_rows(rows, own, blind), ""]
    return "\n".join(lines)


def framework(row: Row) -> str:
    """The framework's name in the data file."""
    return FRAMEWORKS.get(row["framework"], row["framework"])


_KEYS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("device and dtype", lambda row: f"{device_name(row)}, {row['precision']}"),
    ("family and dtype", lambda row: f"{row['family']}, {row['precision']}"),
    ("framework", framework),
    ("release", lambda row: f"{framework(row)} {release_of(row) or ''}".strip()),
    ("group held back", lambda row: "held back" if folds.is_held_back(row) else "seen while the terms were chosen"),
)


def _cells(found: Errors) -> str:
    return f"{found.rows} | {100 * found.median:.1f} | {100 * found.p90:.1f} | {100 * found.worst:.0f} | {100 * found.bias:+.1f}"


def _table(title: str, found: dict[str, Errors]) -> list[str]:
    head = [f"| {title} | rows | median % | p90 % | worst % | bias % |", "|---|---:|---:|---:|---:|---:|"]
    return head + [f"| {name} | {_cells(each)} |" for name, each in found.items()]


def _summary(rows: Sequence[Row], own: Array, blind: Array) -> list[str]:
    simumax = np.array([row["framework"] == "mcore-plain" for row in rows])
    lines = ["| | rows | cross-validated: median % | p90 % | worst % | bias % | in sample: median % | p90 % |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    parts: list[tuple[str, Array]] = [("all", np.ones(len(rows), bool))]
    parts += [(name, np.array([row["family"] == name for row in rows])) for name in ("dense", "moe", "hybrid")]
    for name, here in [*parts, ("SimuMax's measured B200 runs", simumax)]:
        inside = folds.errors(own[here])
        lines.append(f"| {name} | {_cells(folds.errors(blind[here]))} | {100 * inside.median:.1f} | {100 * inside.p90:.1f} |")
    return lines


def _paths(rows: Sequence[Row]) -> list[str]:
    by_spec = [row for row in rows if spec_path(row) is None]
    reasons: dict[str, int] = {}
    for row in rows:
        reason = spec_path(row)
        if reason is not None:
            reasons[reason] = reasons.get(reason, 0) + 1
    lines = [
        f"{len(by_spec)} of {len(rows)} rows are written as a spec, and the spec gives the workload (`megaplan.cost.step.from_spec`), as for users; the framework's facts come beside it.",
        "The others need words that specs do not have yet. They are read as the same typed workload directly (`benchmarks/step_times/rows.py`); a row counts under the first reason that it has:",
        "",
        "| reason | rows |",
        "|---|---:|",
    ]
    return lines + [f"| {reason} | {count} |" for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1])]


def _nulls(rows: Sequence[Row], blind: Array) -> list[str]:
    found = {"this model, cross-validated": folds.errors(blind)}
    found |= {name: folds.errors(each) for name, each in folds.null_models(rows).items()}
    lines = _table("", found)
    for across, name in ((False, "the same release"), (True, "any release")):
        pairs = folds.repeats(rows, across_releases=across)
        lines += ["" if not across else "", f"Noise: one configuration measured twice, {name}: {len(pairs)} pairs, median {100 * np.median(pairs):.1f} %, p90 {100 * np.quantile(pairs, 0.9):.1f} %."]
    return lines


def _intervals(rows: Sequence[Row], blind: Array, foreign: Array) -> list[str]:
    shares, families = folds.covered(rows, blind, lambda row: row["family"]), np.array([row["family"] for row in rows])
    lines = ["| class | from | to | covered % |", "|---|---:|---:|---:|"]
    for name in ("dense", "moe", "hybrid"):
        low, high = folds.interval(blind[families == name])
        lines.append(f"| {name} | {low:.3f} | {high:.3f} | {100 * shares[name]:.0f} |")
    low, high = folds.interval(foreign)
    return [*lines, f"| uncalibrated device or framework | {low:.3f} | {high:.3f} | |"]


def _ranking(rows: Sequence[Row], blind: Array) -> list[str]:
    found = folds.ranking(rows, blind)
    return [
        "Groups: the same framework, release, model, device, dtype, devices and sequence in several layouts; pairs closer than 1 % are left out. Regret: the layout predicted to be the fastest, beside the fastest measured.",
        "",
        "| groups | pairs | Kendall's tau | mean regret % | worst regret % |",
        "|---:|---:|---:|---:|---:|",
        f"| {found.groups} | {found.pairs} | {found.tau:.2f} | {100 * found.mean_regret:.1f} | {100 * found.worst_regret:.1f} |",
    ]


def _wrong(rows: Sequence[Row], blind: Array) -> list[str]:
    groups: dict[tuple[str, str], list[float]] = {}
    for row, ratio in zip(rows, blind, strict=True):
        if abs(ratio - 1) > WRONG:
            groups.setdefault((row["framework"], row["model"]), []).append(ratio - 1)
    lines = [f"Groups with rows that are more than {100 * WRONG:.0f} % off, cross-validated, with the cause where one is known.", "", "| framework, model | rows | from % | to % | cause |", "|---|---:|---:|---:|---|"]
    for (name, model), off in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        cause = CAUSES.get((name, model), "not known")
        lines.append(f"| {FRAMEWORKS.get(name, name)}, {model} | {len(off)} | {100 * min(off):+.0f} | {100 * max(off):+.0f} | {cause} |")
    return lines


def _rows(rows: Sequence[Row], own: Array, blind: Array) -> list[str]:
    lines = ["| row | framework | model | device | dtype | devices | layout | measured s | cross-validated % | in sample % | source |", "|---|---|---|---|---|---:|---|---:|---:|---:|---|"]
    for number in np.argsort(-np.abs(blind - 1)):
        row = rows[number]
        layout = " ".join(f"{key}{row[key]}" for key in ("tp", "pp", "vp", "cp", "ep", "mbs") if (row[key] or 1) > 1)
        name = f"{framework(row)} {release_of(row) or ''}".strip()
        cells = (row["id"], name, row["model"], device_name(row), row["precision"], row["gpus"], layout, f"{row['step_s']:.4g}")
        errors = (f"{100 * (blind[number] - 1):+.1f}", f"{100 * (own[number] - 1):+.1f}")
        lines.append("| " + " | ".join(map(str, (*cells, *errors, row["source"]))) + " |")
    return lines


def _anomalies(rows: Iterable[Row]) -> str:
    return "; ".join(f"{row['id']} ({row['anomaly']})" for row in rows)
