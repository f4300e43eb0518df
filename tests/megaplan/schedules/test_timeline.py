"""The replay: bubbles of equal stages in closed form, uneven stages by hand, orders that cannot run."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaplan.schedules import (
    KINDS,
    Action,
    ActionKind,
    LinkedOrders,
    SlotTimes,
    actions,
    link,
    num_copies,
    placement,
    replay,
    schedule_problems,
)
from megaplan.schedules.repeats import Node, Repeat, repeat_of


@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 4), (4, 8), (8, 16)])
def test_equal_stages_wait_for_fill_and_drain(pp: int, m: int) -> None:
    timeline = replay(actions("1f1b", pp, 1, m), SlotTimes.equal(pp, 2, 4, 1))
    assert timeline.makespan == (m + pp - 1) * 7
    assert timeline.bubbles == ((pp - 1) * 7,) * pp
    assert timeline.bubbles_inside[-1] == 0
    assert timeline.busy == (m * 7,) * pp


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_interleaving_divides_the_bubble_by_the_chunks(pp: int, vpp: int, m: int) -> None:
    timeline = replay(actions("interleaved_1f1b", pp, vpp, m), SlotTimes.equal(pp * vpp, 2, 4, 1))
    assert timeline.bubbles == ((pp - 1) * 7,) * pp


EQUAL = [(1, 1, 1), (2, 3, 1), (4, 5, 3), (3, 2, 2)]
ROUNDS = [(pp, vpp, m) for pp in (2, 3, 4, 8) for vpp in (1, 2, 3) for m in (pp, pp + 1, 2 * pp, 5 * pp)]


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("forward", "backward_input", "weight"), EQUAL)
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"])
def test_the_wait_of_equal_chunks_is_the_closed_form(kind: str, forward: int, backward_input: int, weight: int) -> None:
    half = kind == "interleaved_zero_bubble"
    hop = forward + backward_input + (-weight if half else weight)
    checked = 0
    for pp, vpp, m in ROUNDS:
        if (kind in ("gpipe", "1f1b") and vpp > 1) or schedule_problems(kind, pp, vpp, m):
            continue
        step = replay(actions(kind, pp, vpp, m), SlotTimes.equal(pp * vpp, forward, backward_input, weight))
        assert step.bubbles == ((pp - 1) * hop,) * pp, (pp, vpp, m)
        assert step.busy == (m * vpp * (forward + backward_input + weight),) * pp
        checked += 1
    assert checked >= 16


@given(
    st.sampled_from(KINDS),
    st.integers(2, 5),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(0, 100),
    st.data(),
)
def test_every_action_waits_for_its_inputs_and_no_longer(
    kind: str, pp: int, rounds: int, p2p: int, hidden_percent: int, data: st.DataObject
) -> None:
    """Compared with the rules: a start is the latest of the rank's last stop and the arrivals of the action's inputs."""
    vpp, copies = 1 if kind in ("gpipe", "1f1b", "dualpipe") else 2, num_copies(placement(kind))
    pp *= copies
    num_slots, m = pp * vpp * copies, pp * rounds + (pp if kind in ("dualpipev", "dualpipe") else 0)
    parts = num_slots // copies
    lengths = st.lists(st.integers(1, 50), min_size=num_slots, max_size=num_slots).map(tuple)
    times = SlotTimes(data.draw(lengths), data.draw(lengths), data.draw(lengths), hidden_percent)
    step = replay(actions(kind, pp, vpp, m), times, p2p=p2p, copies=copies)
    stops: dict[tuple[str, int, int], tuple[int, int]] = {}
    for rank, timed in enumerate(step.ranks):
        for item in timed:
            for part in item.action.parts:
                stops[
                    "F" if part.kind is ActionKind.FORWARD else "W" if part.kind is ActionKind.WEIGHT else "I", part.slot, part.microbatch
                ] = (
                    item.stop,
                    rank,
                )
    for rank, timed in enumerate(step.ranks):
        free = 0
        for item in timed:
            arrivals = [free]
            for part in item.action.parts:
                if part.kind is ActionKind.FORWARD:
                    read = ("F", part.slot - 1, part.microbatch) if part.slot % parts else None
                elif part.kind is ActionKind.WEIGHT:
                    read = ("I", part.slot, part.microbatch)
                else:
                    read = ("F", part.slot, part.microbatch) if (part.slot + 1) % parts == 0 else ("I", part.slot + 1, part.microbatch)
                if read is not None:
                    stop, owner = stops[read]
                    arrivals.append(stop + (p2p if owner != rank else 0))
            assert item.start == max(arrivals)
            assert item.stop == item.start + times.of(item.action)
            free = item.stop
    assert step.makespan == max(stop for stop, _ in stops.values())


def test_uneven_stages_by_hand() -> None:
    timeline = replay(actions("1f1b", 2, 1, 2), SlotTimes((1, 3), (1, 3), (1, 1)))
    assert [(str(t.action), t.start, t.stop) for t in timeline.ranks[0]] == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 8, 10), ("0B1", 15, 17)]
    assert [(str(t.action), t.start, t.stop) for t in timeline.ranks[1]] == [("1F0", 1, 4), ("1B0", 4, 8), ("1F1", 8, 11), ("1B1", 11, 15)]
    assert (timeline.makespan, timeline.bubbles, timeline.bubbles_inside) == (17, (11, 3), (11, 0))


def test_an_order_that_waits_forever_names_who_waits() -> None:
    orders = (
        (Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.BACKWARD, 0, 0)),
        (Action(ActionKind.BACKWARD, 1, 0), Action(ActionKind.FORWARD, 1, 0)),
    )
    with pytest.raises(ValueError, match="0B0, 1B0 wait"):
        link(orders, 2)


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (8, 20)])
def test_split_backwards_leave_only_the_stagger(pp: int, m: int) -> None:
    step = replay(actions("zbv", pp, 2, m), SlotTimes.equal(2 * pp))
    assert step.bubbles == (pp - 1,) * pp
    assert step.bubbles_inside == (0,) * pp
    half = replay(actions("interleaved_zero_bubble", pp, 2, m), SlotTimes.equal(2 * pp, 4, 5, 3))
    assert half.bubbles == ((pp - 1) * (4 + 5 - 3),) * pp


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (8, 20)])
@pytest.mark.parametrize("hidden_percent", [0, 50, 100])
def test_an_overlap_hides_a_share_of_its_shorter_part(pp: int, m: int, hidden_percent: int) -> None:
    """The closed form is that of F = I = W."""
    pair = 2 + 4 - 2 * hidden_percent // 100
    step = replay(actions("dualpipev", pp, 2, m), SlotTimes((2,) * 2 * pp, (2,) * 2 * pp, (2,) * 2 * pp, hidden_percent))
    assert max(step.bubbles) == (pp - 1) * (pair + 4 - 3 * 2)


def test_a_boundary_takes_time_between_ranks_and_none_at_the_turn_of_a_v() -> None:
    looped = replay(actions("looped_bfs", 2, 2, 1), SlotTimes.equal(4), p2p=10)
    assert looped.makespan == 4 * 3 + 6 * 10
    turned = replay(actions("zbv", 2, 2, 1), SlotTimes.equal(4), p2p=10)
    assert turned.makespan == replay(actions("zbv", 2, 2, 1), SlotTimes.equal(4)).makespan + 4 * 10


def test_the_makespan_alone_is_the_replays() -> None:
    linked = link(actions("dualpipev", 4, 2, 9), 8)
    times = SlotTimes(tuple(range(1, 9)), tuple(range(3, 11)), tuple(range(8, 0, -1)))
    assert linked.makespan(times, p2p=2) == linked.replay(times, p2p=2).makespan


def test_an_overlap_hides_nothing_unless_that_is_stated() -> None:
    """torch runs the two one after the other; so do times of which nothing else is said, and equal ones."""
    orders, sizes = actions("dualpipev", 2, 2, 4), (1000,) * 4
    stated = replay(orders, SlotTimes(sizes, sizes, sizes, hidden_percent=0)).makespan
    assert (
        replay(orders, SlotTimes(sizes, sizes, sizes)).makespan == replay(orders, SlotTimes.equal(4, 1000, 1000, 1000)).makespan == stated
    )


LONG = [
    ("1f1b", 4, 1, 40),
    ("interleaved_1f1b", 4, 2, 64),
    ("interleaved_1f1b", 3, 3, 45),
    ("zbv", 4, 2, 50),
    ("dualpipev", 4, 2, 50),
    ("paired_1f1b", 4, 1, 50),
    ("interleaved_zero_bubble", 4, 2, 64),
    ("gpipe", 4, 1, 24),
    ("looped_bfs", 4, 2, 24),
]


def counted(linked: LinkedOrders, times: SlotTimes, p2p: int, monkeypatch: pytest.MonkeyPatch) -> tuple[object, int]:
    """The replay, and how many actions were replayed for it rather than taken from earlier periods."""
    replayed = 0

    def count(self: LinkedOrders, stops: list[int], free: list[int], lengths: list[int], p2p: int, stop: int) -> None:
        nonlocal replayed
        before = len(stops)
        original(self, stops, free, lengths, p2p, stop)
        replayed += len(stops) - before

    original = LinkedOrders._advance
    with monkeypatch.context() as patched:
        patched.setattr(LinkedOrders, "_advance", count)
        return linked.replay(times, p2p=p2p), replayed


@pytest.mark.parametrize(("kind", "pp", "vpp", "m"), LONG)
def test_periods_that_are_not_replayed_end_as_replayed_ones(kind: str, pp: int, vpp: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random, linked, shorter = Random(f"{kind} {pp}"), link(actions(kind, pp, vpp, m), pp * vpp), 0
    for number in range(60):
        base, spread = ((1, 1), (10, 3), (1000, 20), (0, 2), (10**7, 10**6))[number % 5]
        sizes = [tuple(base + random.randint(0, spread) for _ in range(pp * vpp)) for _ in range(3)]
        times, p2p = SlotTimes(*sizes, hidden_percent=random.choice((0, 40))), random.choice((0, 1, 7, 500))
        found, replayed = counted(linked, times, p2p, monkeypatch)
        plain, all_actions = counted(linked._replace(repeat=None), times, p2p, monkeypatch)
        assert found == plain, (number, times)
        assert all_actions == len(linked.nodes)
        shorter += replayed < all_actions
    assert (shorter > 10) == (linked.repeat is not None) == (kind not in ("gpipe", "looped_bfs"))


def test_what_repeats_is_found_between_fill_and_drain() -> None:
    def chain(shapes: str) -> list[Node]:
        return [(0, ord(shape), (at - 2,) if at > 3 else ()) for at, shape in enumerate(shapes)]

    assert repeat_of(chain("fghi" + "abaac" * 6 + "abxyz")) == Repeat(start=4, stop=36, period=5, reach=5)
    assert repeat_of(chain("fghi" + "abaac" * 3 + "xyz")) is None
    assert repeat_of(chain("fghi" + "aaaaabbbbb" * 6 + "aaxyz")) == Repeat(start=4, stop=66, period=10, reach=10)
    assert repeat_of(chain("abcdefghijklmnop")) is None
    assert repeat_of([]) is None
    far = [(0, 0, (max(0, at - 7),)) for at in range(40)]
    assert repeat_of(far) == Repeat(start=7, stop=40, period=1, reach=7)


def test_a_period_is_steady_where_all_that_is_waited_for_is_as_late() -> None:
    repeat = Repeat(start=0, stop=100, period=2, reach=4)
    stops = [0, 0, 1, 5, 11, 15, 21, 25]
    assert repeat.is_steady(stops, 10)
    assert not repeat.is_steady(stops, 9)
    assert not repeat.is_steady(stops[:7], 10), "within its reach one node was not so late"
    assert not repeat.is_steady(stops[-5:], 10), "nothing to compare the first of them with"
