"""Shards of more ranks than a tensor has rows: banks have no padding, and remaining padding is reported."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megaplan.budget.fit import largest_micro_batch, padding_diagnostics
from megaplan.budget.megarun import megarun_budget
from megaplan.budget.peaks import build_budget
from megaplan.budget.values import Budget
from megaplan.columns import Column
from megaplan.errors import Severity
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory, Owner
from megaplan.layout.build import build_layout
from megaplan.layout.ranks import Layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec
from megaplan.spec.models import Spec
from megaplan.units import format_bytes

PLANS = Path(__file__).parents[3] / "plans"


def planned(name: str, *overrides: str) -> tuple[Spec, Inventory, Layout]:
    """A shipped spec with changed values, with its own mode of cuts."""
    spec = load_spec(str(PLANS / f"{name}.yaml"), overrides).spec
    inventory = build_inventory(spec)
    return spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans)


def peak(name: str, *overrides: str) -> int:
    return build_budget(*planned(name, *overrides)).worst.peak_bytes


def test_the_peak_does_not_grow_with_the_shard_degree() -> None:
    """NAM56R with 16 experts: 78 to 337 GiB when banks were cut between experts alone."""
    peaks = [peak("nam56r-8xh200", f"mesh.dp_shard={degree}") for degree in (32, 64, 128, 256, 512, 1024, 2048)]
    assert max(peaks) <= 1.02 * peaks[0]
    assert max(peaks) <= 1.02 * min(peaks)


@pytest.mark.parametrize("reshard", ["false", "true"])
def test_more_devices_hold_less_each(reshard: str) -> None:
    """Mixtral, 2 experts per rank: its peak on 8, 16, 32 and 64 devices."""
    sharding = f"sharding.reshard_after_forward={reshard}"
    peaks = [peak("mixtral-8x7b", f"mesh.dp_shard={degree}", sharding) for degree in (4, 8, 16, 32)]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("degree", [2, 3, 16, 40, 64])
def test_a_bank_s_shards_by_hand(budget_of: Callable[..., Budget], hybrid: Callable[..., Spec], degree: int) -> None:
    """Two banks of 8 experts, 32 rows up and 64 down, 64 and 32 wide: every rank has ceil(256 / n) and ceil(512 / n) rows."""
    budget = budget_of(hybrid({"mesh": {"dp_shard": degree}, "model.moe.activation": "relu2"}))
    elements = -(-8 * 32 // degree) * 64 + -(-8 * 64 // degree) * 32
    for rank in budget.ranks:
        assert {cells[Column.EXPERT_PARALLEL_PARAMS] for cells in rank.cells.values()} == {4 * 2 * elements}


def test_stored_rows_are_the_part_s_elements() -> None:
    """A bank's parts after EP and ETP, in rows; everything else as it is."""
    for name, tensor in planned("mixtral-8x7b")[1].tensors():
        part = tensor.local_shape(1, 4, 2)
        stored = tensor.stored_shape(part)
        if tensor.owner is Owner.EXPERT_PARALLEL:
            assert (stored[0], stored[1:]) == (part[0] * part[1], part[2:]), name
        else:
            assert stored == part, name


def test_padding_is_a_note_above_a_hundredth() -> None:
    """A degree that costs more names bytes and a degree at which it does not; one that costs less gives no note."""
    given = planned("nam56r-8xh200", "mesh.dp_shard=2048")
    budget = build_budget(*given)
    cost = budget.worst.peak_bytes - megarun_budget(*given, padded=False).worst.peak_bytes
    (found,) = padding_diagnostics(*given, budget)
    assert (found.code, found.severity) == ("MP505", Severity.NOTE)
    assert f"{format_bytes(cost)} of the peak of {format_bytes(budget.worst.peak_bytes)}" in found.detail
    hint, _ = found.hints
    changed = [word for word in hint.partition("#")[0].split() if "=" in word]
    assert changed == ["mesh.dp_shard=1024", "mesh.dp_replicate=2"]
    again = planned("nam56r-8xh200", *changed)
    assert padding_diagnostics(*again) == []
    assert again[0].mesh.world_size == given[0].mesh.world_size


def test_any_tensor_s_padding_is_noted() -> None:
    """A dense model over a prime number of ranks: the nearest degree is another number of devices, as none keeps it."""
    (found,) = padding_diagnostics(*planned("llama-3.1-8b", "mesh.dp_shard=1021"))
    assert "down_proj.weight: 4,096 rows in 1,021 shards are 5,105 gathered" in found.detail
    assert found.hints[0].startswith("--set mesh.dp_shard=1024   # peak ")


def test_even_shards_cost_nothing() -> None:
    """A spec without padding has nothing to compare, whatever the peak."""
    given = planned("llama-3.1-8b")
    assert padding_diagnostics(*given) == []
    assert build_budget(*given) == megarun_budget(*given, padded=False)


def test_a_search_lists_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks decide on a micro-batch or a shard degree: with a million ranks, listing them at every step would take all the time."""
    given = planned("nam56r-8xh200", "mesh.dp_shard=2048")
    budget = build_budget(*given)
    lists = list[object]()
    monkeypatch.setattr("megaplan.budget.megarun.all_offsets", lambda *arguments: lists.append(arguments) or [0])
    assert largest_micro_batch(*given)
    assert padding_diagnostics(*given, budget)
    assert not lists
