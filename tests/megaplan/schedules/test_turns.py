"""The time of a pair in turns: against a simulation unit by unit, its bounds, and pairs by hand."""

from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaplan.schedules import Action, ActionKind, Course, Leg, Legs, Overlap, SlotTimes, actions, link, num_copies, placement
from megaplan.schedules.registry import PAIRED
from megaplan.schedules.turns import exchanged, joined, pair_length, rest

LEGS = st.lists(st.builds(Leg, st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=5).map(tuple)
PARTS = st.tuples(LEGS, st.integers(0, 6)).map(lambda part: Course(part[0], alone(*part)))


def alone(legs: Legs, after: int) -> int:
    """Time of a computation alone, with `after` behind its last exchange."""
    return after + sum(leg.computing + leg.exchanging for leg in legs)


def unit_by_unit(*parts: Course) -> int:
    """Time of a pair, one unit of either stream at a time.

    Each computation is a script of single units; an exchange is queued behind those that began before it.
    """
    scripts = []
    for legs, length, _ in parts:
        script: deque[tuple[str, int]] = deque()
        for leg in legs:
            script += [("compute", 0)] * leg.computing
            script += [("start", leg.exchanging), ("pass" if leg.passes_turn else "stay", 0), ("wait", 0)]
        script += [("compute", 0)] * rest(legs, length)
        scripts.append(script)
    queue: deque[list[int]] = deque()
    waits: list[list[int] | None] = [None, None]
    now = turn = 0
    while any(scripts):
        computed = False
        while not computed:  # all that takes no time, up to a unit of computation or a wait
            script = scripts[turn]
            if not script:
                if not scripts[1 - turn]:
                    break
                turn = 1 - turn
                continue
            what, units = script[0]
            own = waits[turn]
            if what == "wait" and any(own is each for each in queue):
                break
            script.popleft()
            if what == "start":
                waits[turn] = [units]
                queue.append(waits[turn])
            elif what == "pass" and scripts[1 - turn]:
                turn = 1 - turn
            computed = what == "compute"
            _leave(queue)
        if not computed and not any(scripts):
            break
        now += 1
        if queue:
            queue[0][0] -= 1
        _leave(queue)
    return now


def _leave(queue: deque[list[int]]) -> None:
    while queue and queue[0][0] == 0:
        queue.popleft()


@given(PARTS, PARTS)
def test_the_time_of_a_pair_is_that_of_a_simulation(forward: Course, backward: Course) -> None:
    assert pair_length(forward, backward) == unit_by_unit(forward, backward)


@given(PARTS, PARTS)
def test_a_pair_is_between_its_streams_and_its_parts_in_sequence(forward: Course, backward: Course) -> None:
    length, parts = pair_length(forward, backward), (forward, backward)
    exchanges = sum(exchanged(legs) for legs, _, _ in parts)
    serial = sum(whole for _, whole, _ in parts)
    assert max(serial - exchanges, exchanges, *(whole for _, whole, _ in parts)) <= length <= serial


def test_pairs_by_hand() -> None:
    """All is hidden but a last unit; nothing is; one exchange waits for the other's; a short one waits for its turn in the queue."""
    leg = Leg(4, 3)
    two, one = Course((leg, leg), 16), Course((Leg(1, 9),), 10)
    assert pair_length(two, two) == 21
    assert pair_length(Course((), 7), two) == 23
    assert pair_length(one, one) == 19
    assert pair_length(Course((Leg(1, 2), Leg(1, 0, passes_turn=False), Leg(1, 9)), 14), Course((Leg(2, 5),), 7)) == 18


def test_one_host_launches_both_parts() -> None:
    two = Course((Leg(4, 3), Leg(4, 3)), 16)
    assert [pair_length(two._replace(launched=time), two._replace(launched=13)) for time in (5, 8, 9, 16)] == [21, 21, 22, 29]


@given(LEGS, st.integers(0, 6), LEGS, st.integers(0, 6))
def test_joined_computations_take_as_long_as_both(one: Legs, after: int, other: Legs, end: int) -> None:
    first, then = alone(one, after), alone(other, end)
    both = joined(one, first, other)
    assert (exchanged(both), len(both)) == (exchanged(one) + exchanged(other), len(one) + len(other))
    assert rest(both, first + then) == (end if other else after + end)


@pytest.mark.parametrize("kind", PAIRED)
def test_steps_in_turns_save_what_their_pairs_hide(kind: str) -> None:
    """On every rank; without exchanges they are those of pairs in sequence."""
    random, pp, vpp = Random(5), 4, 1 if num_copies(placement(kind)) > 1 else 2
    copies = num_copies(placement(kind))
    linked = link(actions(kind, pp, vpp, 12), pp * vpp * copies, copies)
    for _ in range(20):
        legs = tuple((tuple(Leg(random.randint(0, 9), random.randint(0, 9)) for _ in range(2)),) * 2 for _ in range(pp * vpp)) * copies
        courses = tuple(tuple(Course(part, alone(part, 3)) for part in each) for each in legs)
        forward, backward = zip(*courses, strict=True)
        serial = SlotTimes(tuple(each.length for each in forward), tuple(each.length - 2 for each in backward), (2,) * len(courses))
        turns = serial._replace(courses=courses)
        before, after = (linked.replay(times, p2p=2) for times in (serial, turns))
        assert sum(before.busy) - sum(after.busy) == linked.hidden(turns) > 0
        assert after.makespan < before.makespan
        assert linked.hidden(serial) == 0
        nothing = serial._replace(courses=tuple(tuple(each._replace(legs=()) for each in slot) for slot in courses))
        assert linked.replay(nothing, p2p=2) == before
    pair = Overlap(Action(ActionKind.FORWARD, 0, 1), Action(ActionKind.BACKWARD, 1, 0))
    one = Course((Leg(4, 3),), 7)
    assert SlotTimes((7, 7), (5, 5), (2, 2), courses=((one, one),) * 2).of(pair) == pair_length(one, one) == 11
