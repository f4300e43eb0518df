"""Pairs in turns (`host.moe_overlap`): legs of layers, and steps of plans."""

from random import Random
from typing import Any

import pytest

from megaplan.cost.blocks import layer_works, rank_workload
from megaplan.cost.pools import PooledTimer
from megaplan.cost.rates import rates_of
from megaplan.cost.replay import BUBBLE, EXPOSED, HOST, ReplayTimer
from megaplan.cost.times import model_times
from megaplan.cost.transfers import rows_ns
from megaplan.cost.turns import stops_of
from megaplan.cost.values import LayerTime
from megaplan.families.registry import FAMILIES
from megaplan.inventory.build import build_inventory
from megaplan.layout.step_time import PlannedTime, planned_time
from megaplan.schedules.turns import exchanged, rest
from megaplan.spec.models import Spec

MOE = {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 1024, "shared_ffn_hidden_size": 2048, "activation": "swiglu"}
V = {"pp": 2, "vpp": 2, "dp_shard": 4, "ep": 4}
PAIRS = {"kind": "dualpipev", "num_microbatches": 12}
SPANS = ((0, 3), (3, 5), (5, 6), (6, 8))
PARTS_OF_NORM = {"norm", "mix streams"}
"""Operations that the program has as parts of others: the addition of the block before with the norm, and a product of `collapse`."""


def turning(make_spec: Any, *, turns: bool = True, moe: Any = None, model: Any = None, **sections: Any) -> Spec:
    """A spec of pairs, in turns or not."""
    host = {"kernels": "reference", **sections.pop("host", {}), "moe_overlap": turns}
    given = {"mesh": V, "schedule": PAIRS, "device": {"name": "h100-sxm"}} | sections
    spec: Spec = make_spec("AE", 8, model={"moe": MOE | (moe or {}), **(model or {})}, host=host, **given)
    return spec


def experts_layer(spec: Spec) -> LayerTime:
    """The first E layer."""
    return model_times(spec, build_inventory(spec)).layers[1]


def drawn(random: Random) -> dict[str, Any]:
    """Sections of a variant of E layers."""
    own = random.choice([{}, {"latent_size": 512}, {"shared_gate": True}, {"shared_ffn_hidden_size": 0}, {"null_experts": 2}])
    moe = own | random.choice([{}, {"capacity_factor": 1.5}, {"routing_skew": 1.5}, {"bias": True}, {"activation": "relu2"}])
    meshes = [V, V | {"tp": 2}, V | {"tp": 2, "etp": 2}, V | {"ep": 2}, V | {"cp": 2}]
    model: dict[str, Any] = random.choice(
        [{}, {"norm_placement": "both"}, {"norm": "layernorm"}, {"streams": {"count": 2}}, {"attention_residuals": {"group_layers": 2}}]
    )
    found: dict[str, Any] = {
        "moe": moe,
        "model": model,
        "mesh": random.choice(meshes),
        "host": {"kernels": "triton" if random.random() < 0.5 else "reference"},
    }
    if random.random() < 0.4:
        found["recompute"] = {"blocks": {"E": "selective", "A": "full"}}
    if random.random() < 0.3:
        found["precision"] = {"recipe": {"name": "fp8_blockwise"}}
    return found


@pytest.mark.parametrize("seed", range(30))
def test_legs_are_parts_of_the_same_passes(make_spec: Any, seed: int) -> None:
    """Layers take the same time as without turns; each exchange of rows is a leg's end, and only E layers have any."""
    sections = drawn(Random(seed))
    spec, plain = (turning(make_spec, turns=turns, **sections) for turns in (True, False))
    inventory = build_inventory(spec)
    times, serial = model_times(spec, inventory), model_times(plain, inventory)
    assert times.in_turns
    assert not serial.in_turns
    load = rank_workload(spec, spec.precision.params)
    for block, layer, before in zip(inventory.layers, times.layers, serial.layers, strict=True):
        family = FAMILIES[block.family]
        assert (layer.forward_ns, layer.input_ns, layer.weight_ns) == (before.forward_ns, before.input_ns, before.weight_ns)
        assert before.compute_ns == before.total_ns
        exchanges = family.exchanges(family.section_of(spec.model), 4096, block.variant)
        once = rows_ns(rates_of(spec), spec, load, exchanges)[0] if exchanges.rows else 0
        for legs, length in ((layer.forward_legs, layer.forward_ns), (layer.backward_legs, layer.backward_ns)):
            assert [leg.exchanging for leg in legs if leg.passes_turn] == [once] * 2 * (once > 0)
            assert exchanged(legs) == 2 * once
            assert rest(legs, length) >= 0
            assert all(leg.computing > 0 for leg in legs)
        assert layer.total_ns - layer.compute_ns == 4 * once
    counted = [leg.passes_turn for leg in times.layers[1].forward_legs].count(False)
    assert counted == (spec.model.moe is not None and spec.model.moe.capacity is None)


@pytest.mark.parametrize("seed", range(30))
def test_every_operation_has_a_place_among_the_exchanges(make_spec: Any, seed: int) -> None:
    spec = turning(make_spec, **drawn(Random(seed)))
    block, load = build_inventory(spec).layers[1], rank_workload(spec, spec.precision.params)
    family = FAMILIES["E"]
    stops = stops_of(spec, load, block, family.exchanges(family.section_of(spec.model), 4096, block.variant))
    assert stops is not None
    ops = layer_works(load, spec.model, block)
    assert {name for op in ops for name in op.counts or (op.name,)} - stops.before.keys() <= PARTS_OF_NORM
    first, last = stops.pass_turns.index(True), len(stops.pass_turns)
    places = dict(zip((op.name for op in ops), stops.of(ops), strict=True))
    assert {places[name] for name in ("norm", "route")} == {0}
    assert places["dispatch"] == first
    assert places["experts"] == first + 1 == last - 1
    assert {place for name, place in places.items() if name == "combine" or name.startswith(("shared", "latent_up", "post_norm"))} == {last}


def legs_and_rests(layer: LayerTime) -> tuple[list[int], list[int]]:
    """Computation of F before, between and behind the exchanges, and of a backward."""
    passes = (layer.forward_legs, layer.forward_ns), (layer.backward_legs, layer.backward_ns)
    forward, backward = ([leg.computing for leg in legs] + [rest(legs, length)] for legs, length in passes)
    return forward, backward


@pytest.mark.parametrize(
    ("change", "forward", "backward"),
    [
        ({"moe": {"ffn_hidden_size": 2048}}, [2], [1]),
        ({"moe": {"shared_ffn_hidden_size": 4096}}, [3], [0]),
        ({"moe": {"num_experts": 64}}, [0], [2]),
        ({"recompute": {"blocks": {"E": "selective"}}}, [], [1]),
        ({"model": {"norm_placement": "both"}}, [3], [0]),
    ],
)
def test_what_grows_stands_where_it_runs(make_spec: Any, change: dict[str, Any], forward: list[int], backward: list[int]) -> None:
    """The parts are before the counts, up to the exchange, between both, and behind them; backward has no counts."""
    sizes = [legs_and_rests(experts_layer(turning(make_spec, **sections))) for sections in ({}, change)]
    for where, (one, other) in zip((forward, backward), zip(*sizes, strict=True), strict=True):
        assert [index for index, (before, after) in enumerate(zip(one, other, strict=True)) if before != after] == where


def test_slices_of_experts_gather_between_the_exchanges(make_spec: Any) -> None:
    """A tensor group gathers and sums the shared expert's rows behind them."""
    sizes = [
        legs_and_rests(experts_layer(turning(make_spec, mesh=V | mesh, batch=batch)))
        for mesh, batch in (
            ({"tp": 2}, {"micro_batch_size": 2, "seq_length": 4096}),
            ({"tp": 2, "etp": 2}, {"micro_batch_size": 2, "seq_length": 4096}),
        )
    ]
    (one, back), (other, sliced) = sizes
    assert other[2] > one[2]
    assert sliced[1] > back[1]
    assert (other[0], other[-1]) == (one[0], one[-1])


def timed(spec: Spec) -> PlannedTime:
    """The planned time under uneven cuts."""
    found = planned_time(spec, SPANS if spec.mesh.vpp == 2 else ((0, 5), (5, 8)))
    assert isinstance(found, PlannedTime)
    return found


@pytest.mark.parametrize("mesh", [V, V | {"vpp": 1}], ids=["dualpipev", "dualpipe"])
def test_a_step_in_turns_is_shorter_by_what_its_pairs_hide(make_spec: Any, mesh: dict[str, int]) -> None:
    schedule = PAIRS if mesh["vpp"] == 2 else PAIRS | {"kind": "dualpipe"}
    after, before = (timed(turning(make_spec, turns=turns, mesh=mesh, schedule=schedule)) for turns in (True, False))
    assert after.seconds < before.seconds
    assert before.turns is None
    assert after.turns is not None
    waited = f"{EXPOSED} transfers"
    assert after.terms[waited] == pytest.approx(before.terms[waited] - after.turns.hidden, abs=2e-9)
    assert before.terms[waited] == pytest.approx(after.turns.seconds, abs=2e-9)
    assert after.turns.seconds > after.turns.hidden > 0.5 * before.terms[waited]
    assert {name: value for name, value in after.terms.items() if name not in (waited, BUBBLE)} == {
        name: value for name, value in before.terms.items() if name not in (waited, BUBBLE)
    }
    assert after.as_document()["exchanges_in_turns"] == after.turns.as_document()
    assert "exchanges_in_turns" not in before.as_document()


def test_a_host_that_launches_too_slowly_hides_nothing(make_spec: Any) -> None:
    """On a device with a measured host small layers wait for it in turns as in sequence, and large ones do not."""
    small, large = {"micro_batch_size": 1, "seq_length": 1024}, {"micro_batch_size": 8, "seq_length": 8192}
    host, device = {"kernels": "triton"}, {"name": "h200"}
    steps = [
        timed(turning(make_spec, turns=turns, host=host, device=device, batch=batch)) for batch in (small, large) for turns in (True, False)
    ]
    assert steps[0].turns is not None
    assert (steps[0].turns.hidden, steps[0].seconds) == (0, steps[1].seconds)
    assert steps[0].terms[HOST] > 0.1 * steps[0].seconds
    assert steps[2].turns is not None
    assert steps[2].turns.hidden > 0
    assert steps[2].seconds < steps[3].seconds


def test_steps_per_update_hide_as_often(make_spec: Any) -> None:
    once, twice = (timed(turning(make_spec, schedule=PAIRS | {"steps_per_update": steps})).turns for steps in (1, 2))
    assert once is not None
    assert twice == pytest.approx((2 * once.seconds, 2 * once.hidden))


def test_stages_on_two_types_of_devices_take_turns(make_spec: Any) -> None:
    """Two of one type are one; a slower second type lengthens the step, in which turns still hide."""

    def step(second: str, *, turns: bool = True) -> tuple[int, int]:
        spec = turning(make_spec, turns=turns, pools=[{"count": 4, "device": {"name": second}}])
        timer = PooledTimer(build_inventory(spec))
        return timer.step_ns(spec, SPANS), timer.turns_ns(spec, SPANS)[1]

    spec = turning(make_spec)
    alone = ReplayTimer(build_inventory(spec), spec)
    one, mixed = step("h100-sxm"), step("a100-80gb")
    assert one == (alone.step_ns(spec, SPANS), alone.turns_ns(spec, SPANS)[1])
    assert one[0] < mixed[0] < step("a100-80gb", turns=False)[0]
    assert mixed[1] > 0
