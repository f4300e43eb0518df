"""Two computations that take turns (`megarun.parallel.groups.turns`): their order, and what runs behind an exchange."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaplan.schedules import Course, Leg, Legs
from megaplan.schedules.turns import pair_length
from megarun.parallel.groups.expert import ExpertParallel, MeasuredRouting, _exchange
from megarun.parallel.groups.turns import Turns, hand_over, takes_turns

CPU = torch.device("cpu")


def steps(log: list[str], name: str, count: int) -> Callable[[], None]:
    """A computation of some steps, whose turn ends after each except the last."""

    def run() -> None:
        for step in range(count):
            log.append(f"{name}{step}")
            if step < count - 1:
                hand_over()

    return run


@pytest.mark.parametrize("runs", range(20))
def test_turns_alternate_and_the_longer_one_ends_alone(runs: int) -> None:
    """The same order in every run, whatever the threads' timing."""
    first, second, log = 1 + runs % 5, 1 + runs // 5, list[str]()
    Turns(steps(log, "F", first), steps(log, "B", second), CPU).run()
    expected, left, turn = [], [[f"F{step}" for step in range(first)], [f"B{step}" for step in range(second)]], 0
    while any(left):
        expected.append(left[turn].pop(0))
        turn = 1 - turn if left[1 - turn] else turn
    assert log == expected


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_either_reaches_the_caller_and_stops_the_other(failing: int) -> None:
    log: list[str] = []

    def fails() -> None:
        hand_over()
        raise ValueError("lost")

    parts = [steps(log, "F", 5), steps(log, "F", 5)]
    parts[failing] = fails
    with pytest.raises(ValueError, match="lost"):
        Turns(parts[0], parts[1], CPU).run()
    assert len(log) < 5
    assert not takes_turns()


def test_exchanges_of_one_are_in_flight_while_the_other_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward and a backward of one exchange each: between its start and its wait the other computes."""
    log: list[str] = []

    class Work:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> None:
            log.append(f"wait {self.name}")

    def started(arrived: Any, _leaving: Any, *_: Any, **__: Any) -> Work:
        name = "backward" if torch._C._current_autograd_node() is not None else "forward"
        log.append(f"start {name}")
        arrived.fill_(1.0)
        return Work(name)

    monkeypatch.setattr(dist, "all_to_all_single", started)
    ep = ExpertParallel(2, 0, None, MeasuredRouting())
    earlier = torch.ones(4, 3, requires_grad=True)
    held = _exchange(ep, (2, 2), (2, 2), earlier * 2)[0]
    held.register_hook(lambda gradient: log.append("compute backward") or gradient * 1)
    earlier.register_hook(lambda gradient: log.append("compute backward") or gradient * 1)
    log.clear()

    def forward() -> None:
        log.append("compute forward")
        _exchange(ep, (2, 2), (2, 2), torch.ones(4, 3))
        log.append("compute forward")

    Turns(forward, lambda: held.sum().backward(), CPU).run()
    assert log == [
        "compute forward", "start forward", "compute backward", "start backward",
        "wait forward", "compute forward", "wait backward", "compute backward",
    ]  # fmt: skip


def test_exchanges_without_a_pair_are_not_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and in a pair whose other part has ended: NCCL then runs them in the stream of the computation."""
    calls: list[bool] = []

    def moved(arrived: Any, leaving: Any, *_: Any, async_op: bool = False, **__: Any) -> None:
        calls.append(async_op)
        arrived.copy_(leaving)

    monkeypatch.setattr(dist, "all_to_all_single", moved)
    ep, rows = ExpertParallel(2, 0, None, MeasuredRouting()), torch.ones(4, 3, requires_grad=True)

    def exchanged() -> None:
        _exchange(ep, (2, 2), (2, 2), rows)[0].sum().backward()

    exchanged()
    Turns(lambda: None, exchanged, CPU).run()
    assert calls == [False] * 4


class Clock:
    """A stream of computations and one of exchanges, on which a pair's parts put what they do."""

    def __init__(self) -> None:
        self.now = self.free = 0

    def compute(self, time: int) -> None:
        """The computing stream is busy."""
        self.now += time

    def exchange(self, arrived: Any, leaving: Any, *_: Any, async_op: bool = False, **__: Any) -> "Flight | None":
        """An exchange, whose rows say how long it takes, behind those before it."""
        arrived.copy_(leaving)
        self.free = max(self.now, self.free) + int(leaving[0, 0])
        flight = Flight(self, self.free)
        if async_op:
            return flight
        flight.wait()
        return None


class Flight:
    """Rows on their way."""

    def __init__(self, clock: Clock, end: int) -> None:
        self.clock, self.end = clock, end

    def wait(self) -> None:
        """The computing stream continues behind the exchange."""
        self.clock.now = max(self.clock.now, self.end)


@pytest.mark.parametrize("seed", range(60))
def test_the_model_of_a_pair_times_what_it_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges of rows and of counts on a clock take as long as `megaplan.schedules.turns` says."""
    random, clock = Random(seed), Clock()
    monkeypatch.setattr(dist, "all_to_all_single", clock.exchange)
    ep = ExpertParallel(2, 0, None, MeasuredRouting())

    def drawn() -> tuple[Legs, int]:
        legs = tuple(Leg(random.randint(0, 9), random.randint(0, 9), random.random() < 0.7) for _ in range(random.randint(0, 5)))
        return legs, random.randint(0, 9)

    def part(legs: Legs, after: int) -> Callable[[], None]:
        def run() -> None:
            for leg in legs:
                clock.compute(leg.computing)
                if leg.passes_turn:
                    _exchange(ep, (1, 1), (1, 1), torch.full((2, 1), leg.exchanging))
                else:
                    ep.announce(torch.full((2,), leg.exchanging, dtype=torch.int32))
            clock.compute(after)

        return run

    pair = [drawn(), drawn()]
    Turns(part(*pair[0]), part(*pair[1]), CPU).run()
    forward, backward = (Course(legs, after + sum(leg.computing + leg.exchanging for leg in legs)) for legs, after in pair)
    assert clock.now == pair_length(forward, backward)
