"""Counts and times of every schedule against an independent replay of torch's orders (`schedules.json` says where from)."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megaplan.schedules import KINDS, InFlight, SlotTimes, actions, in_flight, placement, replay, schedule_problems, slot_owner

ORACLE = json.loads((Path(__file__).parent / "schedules.json").read_text())
ENTRIES, REFUSED = ORACLE["entries"], ORACLE["refused"]


def name(entry: dict[str, Any]) -> str:
    return f"{entry['kind']}-pp{entry['pp']}-vpp{entry['vpp']}-m{entry['num_microbatches']}"


def degrees(entry: dict[str, Any]) -> tuple[str, int, int, int]:
    return entry["kind"], entry["pp"], entry["vpp"], entry["num_microbatches"]


def largest(vectors: tuple[InFlight, ...], *fields: str) -> int:
    return max(sum(sum(getattr(vector, field)) for field in fields) for vector in vectors)


def test_every_schedule_is_held_against_the_oracle() -> None:
    assert Counter(entry["kind"] for entry in ENTRIES) == {
        "gpipe": 14,
        "1f1b": 12,
        "interleaved_1f1b": 42,
        "looped_bfs": 42,
        "interleaved_zero_bubble": 42,
        "zbv": 14,
        "dualpipev": 8,
    }
    assert {entry["kind"] for entry in ENTRIES} == set(KINDS) - {"dualpipe", "paired_1f1b"}  # which torch does not have


@pytest.mark.requirement("R-26")
@pytest.mark.requirement("R-27")
@pytest.mark.parametrize("entry", ENTRIES, ids=name)
def test_oracle_entry(entry: dict[str, Any]) -> None:
    kind, pp, vpp, num_microbatches = degrees(entry)
    assert [slot_owner(placement(kind), slot, pp)[0] for slot in range(pp * vpp)] == entry["stage_to_rank"]
    vectors = in_flight(kind, pp, vpp, num_microbatches)
    assert [sorted([list(full), list(pending)] for full, pending in rank) for rank in vectors] == [
        sorted(rank) for rank in entry["vectors"]
    ]
    assert [largest(rank, "full", "pending_weight") for rank in vectors] == entry["peak"]
    assert [largest(rank, "full") for rank in vectors] == entry["peak_if_freed_at_I"]
    assert [largest(rank, "pending_weight") for rank in vectors] == entry["peak_pending_W"]
    by_chunk = [[max(v.full[c] + v.pending_weight[c] for v in rank) for c in range(vpp)] for rank in vectors]
    assert by_chunk == entry["peak_per_chunk"]


@pytest.mark.parametrize("entry", ENTRIES, ids=name)
def test_oracle_times(entry: dict[str, Any]) -> None:
    kind, pp, vpp, num_microbatches = degrees(entry)
    orders = actions(kind, pp, vpp, num_microbatches)
    assert len(entry["timing"]) >= 3
    for key, (makespan, bubbles, inside) in entry["timing"].items():
        times = {part.rstrip("0123456789"): int(part.lstrip("FIWB")) for part in key.split("_")}
        slots = SlotTimes.equal(pp * vpp, times["F"], times["I"], times["W"])
        if "FB" in times:  # the longer part alone: the shorter one is hidden
            assert times["FB"] == max(times["F"], times["I"] + times["W"])
            slots = SlotTimes(slots.forward, slots.input, slots.weight, hidden_percent=100)
        step = replay(orders, slots)
        assert (step.makespan, list(step.bubbles), list(step.bubbles_inside)) == (makespan, bubbles, inside)


@pytest.mark.parametrize("entry", REFUSED, ids=name)
def test_what_the_runtime_refuses_is_refused(entry: dict[str, Any]) -> None:
    assert [found.code for found in schedule_problems(*degrees(entry))] == ["MP311"]
