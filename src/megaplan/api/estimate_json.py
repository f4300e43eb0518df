"""An estimate as JSON (`megaplan.estimate/1`), for scripts."""

from collections.abc import Sequence
from typing import Any

from megaplan.budget.fit import RoutingRange
from megaplan.budget.values import RankBudget
from megaplan.inventory.towers import tower_parameters
from megaplan.layout.step_time import time_document
from megaplan.plan.estimates import device_record
from megaplan.spec.models import Spec

FORMAT = "megaplan.estimate/1"


def estimate_document(found: Any, ranks: Sequence[RankBudget]) -> dict[str, Any]:
    """The document of an estimate (`megaplan.Estimate`); `ranks` are the requested ones."""
    budget = found.budget
    return {
        "format": FORMAT,
        "totals": {"parameters": budget.parameters, "active_parameters": budget.active_parameters, **_towers(found.job.spec)},
        "fits": budget.fits,
        "verdict": found.verdict,
        "most_reserved_bytes": None if found.narrow is None else found.narrow.most_bytes,
        "largest_micro_batch": found.largest_micro_batch,
        "device": device_record(budget),
        "host_bytes_per_node": found.host_bytes_per_node,
        "stages": [
            {
                "stage": stage.stage,
                "pp_rank": stage.pp_rank,
                "chunk": stage.chunk,
                "layers": [stage.start, stage.stop],
                "parameters": stage.parameters,
            }
            for stage in budget.stages
        ],
        "ranks": [_rank(rank, found) for rank in ranks],
        "time": time_document(found.step_time),
        "traffic": found.parts.as_document()["traffic"],
        "serving": {**found.serving.as_document(), "times": found.serving_times.as_document()} if found.serving else None,
        "diagnostics": [item.as_document() for item in found.diagnostics],
    }


def _towers(spec: Spec) -> dict[str, Any]:
    """Parameters of a multimodal model's encoders and projections, by part; empty if there are none."""
    towers = spec.model.towers
    if towers is None:
        return {}
    priced = towers.stated is not None
    sizes = tower_parameters(towers).items()
    parts = {name: {"parameters": size, "trained": towers.trains(name), "priced": priced and name != "audio"} for name, size in sizes}
    return {"towers": parts}


def _rank(rank: RankBudget, found: Any) -> dict[str, Any]:
    return {
        "ranks": list(rank.ranks),
        "coordinate": rank.coordinate,
        "parameters": rank.parameters,
        "columns": _columns(rank.columns),
        "cells": {str(phase): _columns(cells) for phase, cells in rank.cells.items()},
        "phases": {str(phase): num_bytes for phase, num_bytes in rank.phases.items()},
        "peak_bytes": rank.peak_bytes,
        "peak_phase": str(rank.peak_phase),
        "allocated_bytes": rank.allocated_bytes,
        "reserved_bytes": rank.peak_bytes,
        "device_bytes": found.device_bytes(rank),
        "host_bytes": {"pinned": rank.host.pinned, "pageable": rank.host.pageable},
        "routing": _routing(rank, found.routing),
        "headroom_bytes": rank.headroom_bytes,
        "fits": rank.fits,
    }


def _routing(rank: RankBudget, routing: RoutingRange | None) -> dict[str, Any] | None:
    """Allocated bytes under balanced and under skewed routing; null if no row can move between ranks."""
    if routing is None:
        return None
    balanced, skewed = routing.allocated_bytes(rank)
    return {
        "balanced_allocated_bytes": balanced,
        "skewed_allocated_bytes": skewed,
        "skew": routing.skew,
        "skew_reason": routing.reason,
        "fits_skewed": routing.skewed.of_rank(rank.ranks[0]).fits,
    }


def _columns(cells: dict[Any, int]) -> dict[str, int]:
    return {column.key: num_bytes for column, num_bytes in cells.items()}
