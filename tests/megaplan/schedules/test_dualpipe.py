"""DualPipe against the steps of its authors' program, against its closed forms, and against DualPipeV, into which it folds."""

from collections import Counter, deque
from random import Random

import pytest

from megaplan.schedules import (
    ActionKind,
    SlotTimes,
    actions,
    computations,
    cut_pipeline,
    in_flight,
    receive_buffers,
    replay,
    schedule_problems,
    slots_of_rank,
)

SIZES = [(2 * (pp := Random(seed).randint(1, 8)), 4 * pp + 2 * Random(-seed).randint(0, 12)) for seed in range(40)]
"""Random pipeline degrees and microbatches."""


def program(half: int, pp: int, m: int) -> list[str]:
    """The eight steps that a rank runs, `half` ranks from its end: F, B, I of phase 0 or 1, the next W, or a pair that overlaps.

    Source: github.com/deepseek-ai/DualPipe, dualpipe/dualpipe.py, the comments `Step 1: nF0` to `Step 8: nW`.
    """
    behind = pp // 2 - half - 1
    found = ["F0"] * (2 * behind) + ["F0", "F1"] * (half + 1) + ["I1", "W", "F1"] * behind
    for index in range(m // 2 - pp + half + 1):
        found += ["F0", "B1", "F1B0"] if index == 0 and behind == 0 else ["F0B1", "F1B0"]
    found += ["B1", "F1B0"] * behind
    # the second half of the backwards of step 6 defers its weights
    found += [f"{'B' if index <= half else 'I'}{1 - index % 2}" for index in range(2 * (half + 1))]
    return found + ["W", "I0"] * behind + ["W"] * (half + 1)


def by_program(rank: int, pp: int, m: int) -> list[str]:
    """The same with slots and microbatches: phase 0 of a rank of the first half is the direction from rank 0."""
    done, owed, found = Counter[str](), deque[str](), []

    def named(letter: str, phase: int) -> str:
        forward = phase == 0 if rank < pp // 2 else phase == 1
        number = done[f"{'F' if letter == 'F' else 'B'}{phase}"]
        done[f"{'F' if letter == 'F' else 'B'}{phase}"] += 1
        slot, microbatch = (rank, number) if forward else (2 * pp - 1 - rank, m // 2 + number)
        if letter == "I":
            owed.append(f"{slot}W{microbatch}")
        return f"{slot}{letter}{microbatch}"

    for word in program(min(rank, pp - 1 - rank), pp, m):
        if word == "W":
            found.append(owed.popleft())
        elif len(word) == 2:
            found.append(named(word[0], int(word[1])))
        else:
            found.append(f"({named('F', int(word[1]))};{named('B', int(word[3]))})OVERLAP_F_B")
    assert not owed
    return found


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_every_rank_runs_its_authors_steps(pp: int, m: int) -> None:
    assert [list(map(str, order)) for order in actions("dualpipe", pp, 1, m)] == [by_program(rank, pp, m) for rank in range(pp)]


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_each_half_of_the_microbatches_passes_its_own_copy(pp: int, m: int) -> None:
    """Once each on every slot of the copy: forward, then backward or its halves, in order."""
    for rank, order in enumerate(actions("dualpipe", pp, 1, m)):
        position = {(each.kind, each.slot, each.microbatch): place for place, each in enumerate(computations(order))}
        assert len(position) == len(list(computations(order)))
        expected = {(slot, slot // pp * (m // 2) + index) for slot in slots_of_rank("mirror", rank, pp, 1) for index in range(m // 2)}
        assert {(slot, microbatch) for _, slot, microbatch in position} == expected
        for slot, microbatch in expected:
            whole = position.get((ActionKind.BACKWARD, slot, microbatch))
            halves = [position.get((kind, slot, microbatch)) for kind in (ActionKind.INPUT, ActionKind.WEIGHT)]
            done = halves if whole is None else [whole]
            assert None not in done
            assert (whole is None) != (halves == [None, None])
            passed = [position[ActionKind.FORWARD, slot, microbatch], *done]
            assert passed == sorted(passed)  # type: ignore[type-var]


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_the_longest_wait_and_the_most_in_flight_are_the_closed_forms(pp: int, m: int) -> None:
    """arXiv:2412.19437, table 2: (p / 2 − 1)(FB + B − 3W), FB the time of a pair, and p + 1 activations."""
    unit, hidden = Random(pp * m).randint(1, 9), Random(m).choice([0, 40, 100])
    times = SlotTimes(*((unit,) * 2 * pp,) * 3, hidden)
    step = replay(actions("dualpipe", pp, 1, m), times, copies=2)
    pair = 3 * unit - unit * hidden // 100
    assert max(step.bubbles) == (pp // 2 - 1) * (pair + 2 * unit - 3 * unit)
    held = [max(sum(each.full) + sum(each.pending_weight) for each in rank) for rank in in_flight("dualpipe", pp, 1, m)]
    assert held == [pp + 1] * pp


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_it_is_a_v_of_half_as_many_ranks_whose_turn_is_a_message(pp: int, m: int) -> None:
    """Both take equally long for any times of the parts.

    If messages take time, the V is at most as long: its two middle slots send none.
    """
    random = Random(pp + m)
    parts = [tuple(random.randint(1, 50) for _ in range(pp)) for _ in range(3)]
    twice, once = SlotTimes(*(part * 2 for part in parts)), SlotTimes(*parts)
    kind, ranks, vpp, half = cut_pipeline("dualpipe", pp, 1, m)
    assert (kind, ranks, vpp, half) == ("dualpipev", pp // 2, 2, m // 2)
    folded = actions(kind, ranks, vpp, half)
    for p2p in (0, random.randint(1, 20)):
        step = replay(actions("dualpipe", pp, 1, m), twice, p2p=p2p, copies=2)
        shorter = replay(folded, once, p2p=p2p).makespan
        assert step.makespan == shorter if p2p == 0 else step.makespan >= shorter
        mirrored = [[(item.start, item.stop) for item in rank] for rank in step.ranks]
        assert mirrored == mirrored[::-1]


def test_either_end_receives_no_tokens_and_no_gradient_of_a_loss() -> None:
    assert receive_buffers("dualpipe", 2, 1, 6) == (((0, 3), (3, 0)), ((3, 0), (0, 3)))
    assert receive_buffers("dualpipe", 4, 1, 8)[1] == ((4, 4), (4, 4))


@pytest.mark.parametrize(
    ("pp", "vpp", "m", "codes"),
    [(3, 1, 8, ["MP313"]), (1, 1, 4, ["MP313"]), (4, 2, 8, ["MP313"]), (4, 1, 6, ["MP311"]), (4, 1, 9, ["MP312"]), (4, 1, 7, ["MP311"])],
)
def test_odd_ranks_and_microbatches_are_refused_with_what_would_run(pp: int, vpp: int, m: int, codes: list[str]) -> None:
    found = schedule_problems("dualpipe", pp, vpp, m)
    assert [each.code for each in found] == codes
    for key, values in found[0].remedies:
        for value in values if key in _NAMES else ():
            assert not schedule_problems("dualpipe", **{"pp": pp, "vpp": vpp, "num_microbatches": m, _NAMES[key]: value})  # type: ignore[arg-type]


_NAMES = {"mesh.pp": "pp", "mesh.vpp": "vpp", "schedule.num_microbatches": "num_microbatches"}
