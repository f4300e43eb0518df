"""The goodput model against a simulation of the same job, and the properties that any interval and any machine must have."""

import random
from math import isclose

import pytest

from megaplan.goodput.model import Interruptions

MACHINES = [
    Interruptions(rate=1 / 10_000, stall=1.0, write=5.0, recovery=600.0),
    Interruptions(rate=1 / 2_000, stall=40.0, write=40.0, recovery=300.0),
    Interruptions(rate=1 / 1_000, stall=0.5, write=120.0, recovery=400.0),
    Interruptions(rate=1 / 100_000, stall=0.0, write=30.0, recovery=60.0),
]
STEP, STEPS = 6.5, 10**6


def draws(count: int, seed: int = 0) -> list[tuple[Interruptions, float]]:
    """Random machines, each with an interval."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        rate, stall = 10 ** rng.uniform(-7, -2.5), rng.choice([0.0, 10 ** rng.uniform(-2, 2)])
        machine = Interruptions(rate, stall, stall + 10 ** rng.uniform(-1, 3), 10 ** rng.uniform(0, 4))
        found.append((machine, 10 ** rng.uniform(0, 5)))
    return found


def simulated(machine: Interruptions, interval: float, num_interruptions: int, seed: int) -> float:
    """Goodput of a job that is played event by event: steps, saves that become whole later, interruptions at random times."""
    rng = random.Random(seed)
    kept = wall = 0.0
    for _ in range(num_interruptions):
        up = rng.expovariate(machine.rate)
        began, done, safe = 0.0, 0.0, 0.0
        saves: list[tuple[float, float]] = []
        while began < up:
            done += interval
            save = began + interval
            if save >= up:
                break
            whole = save + machine.write
            saves.append((whole, done))
            began = max(save + machine.stall, whole - interval)
        safe = max((amount for whole, amount in saves if whole <= up), default=0.0)
        kept, wall = kept + safe, wall + up
        down = rng.expovariate(machine.rate)
        while down < machine.recovery:
            wall, down = wall + down, rng.expovariate(machine.rate)
        wall += machine.recovery
    return kept / wall


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("interval", [120.0, 900.0])
def test_a_simulation_has_the_same_goodput(machine: Interruptions, interval: float) -> None:
    """The simulation counts a save from the end of an interval, the model from the start of the cycle: they differ by a stall at most."""
    found = simulated(machine, interval, 4000, seed=1)
    assert found == pytest.approx(machine.goodput(interval), abs=0.01 + machine.stall * machine.rate)


def test_shares_sum_to_one_and_none_is_negative() -> None:
    for machine, interval in draws(400):
        shares = machine.shares(interval)
        assert isclose(sum(shares), 1.0, abs_tol=1e-9)
        assert min(shares) >= -1e-12


def test_goodput_never_rises_with_a_shorter_mean_time_between_interruptions() -> None:
    for machine, interval in draws(400, seed=2):
        worse = machine._replace(rate=machine.rate * 1.5)
        assert worse.goodput(interval) <= machine.goodput(interval)
        best, best_worse = (each.goodput(each.best_interval(STEP, STEPS) * STEP) for each in (machine, worse))
        assert best_worse <= best * (1 + 1e-9)


def test_goodput_never_rises_with_a_longer_stall_write_or_recovery() -> None:
    for machine, interval in draws(200, seed=3):
        for field in ("stall", "write", "recovery"):
            worse = machine._replace(**{field: getattr(machine, field) * 1.3 + 1})
            assert worse.goodput(interval) <= machine.goodput(interval) + 1e-12


def test_the_chosen_interval_beats_half_and_double_and_its_neighbours() -> None:
    for machine, _ in draws(400, seed=4):
        steps = machine.best_interval(STEP, STEPS)
        best = machine.goodput(steps * STEP)
        for other in (steps - 1, steps + 1, steps // 2, 2 * steps, 10 * steps):
            if 1 <= other <= STEPS:
                assert machine.goodput(other * STEP) <= best + 1e-12, (machine, steps, other)


def test_a_rare_interruption_gives_youngs_interval() -> None:
    machine = Interruptions(rate=1e-7, stall=30.0, write=30.0, recovery=600.0)
    assert machine.best_interval(1.0, STEPS) == pytest.approx(machine.young, rel=0.01)


def test_without_interruptions_only_saves_cost_time() -> None:
    machine = Interruptions(0.0, 2.0, 5.0, 600.0)
    assert machine.goodput(98.0) == 0.98
    assert machine.best_interval(1.0, 500) == 500


def test_a_save_that_never_becomes_whole_keeps_nothing() -> None:
    shares = Interruptions(1.0, 1.0, 1000.0, 1000.0).shares(10.0)
    assert shares.useful == 0.0
    assert isclose(sum(shares), 1.0)
