"""Optimizer state in host memory under megarun: the offloaded state, the device's memory, and the time of copies."""

from itertools import pairwise
from typing import Any

import pytest

from megaplan.budget.peaks import build_budget
from megaplan.budget.values import Budget
from megaplan.columns import Column, Phase
from megaplan.cost.data import data_times
from megaplan.cost.elements import local_elements
from megaplan.cost.rates import rates_of
from megaplan.errors import MegaplanError
from megaplan.exploration.floors import floors_of
from megaplan.goodput.checkpoints import checkpoint_sizes
from megaplan.hosts.megarun.offload import ALIGNMENT, buffer_bytes, num_on_host
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Group
from megaplan.layout.build import build_layout
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec
from megaplan.spec.rules import check_rules

GQA = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}


def spec_of(offload: float | None = 1.0, *, matrix: str = "adamw", **more: Any) -> Spec:
    model = {"pattern": "AD", "num_layers": 4, "hidden_size": 256, "vocab_size": 512, "attention": GQA, "mlp": {"ffn_hidden_size": 512}}
    host = {"optimizer_offload": offload, **more.pop("host", {})}
    values = {"format": "megaplan.spec/1", "name": "t", "model": model, "batch": {"micro_batch_size": 2, "seq_length": 128}}
    return spec_from_document({**values, "host": host, "optimizer": {"matrix": matrix}, **more})


def budget_of(spec: Spec) -> Budget:
    inventory = build_inventory(spec)
    return build_budget(spec, inventory, build_layout(spec, inventory, [(0, 4)]))


@pytest.mark.parametrize(
    ("elements", "fraction", "number"),
    [((4, 4, 4), 1.0, 3), ((4, 4, 4), 1 / 3, 1), ((4, 4, 4), 0.34, 2), ((9, 1), 0.5, 1), ((1, 9), 0.5, 2), ((5,), 0.01, 1), ((), 1.0, 0)],
)
def test_the_first_units_are_on_the_host_until_they_have_the_fraction(elements: tuple[int, ...], fraction: float, number: int) -> None:
    assert num_on_host(elements, fraction) == number


def test_the_buffer_has_room_for_two_consecutive_units() -> None:
    assert [buffer_bytes(units) for units in ((), (7,), (3, 9, 1, 4), (9, 1, 9))] == [0, 7, 12, 10]


@pytest.mark.parametrize("matrix", ["adamw", "muon"])
def test_all_state_leaves_the_device_but_for_step_counters_and_a_buffer(matrix: str) -> None:
    """AdamW: two fp32 averages, the largest parameters in a row are embedding and head behind it, or matrices of a block."""
    spec, before = spec_of(matrix=matrix), spec_of(None, matrix=matrix)
    (rank,), (kept,) = budget_of(spec).ranks, budget_of(before).ranks
    tensors = [tensor for _, tensor in build_inventory(spec).tensors()]
    by_muon = [tensor for tensor in tensors if matrix == "muon" and tensor.group is Group.MATRIX]
    counters = 4 * (len(tensors) - len(by_muon))
    sizes = [(1 if tensor in by_muon else 2) * (-(-4 * tensor.elements // ALIGNMENT) * ALIGNMENT) for tensor in tensors]
    assert rank.host.pinned == sum(sizes)
    assert rank.host.pageable == 0
    optimizers = [Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER]
    for phase in (Phase.FORWARD_BACKWARD, Phase.FIRST_OPTIMIZER, Phase.OPTIMIZER):
        assert sum(rank.cells[phase][column] for column in optimizers) == counters
    buffer = rank.cells[Phase.OPTIMIZER][Column.WORKSPACE] - kept.cells[Phase.OPTIMIZER][Column.WORKSPACE]
    assert max(sizes) < buffer < sum(sizes)
    if matrix == "adamw":  # the head is the last unit, and stands behind the vector of the final norm
        assert buffer == max(first + second for first, second in pairwise(sizes))
    changed = [column for column in Column if rank.cells[Phase.FORWARD_BACKWARD][column] != kept.cells[Phase.FORWARD_BACKWARD][column]]
    assert set(changed) <= {*optimizers, Column.OVERHEAD}


def test_a_fraction_keeps_the_last_state_on_the_device() -> None:
    found = [budget_of(spec_of(fraction)).ranks[0] for fraction in (0.2, 0.5, 0.8, 1.0)]
    on_host = [rank.host.total for rank in found]
    on_device = [rank.cells[Phase.FORWARD_BACKWARD][Column.MATRIX_OPTIMIZER] for rank in found]
    assert on_host == sorted(set(on_host))
    assert on_device == sorted(set(on_device), reverse=True)
    everything = budget_of(spec_of(None)).ranks[0].cells[Phase.FORWARD_BACKWARD]
    whole = everything[Column.MATRIX_OPTIMIZER] + everything[Column.OTHER_OPTIMIZER]
    for fraction, rank in zip((0.2, 0.5, 0.8), found, strict=False):
        assert rank.host.total >= fraction * whole


def test_bounds_of_memory_leave_the_state_out() -> None:
    spec, inventory = spec_of(), build_inventory(spec_of())
    (rank,), floors = budget_of(spec).ranks, floors_of(spec, inventory)
    assert floors.peak_bytes(spec) <= rank.peak_bytes
    assert floors.stored_bytes(spec_of(None)) - floors.stored_bytes(spec) == 8 * inventory.parameters + 4 * len(list(inventory.tensors()))


def test_a_save_copies_what_is_in_host_memory_too() -> None:
    sizes = []
    for spec in (spec_of(), spec_of(None)):
        inventory = build_inventory(spec)
        layout = build_layout(spec, inventory, [(0, 4)])
        sizes.append(checkpoint_sizes(spec, inventory, layout, build_budget(spec, inventory, layout)).rank_host_bytes[0])
    assert sizes[1] <= sizes[0] < sizes[1] * 1.01  # each average begins at a multiple of the alignment


@pytest.mark.parametrize(("matrix", "averages"), [("adamw", 2), ("muon", 1)])
@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_an_update_is_not_shorter_than_the_copies_of_its_state(matrix: str, averages: int, kernels: str) -> None:
    """Both ways in one stream, at 88 % of the link's rate."""
    slow = {"name": "h200", "host_bytes_per_second": 10**9}
    spec = spec_of(matrix=matrix, host={"kernels": kernels}, device=slow)
    inventory = build_inventory(spec)
    elements = [(averages if tensor.group is Group.MATRIX else 2) * tensor.elements for _, tensor in inventory.tensors()]
    local = local_elements(inventory, 1, 1, 1)
    times = {
        value: data_times(spec_of(value, matrix=matrix, host={"kernels": kernels}, device=slow), rates_of(spec), local)
        for value in (1.0, 0.5, None)
    }
    expected = 2 * 4 * sum(elements) / (10**9 * 0.88) * 10**9
    assert times[1.0].optimizer_ns == pytest.approx(expected, rel=0.01)
    assert times[0.5].optimizer_ns == pytest.approx(expected / 2, rel=0.02)
    assert times[None].optimizer_ns < expected / 4


def test_a_recorded_update_is_refused() -> None:
    with pytest.raises(MegaplanError) as refused:
        spec_of(host={"cuda_graphs": "step"})
    (found,) = refused.value.diagnostics
    assert (found.code, found.location.key) == ("MP906", "host.cuda_graphs")
    assert found.hints[0] == "cuda_graphs: microbatch"
    assert not [each for each in check_rules(spec_of(host={"cuda_graphs": "microbatch"})) if each.code == "MP906"]
