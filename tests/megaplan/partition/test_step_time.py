"""`objective: step_time`: the certificate states the replayed step, and its bound holds for every split."""

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

import megaplan
from megaplan.cost.values import LayerTime, ModelTimes, replayed
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import cuts_of, spans_of
from megaplan.partition.best_cuts import neighbours
from megaplan.partition.bounds import StepBound
from megaplan.partition.choose import choose_cuts
from megaplan.partition.constraints import Constraints
from megaplan.partition.memory import Memory
from megaplan.partition.paths import PARTS, TURN_PARTS, schedule_paths
from megaplan.partition.step import FAR, Pipeline, StepTimes, shorten, step_time_cuts
from megaplan.partition.values import equal_cuts
from megaplan.schedules import KINDS, Leg, actions, cut_pipeline, link, num_copies, placement, replay
from megaplan.schedules.registry import PAIRED
from megaplan.spec.load import load_spec
from megaplan.units import format_bytes

REPOSITORY = Path(__file__).parents[3]
SINGLE = ("1f1b", "gpipe", "dualpipe")


ALL = [*((kind, False) for kind in KINDS), *((kind, True) for kind in PAIRED)]
"""Schedules, and True for pairs in turns."""


def times_of(random: Random, num_layers: int, p2p: int, *, turns: bool = False) -> ModelTimes:
    def one(top: int) -> LayerTime:
        return LayerTime(random.randint(0, top), random.randint(0, top), random.randint(0, top))

    def exchanging() -> LayerTime:
        legs = [tuple(Leg(random.randint(0, 6), random.randint(0, 6)) for _ in range(2)) for _ in range(2)]
        forward, backward = (sum(leg.computing + leg.exchanging for leg in each) + random.randint(0, 3) for each in legs)
        weight = random.randint(0, sum(leg.computing for leg in legs[1]))
        return LayerTime(forward, backward - weight, weight, forward_legs=legs[0], backward_legs=legs[1])

    layers = tuple(exchanging() if turns and random.random() < 0.6 else one(20) for _ in range(num_layers))
    return ModelTimes(layers, one(10), one(40), (p2p,))


@pytest.mark.requirement("R-29")
@pytest.mark.parametrize(("kind", "turns"), ALL)
def test_no_cuts_are_below_the_bound(kind: str, turns: bool) -> None:
    """Against every split of small stacks; the bound is above none and reaches a fair part of the best."""
    random, copies, vpp = Random(3), num_copies(placement(kind)), 1 if kind in SINGLE else 2
    pp, shares = 2 * copies, []
    for number in range(40):
        num_layers, num_microbatches = random.randint(5, 9), 4 * copies
        times = times_of(random, num_layers, random.choice((0, 3)), turns=turns)
        rules = Constraints(forbid=(3,)) if number % 3 == 0 else Constraints(pin=(2,)) if number % 3 == 1 else Constraints()
        orders = actions(kind, pp, vpp, num_microbatches)
        cut_kind, *_, count = cut_pipeline(kind, pp, vpp, num_microbatches)
        paths = schedule_paths(kind, pp, vpp, num_microbatches, turns=times.in_turns)
        step = StepTimes([times] * pp * vpp, link(orders, pp * vpp * copies, copies), paths, copies)
        steps = [step.of(cuts) for cuts in combinations(range(1, num_layers), pp * vpp - 1) if not rules.broken_by(cuts)]
        bound = StepBound([times] * pp * vpp, rules, placement(cut_kind), paths).lower_bound(max(steps), count)
        assert bound <= min(steps), (number, times)
        shares.append(bound / min(steps))
    assert sum(shares) / len(shares) > 0.7


@pytest.mark.parametrize(("kind", "turns"), ALL)
def test_every_path_is_within_the_step(kind: str, turns: bool) -> None:
    random, pp, vpp = Random(9), 4, 1 if kind in SINGLE else 2
    orders, copies = actions(kind, pp, vpp, 8), num_copies(placement(kind))
    paths, spans = schedule_paths(kind, pp, vpp, 8, turns=turns), [(slot, slot + 1) for slot in range(pp * vpp)]
    for _ in range(20):
        times = times_of(random, pp * vpp, 5, turns=turns)
        slots = times.of_slots(spans)
        parts = [[getattr(slot, part) for slot in slots] for part in (TURN_PARTS if turns else PARTS)]
        makespan = replay(orders, replayed([times] * len(spans), spans, copies), p2p=5, copies=copies).makespan
        assert max(path.length(*parts, p2p=5) for path in paths) <= makespan


def test_turns_shorten_a_path_by_what_its_pairs_may_hide() -> None:
    """A path without exchanges is as long as that of pairs in sequence; one with them is shorter."""
    random, spans = Random(4), [(slot, slot + 1) for slot in range(8)]
    slots = times_of(random, 8, 0, turns=True).of_slots(spans)
    lengths = []
    for turns, names in ((False, PARTS), (True, TURN_PARTS)):
        paths = schedule_paths("dualpipev", 4, 2, 8, turns=turns)
        lengths.append(
            [
                max(path.length(*([getattr(slot, name) for slot in own] for name in names), p2p=0) for path in paths)
                for own in (slots, [replace(slot, forward_legs=(), backward_legs=()) for slot in slots])
            ]
        )
    (serial, same), (hidden, without) = lengths
    assert same == serial == without > hidden


@pytest.mark.requirement("R-29")
@pytest.mark.parametrize(("kind", "vpp"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2), ("dualpipev", 2)])
def test_the_certificate_states_the_replayed_step(kind: str, vpp: int) -> None:
    asked = ["mesh.pp=4", f"mesh.vpp={vpp}", f"schedule.kind={kind}", "split.objective=step_time"]
    spec = load_spec(str(REPOSITORY / "plans/nam56r-8xh200.yaml"), asked).spec
    inventory = build_inventory(spec)
    cuts = choose_cuts(spec, inventory)
    certificate, pipeline = cuts.certificate, Pipeline(spec, inventory)
    assert (certificate.objective, certificate.measures, certificate.unit) == ("step_time", "step", "ns")
    assert certificate.value == pipeline.step.of(cuts_of(cuts.spans))
    assert certificate.value <= pipeline.step.of(equal_cuts(52, 4 * vpp))
    assert 0 < certificate.lower_bound <= certificate.value
    assert certificate.optimal == (certificate.gap == 0)
    assert certificate.costs == pipeline.costs.of_slots(cuts.spans)
    same = choose_cuts(spec, inventory)
    assert (same, same.certificate) == (cuts, certificate)
    again = choose_cuts(spec, inventory, baseline=cuts.spans)
    assert again == cuts or again.certificate.value < certificate.value  # a search that proved no optimum may get further from its own end
    assert again == cuts or not certificate.optimal


def test_only_who_asks_how_good_cuts_are_pays_for_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[int] = []

    def count(self: StepBound, reached: int, num_microbatches: int) -> int:
        bounds.append(reached)
        return original(self, reached, num_microbatches)

    original = StepBound.lower_bound
    monkeypatch.setattr(StepBound, "lower_bound", count)
    path = str(REPOSITORY / "plans/nam56r-8xh200.yaml")
    estimate = megaplan.estimate(path)
    assert estimate.step_time is not None
    assert bounds == []
    cuts = estimate.job.cuts
    assert cuts is not None
    assert cuts.certificate is cuts.certificate
    assert bounds == [cuts.certificate.value]
    assert megaplan.split(path).plan.decisions.split.certificate.lower_bound == cuts.certificate.lower_bound


@pytest.mark.requirement("R-24")
def test_constraints_hold_for_step_time() -> None:
    asked = ["mesh.pp=4", "split.objective=step_time", "split.pin=[20]", "split.forbid=[6,7,8]", "split.together=[[30,36]]"]
    spec = load_spec(str(REPOSITORY / "plans/nam56r-8xh200.yaml"), asked).spec
    cuts = cuts_of(choose_cuts(spec, build_inventory(spec)).spans)
    assert 20 in cuts
    assert not set(cuts) & {6, 7, 8, 31, 32, 33, 34, 35}


def test_one_slot_takes_its_whole_load_and_that_is_proven() -> None:
    spec = load_spec(str(REPOSITORY / "plans/tiny-hybrid.yaml"), ["split.objective=step_time"]).spec
    inventory = build_inventory(spec)
    found = step_time_cuts(spec, inventory, None, None)
    assert found.cuts == ()
    assert found.certificate.value == sum(Pipeline(spec, inventory).costs.of_slots(spans_of((), len(inventory.layers)))) * (
        spec.schedule.num_microbatches
    )
    assert found.certificate.optimal


@pytest.mark.requirement("R-29")
@pytest.mark.parametrize("size", [4, 12, 13])
def test_no_move_that_fits_is_shorter(size: int) -> None:
    """A note says which shorter steps memory refuses, by how many bytes, and what that costs."""
    asked = ["split.objective=step_time", f"batch.micro_batch_size={size}"]
    spec = load_spec(str(REPOSITORY / "plans/nam56r-8xh200.yaml"), asked).spec
    inventory = build_inventory(spec)
    cuts = choose_cuts(spec, inventory)
    pipeline, memory = Pipeline(spec, inventory), Memory(spec, inventory)
    assert max(memory.excesses(cuts.spans)) <= 0
    shorter = []
    for moved in neighbours([cut - 1 for cut in cuts_of(cuts.spans)], 51, places=FAR):
        tried = tuple(place + 1 for place in moved)
        if pipeline.step.of(tried) < cuts.certificate.value:
            shorter.append(tried)
    assert all(max(memory.excesses(spans_of(tried, 52))) > 0 for tried in shorter)
    notes = [found.detail for found in cuts.diagnostics if found.code == "MP334"]
    assert bool(notes) == bool(shorter) == (size == 13), (
        "memory moves the cuts of the largest size alone; at 12 the best lie past cuts that do not fit"
    )
    for note in notes:
        found = re.fullmatch(r"cuts (\[.*\]) have the .* of pp rank (\d) by (.*)\nstep: ([\d,]+) ns there, ([\d,]+) here", note)
        assert found is not None
        free = tuple(json.loads(found[1]))
        excess = memory.excesses(spans_of(free, 52))[int(found[2])]
        assert found[3] == format_bytes(excess)
        assert excess > 0
        assert (f"{pipeline.step.of(free):,}", f"{cuts.certificate.value:,}") == (found[4], found[5])
        assert pipeline.step.of(free) < cuts.certificate.value


def test_long_schedules_end_climbs_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """At cuts that are no worse than those that they start from."""
    asked = ["mesh.pp=4", "mesh.dp_shard=2", "split.objective=step_time"]
    spec = load_spec(str(REPOSITORY / "plans/nam56r-8xh200.yaml"), asked).spec
    inventory = build_inventory(spec)
    whole = choose_cuts(spec, inventory).certificate
    monkeypatch.setattr("megaplan.partition.step.MAX_ACTIONS", 10 * 256)
    early = choose_cuts(spec, inventory)
    equal = Pipeline(spec, inventory).step.of(equal_cuts(52, 8))
    assert whole.value < early.certificate.value <= equal


class CountedStep:
    """A step that no move makes shorter, and how often it was replayed."""

    exhausted = False

    def __init__(self) -> None:
        self.num_replays = 0

    def of(self, cuts: tuple[int, ...]) -> int:
        self.num_replays += 1
        return 10 if cuts == (3, 6, 9) else 11

    def is_at_least(self, *_: object) -> bool:
        return False


def test_a_climb_ends_with_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaplan.partition.step.MAX_REPLAYS", 5)
    step = CountedStep()
    found = shorten(step, (3, 6, 9), Constraints(), 12, lambda _: True)  # type: ignore[arg-type]
    assert found == (3, 6, 9)
    assert step.num_replays <= 1 + 5


def test_a_climb_goes_on_from_the_best_cuts() -> None:
    """Every trial is one move from the best so far, so that gains add up and the last cuts are no worse than any neighbour."""
    tried: list[tuple[int, ...]] = []
    target = (2, 8, 10)

    class Towards(CountedStep):
        def of(self, cuts: tuple[int, ...]) -> int:
            tried.append(cuts)
            return sum(abs(cut - aim) for cut, aim in zip(cuts, target, strict=True))

    assert shorten(Towards(), (3, 4, 5), Constraints(), 13, lambda _: True) == target  # type: ignore[arg-type]
    best = (3, 4, 5)
    for cuts in tried:
        near = {tuple(place + 1 for place in moved) for moved in neighbours([cut - 1 for cut in best], 12)}
        assert cuts == best or cuts in near, (best, cuts)
        if sum(abs(cut - aim) for cut, aim in zip(cuts, target, strict=True)) < sum(abs(c - a) for c, a in zip(best, target, strict=True)):
            best = cuts
