"""Counts and times of the generated schedules against an independent replay of torch's orders (`schedules.json` says where from)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaplan.schedule import actions, in_flight, placement, replay, slot_owner

ENTRIES = json.loads((Path(__file__).parent / "schedules.json").read_text())["entries"]


def name(entry: dict[str, Any]) -> str:
    return f"{entry['kind']}-pp{entry['pp']}-vpp{entry['vpp']}-m{entry['num_microbatches']}"


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize("entry", ENTRIES, ids=name)
def test_oracle_entry(entry: dict[str, Any]) -> None:
    kind, pp, vpp, num_microbatches = entry["kind"], entry["pp"], entry["vpp"], entry["num_microbatches"]
    assert [slot_owner(placement(kind), slot, pp)[0] for slot in range(pp * vpp)] == entry["stage_to_rank"]
    vectors = in_flight(kind, pp, vpp, num_microbatches)
    assert [sorted(map(list, rank)) for rank in vectors] == [sorted(rank) for rank in entry["in_flight"]]
    assert [max(map(sum, rank)) for rank in vectors] == entry["peak"]
    orders = actions(kind, pp, vpp, num_microbatches)
    for timing in entry["timing"]:
        timeline = replay(orders, [timing["forward"]] * (pp * vpp), [timing["backward"]] * (pp * vpp))
        assert timeline.makespan == timing["makespan"]
        assert list(timeline.bubbles) == timing["bubbles"]
        assert list(timeline.bubbles_inside) == timing["bubbles_inside"]
