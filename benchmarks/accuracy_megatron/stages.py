"""SimuMax's runs on B200: the peak of every pipeline stage, compared with SimuMax's own estimates."""

import json
from pathlib import Path
from statistics import mean

from launches import stage_of_launch

from megaplan.hosts.megatron.peak import memory

RUNS = Path(__file__).resolve().parent.parent.parent / "tests/megaplan/hosts/megatron/simumax.json"
MIB = 2**20


def stage_lines() -> list[str]:
    """The section of the page."""
    rows = json.loads(RUNS.read_text(encoding="utf-8"))["rows"]
    lines: list[str] = []
    errors: list[float] = []
    theirs: list[float] = []
    first: list[float] = []
    for row in rows:
        for rank, (measured, simumax) in enumerate(zip(row["peak_mib"], row["simumax_gib"], strict=True)):
            stage = stage_of_launch(
                row["arguments"], row["gpus"], row["padded_vocab_size"], row["platform"], pp_rank=rank, month=row["month"]
            )
            found = memory(stage)
            errors.append(100 * (found.peak / MIB / measured - 1))
            theirs.append(100 * (simumax * 1024 / measured - 1))
            if rank == 0 and stage.spec.mesh.pp > 1:
                first.append(errors[-1])
            lines.append(f"| {row['name']} | {rank} | {measured:,.1f} | {errors[-1]:+.2f} | {theirs[-1]:+.2f} | {found.peak_phase} |")
    return [
        "",
        "## Every stage: SimuMax's runs on B200",
        "",
        "SimuMax publishes torch's largest allocation on every rank of its runs of Megatron-Core on one node, in",
        f"NVIDIA's image of January 2026: {len(rows)} runs with {len(lines)} stages, {len(first)} of them the first of a pipeline, which",
        "Megatron's own tests do not show. They cover the memory of all 43 timed rows of its table, since most rows share a run. "
        "Experts run",
        "at a fixed capacity.",
        f"Mean size of the errors {mean(map(abs, errors)):.2f} %, worst {max(errors, key=abs):+.2f} %; of the first stages of pipelines",
        f"{mean(map(abs, first)):.2f} %, worst {max(first, key=abs):+.2f} %. SimuMax's own estimates of these stages: mean",
        f"{mean(map(abs, theirs)):.2f} %, worst {max(theirs, key=abs):+.2f} %.",
        "The temporary tensors of the schedule, of a row-parallel linear and of a layer of experts were read in the sources",
        "while these runs",
        "were known, so that they are not a held-out test of those terms.",
        "",
        "| Run | Stage | Peak MiB | Error | SimuMax's error | Phase |",
        "|---|---|---|---|---|---|",
        *lines,
    ]
