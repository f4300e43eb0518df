"""Serving, routing's two cases, the verdict and the columns to reduce."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from routing_bytes import routing_bytes

from megaplan.budget.axes import AXES
from megaplan.budget.fit import cuts, largest_micro_batch, low_headroom, narrow_fit
from megaplan.budget.formulas import FORMULAS
from megaplan.budget.peaks import build_budget
from megaplan.budget.serving import cached_tokens, serving_budget
from megaplan.budget.values import Budget, ServingBudget
from megaplan.columns import Column, Phase
from megaplan.devices import load_device
from megaplan.dtypes import DType
from megaplan.errors import MegaplanError
from megaplan.families.moe.program import ExpertMesh, received_rows
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.partition.choose import choose_cuts
from megaplan.spec.load import load_spec
from megaplan.spec.models import MixtureOfExperts, Serving, Spec

PLANS = Path(__file__).parents[3] / "plans"
GOLDEN = MixtureOfExperts(num_experts=128, top_k=2, ffn_hidden_size=1, capacity_factor=1.2)
GQA = {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 8}


@pytest.mark.requirement("R-43")
def test_routing_golden_in_both_readings() -> None:
    """4096 tokens, top-2, 128 experts, factor 1.2, hidden 4096, 4 local experts: one source's buffer, and that for the 32 there are."""
    found = routing_bytes(GOLDEN, 4096, 4096, ExpertMesh(ep=32, etp=1), DType.BF16)
    assert found.capacity == 77
    assert found.count_bytes == 32_768
    assert found.source_bytes == 2_523_136
    assert found.num_sources == 32
    assert found.receive_bytes == 32 * 2_523_136


@pytest.mark.requirement("R-43")
def test_the_budget_prices_all_sources(hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """A capacity of 2 over the balanced rows doubles the rows received, from every source."""
    moe = hybrid().model.moe
    assert moe is not None
    even = received_rows(moe, 128, ExpertMesh(2, 1))
    assert even == 128 * 2
    full = received_rows(moe.model_copy(update={"capacity_factor": 2.0}), 128, ExpertMesh(2, 1))
    assert full == 2 * even
    cells = [budget_of(hybrid({"mesh.ep": 2, "model.moe.capacity_factor": factor})).of_rank(0) for factor in (None, 2.0)]
    routing = [rank.cells[Phase.FORWARD_BACKWARD][Column.ROUTING] for rank in cells]
    assert routing[1] > 1.5 * routing[0]


def test_skew_is_bounded_by_the_rows_there_are() -> None:
    moe = MixtureOfExperts(num_experts=4, top_k=2, ffn_hidden_size=1, routing_skew=100.0)
    assert received_rows(moe, 10, ExpertMesh(4, 1)) == 10 * 4  # one local expert takes each token of four sources once
    assert received_rows(moe, 10, ExpertMesh(2, 1)) == 10 * 2 * 2
    assert received_rows(moe, 10, ExpertMesh(1, 1)) == 20
    null = moe.model_copy(update={"null_experts": 1})
    assert null.rows_of(10) == 16
    assert received_rows(null, 10, ExpertMesh(2, 1)) == 16 * 2  # null experts keep their share


def serving(spec: Spec) -> ServingBudget:
    found = serving_budget(spec, build_inventory(spec))
    assert found is not None
    return found


@pytest.mark.requirement("R-48")
def test_kv_cache_follows_attention_layers_never_depth(hybrid: Callable[..., Spec]) -> None:
    """Two of ten layers attend: 2 · batch 4 · context 100 · 2 · 4 heads · 8 · 2 B; ten times the M and R layers change nothing of it."""
    pool = {"serving": {"batch_size": 4, "context_length": 100}}
    few = serving(hybrid(pool))
    assert few.kv_cache_bytes == 2 * 4 * 100 * 2 * 4 * 8 * 2
    more = serving(hybrid({**pool, "model.pattern": "AMRDMRDMRDAMRDMRDMRD", "model.num_layers": 20}))
    assert more.kv_cache_bytes == few.kv_cache_bytes
    assert more.recurrent_state_bytes > few.recurrent_state_bytes


@pytest.mark.requirement("R-48")
def test_recurrent_pool_is_separate_and_blind_to_context(hybrid: Callable[..., Spec]) -> None:
    """M: 8 heads · 16 · 16 · 4 + (128 + 2 · 64) · 3 · 2; R: 8 · 8 · 8 · 4 + (16 + 64) · 3 · 2; two layers of each, batch 4."""
    expected = 4 * 2 * (8 * 16 * 16 * 4 + 256 * 3 * 2 + 8 * 8 * 8 * 4 + 80 * 3 * 2)
    for context in (100, 10_000):
        assert serving(hybrid({"serving": {"batch_size": 4, "context_length": context}})).recurrent_state_bytes == expected


@pytest.mark.requirement("R-48")
def test_latents_windows_and_pages(nam56r: Callable[..., Spec]) -> None:
    """MLA caches 64 + 32 values per token, nine layers an indexer key of 64 too; pages round the context up to whole blocks."""
    spec = nam56r({"serving.context_length": 1000, "serving.cache": "contiguous"})
    assert serving(spec).kv_cache_bytes == 32 * 1000 * (13 * 96 + 9 * 64) * 2
    paged = nam56r({"serving.context_length": 1000, "serving.block_size": 256})
    assert serving(paged).kv_cache_bytes == 32 * 1024 * (13 * 96 + 9 * 64) * 2
    assert serving(paged).blocks == 4
    pool = Serving(batch_size=1, context_length=1000, block_size=64)
    assert cached_tokens(pool, window=100) == 100
    # 100 tokens can touch three blocks of 64: one begins and one ends inside
    assert cached_tokens(pool.model_copy(update={"cache": "paged"}), window=100) == 3 * 64
    assert cached_tokens(pool.model_copy(update={"cache": "paged"}), window=5000) == 1024


def test_serving_is_no_part_of_training(hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    with_serving = hybrid({"serving": {"batch_size": 4, "context_length": 100}})
    assert budget_of(with_serving) == budget_of(hybrid())
    assert serving_budget(hybrid(), build_inventory(hybrid())) is None
    found = serving(with_serving)
    assert found.as_document()["total"] == found.kv_cache_bytes + found.recurrent_state_bytes + found.parameters_bytes


def parts(spec: Spec, spans: Any) -> tuple[Spec, Any, Any]:
    inventory = build_inventory(spec)
    return spec, inventory, build_layout(spec, inventory, spans)


SPANS = [(0, 13), (13, 26), (26, 39), (39, 52)]


def test_largest_micro_batch_is_the_last_that_fits(nam56r: Callable[..., Spec]) -> None:
    found = largest_micro_batch(*parts(nam56r(), SPANS))
    assert found is not None
    fits = [build_budget(*parts(nam56r({"batch.micro_batch_size": size}), SPANS)).fits for size in (found, found + 1)]
    assert fits == [True, False]


@pytest.mark.requirement("R-46")
def test_over_the_limit_names_the_column_and_the_bytes(nam56r: Callable[..., Spec]) -> None:
    spec, inventory, layout = parts(nam56r({"batch.micro_batch_size": 16}), SPANS)
    budget = build_budget(spec, inventory, layout)
    worst, (cut, *_) = budget.worst, cuts(budget.worst)
    assert (cut.column, cut.excess_bytes) == (Column.ACTIVATIONS, -worst.headroom_bytes)
    assert cut.column_bytes == worst.columns[Column.ACTIVATIONS]


@pytest.mark.requirement("R-46")
def test_low_headroom_warns_and_ample_headroom_does_not(nam56r: Callable[..., Spec]) -> None:
    codes = []
    for size in (4, 8):
        spec, inventory, layout = parts(nam56r({"batch.micro_batch_size": size}), SPANS)
        codes.append([item.code for item in low_headroom(build_budget(spec, inventory, layout).worst, spec)])
    assert codes == [[], ["MP502"]]


def test_little_headroom_names_segments_that_grow_where_they_are_off(nam56r: Callable[..., Spec]) -> None:
    hints = []
    for changes in ({"host.expandable_segments": False}, {}):
        spec, inventory, layout = parts(nam56r({"batch.micro_batch_size": 8, **changes}), SPANS)
        (found,) = low_headroom(build_budget(spec, inventory, layout).worst, spec)
        hints.append("expandable_segments: true" in found.hints)
    assert hints == [True, False]


def test_nothing_fits(nam56r: Callable[..., Spec]) -> None:
    spec, inventory, layout = parts(nam56r({"batch.micro_batch_size": 2, "batch.seq_length": 65536}), SPANS)
    assert largest_micro_batch(spec, inventory, layout) is None


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(MegaplanError) as raised:
        load_device("h999")
    assert raised.value.diagnostics[0].code == "MP504"
    assert "h200" in raised.value.diagnostics[0].detail


def test_every_column_has_its_formula() -> None:
    assert set(FORMULAS) == {*(column.value for column in Column), "reserve", "kv_cache", "recurrent_state"}
    assert all(item.formula and item.units == "bytes" and item.source and item.example for item in FORMULAS.values())


@pytest.mark.requirement("R-20")
def test_every_axis_says_what_it_cannot_fix() -> None:
    assert {"pp", "dp_replicate", "dp_shard", "cp", "tp", "sp", "ep", "etp", "recompute", "checkpoint"} <= set(AXES)
    assert "Experts per rank" in AXES["tp"].cannot_fix
    assert "Parameters" in AXES["sp"].cannot_fix
    assert "Recurrent state" in AXES["cp"].cannot_fix
    assert "Any dense layer" in AXES["ep"].cannot_fix
    assert "no split axis" in AXES["recompute"].title
    assert "no split axis" in AXES["checkpoint"].title


@pytest.mark.parametrize("growing", [True, False])
@pytest.mark.parametrize("percent", [0, 3, 10, 11, 28, 29, 40])
def test_a_fit_is_narrow_where_as_much_as_published_runs_reserved_would_not_fit(percent: int, *, growing: bool) -> None:
    most = 11 if growing else 29
    host = {"name": "megatron", "fragmentation_percent": percent, "expandable_segments": growing}
    spec = load_spec(str(PLANS / "llama-3.1-8b.yaml"), [f"host={json.dumps(host)}"]).spec
    inventory = build_inventory(spec)
    budget = build_budget(spec, inventory, build_layout(spec, inventory, choose_cuts(spec, inventory).spans))
    worst = budget.worst
    for room in (0, percent, most - percent - 1, most - percent + 1, 30):
        usable = worst.peak_bytes * (100 + max(0, room)) // 100
        found = narrow_fit(budget._replace(ranks=tuple(rank._replace(usable_bytes=usable) for rank in budget.ranks)), spec)
        reserved = worst.peak_bytes * max(100 + most, 100 + percent) / (100 + percent)
        assert (found is not None) is (reserved > usable)
        if found is not None:
            assert found.most_bytes == pytest.approx(reserved)
            assert found.worst.ranks == worst.ranks
    over = tuple(rank._replace(usable_bytes=rank.peak_bytes - 1) for rank in budget.ranks)
    assert narrow_fit(budget._replace(ranks=over), spec) is None
