"""The data of a report page: an estimate, its layers and slots, a step over time, and the formula of every column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megaplan.budget.values import RankBudget
from megaplan.columns import Column, Phase
from megaplan.families.registry import FAMILIES
from megaplan.layout.ranks import runs_label, runs_of
from megaplan.report.formulas import column_formulas, term_formulas
from megaplan.report.timeline import step_document

if TYPE_CHECKING:
    from megaplan.api.estimate import Estimate
    from megaplan.api.load import LoadedJob

FORMAT = "megaplan.report/1"
MAX_RANKS = 250
"""Largest number of distinct ranks with their cells on a page, largest peaks first; about 1.2 KB each."""


def report_document(found: Estimate, estimate: Mapping[str, Any]) -> dict[str, Any]:
    """The data of an estimate's page.

    Args:
        found: The estimate.
        estimate: The same as the document of `megaplan estimate --json`, all ranks included.

    Returns:
        Plain values. `estimate` has the given numbers in less space: each rank's `cells` are rows of `phases` by columns of `columns`, from
        which the sums `columns` and `phases` of a rank follow, and its `ranks` are half-open runs. `left_out` counts ranks not shown.
    """
    job = found.job
    shown = list(zip(found.ranks, estimate["ranks"], strict=True))[:MAX_RANKS]
    return {
        "format": FORMAT,
        "kind": "plan",
        "name": job.spec.name,
        "source": job.name,
        "changes": list(job.changes),
        "host": job.spec.host.kind.name,
        "mesh": _mesh(job),
        "schedule": {"kind": job.spec.schedule.kind, "num_microbatches": job.spec.schedule.num_microbatches},
        "pattern": "".join(block.family for block in job.inventory.layers),
        "phases": [str(phase) for phase in Phase],
        "columns": [str(column) for column in Column],
        "estimate": {**estimate, "ranks": [_rank(rank, document) for rank, document in shown]},
        "left_out": {"ranks": len(found.ranks) - len(shown)},
        "families": {letter: family.title for letter, family in FAMILIES.items()},
        "layers": _layers(job),
        "slots": _slots(job),
        "split": _split(job),
        "step": step_document(job, found.budget),
        **{name: part for name, part in found.parts.as_document().items() if name != "traffic"},
        "formulas": column_formulas(job.spec.host.kind),
        "terms": term_formulas(),
    }


def _rank(rank: RankBudget, document: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in document.items() if key not in ("columns", "phases")}
    runs = runs_of(rank.ranks)
    return {
        **kept,
        "ranks": runs,
        "label": runs_label(runs),
        "cells": [[rank.cells[phase][column] for column in Column] for phase in Phase],
        "moments": {str(phase): text for phase, text in rank.peak_places.items()},
    }


def _mesh(job: LoadedJob) -> dict[str, int]:
    mesh = job.spec.mesh
    axes = {"pp": mesh.pp, "vpp": mesh.vpp, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "cp": mesh.cp}
    return {**axes, "tp": mesh.tp, "ep": mesh.ep, "etp": mesh.etp, "world_size": mesh.world_size}


def _layers(job: LoadedJob) -> list[list[Any]]:
    """[family, parameters of the full tensors] of every layer."""
    return [[block.family, block.elements] for block in job.inventory.layers]


def _slots(job: LoadedJob) -> list[dict[str, Any]]:
    """Every slot with its layers (half-open) and the blocks outside them; `copies` are blocks that another slot owns."""
    return [
        {
            "slot": slot.index,
            "pp_rank": slot.pp_rank,
            "chunk": slot.chunk,
            "layers": [slot.start, slot.stop],
            "owns": [name for name in slot.blocks if not name.startswith("layers.")],
            "copies": list(slot.copies),
        }
        for slot in job.layout.slots
    ]


def _split(job: LoadedJob) -> dict[str, Any] | None:
    """Quality of the cuts; None if the plan's certificate is for other values."""
    decided = job.cuts if job.plan is None else job.plan.decisions.split
    if decided is None or (job.plan is not None and job.changes):
        return None
    quality = decided.certificate
    return {
        "mode": decided.mode,
        "reason": decided.reason,
        "objective": quality.objective,
        "measures": quality.measures,
        "unit": quality.unit,
        "value": quality.value,
        "lower_bound": quality.lower_bound,
        "gap": quality.gap,
        "costs": list(quality.costs),
    }
