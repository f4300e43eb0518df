"""The estimates that a plan records, from a budget."""

from typing import Any

from megaplan.budget.peaks import build_budget
from megaplan.budget.serving import serving_budget
from megaplan.budget.values import Budget, DeviceBudget, RankBudget
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout, runs_of
from megaplan.spec.models import Spec


def estimates_record(spec: Spec, inventory: Inventory, layout: Layout) -> dict[str, Any]:
    """`estimates` as plain values: the cells of each rank's peak phase, every phase's sum, and the headroom."""
    budget, serving = build_budget(spec, inventory, layout), serving_budget(spec, inventory)
    return {
        "device": device_record(budget),
        "fits": budget.fits,
        "totals": {"parameters": budget.parameters, "active_parameters": budget.active_parameters},
        "stages": [{"slot": stage.stage, "parameters": stage.parameters} for stage in budget.stages],
        "ranks": [_rank_record(rank) for rank in budget.ranks],
        "serving": serving.as_document() if serving else None,
    }


def device_record(budget: Budget) -> dict[str, Any]:
    """The device as JSON values, with the ranks on each type of device if there are several."""
    pools = [{"ranks": list(pool.ranks), **_device(pool.device)} for pool in budget.pools]
    return _device(budget.device) | ({"pools": pools} if pools else {})


def _device(device: DeviceBudget) -> dict[str, Any]:
    return {
        "name": device.name,
        "capacity_bytes": device.capacity_bytes,
        "reserve_bytes": device.reserve_bytes,
        "reserve": {item.name: item.bytes for item in device.reserve},
        "usable_bytes": device.usable_bytes,
    }


def _rank_record(rank: RankBudget) -> dict[str, Any]:
    return {
        "ranks": [list(run) for run in runs_of(rank.ranks)],
        "coordinate": rank.coordinate,
        "parameters": rank.parameters,
        "columns": {column.key: num_bytes for column, num_bytes in rank.columns.items()},
        "phases": {str(phase): num_bytes for phase, num_bytes in rank.phases.items()},
        "peak_phase": str(rank.peak_phase),
        "peak_bytes": rank.peak_bytes,
        "headroom_bytes": rank.headroom_bytes,
        "fits": rank.fits,
    }
