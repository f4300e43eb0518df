"""Goodput of a job that saves every `interval` seconds and is interrupted at random: exact for exponential times between interruptions.

A save begins every interval; it stops training for `stall` seconds and is complete `write` seconds after it began, while training
continues. An interruption loses the progress since the beginning of the newest complete save, and `recovery` seconds; an interruption
during recovery restarts it. With rate l, cycle c (interval and stall, or the write if longer), write w and recovery r, the expected number
of completed saves between two interruptions is exp(-l w) / (exp(l c) - 1), and the expected time is exp(l r) / l.

Sources: J. W. Young, CACM 17(9), 1974, for the interval sqrt(2 stall / l); J. T. Daly, Future Generation Computer Systems 22, 2006, for the
form of the exponential model, whose restart time is here w + r.
"""

from math import exp, expm1, sqrt
from typing import NamedTuple

LARGEST_EXPONENT = 20.0
"""Above this exponent the job never completes a save: fewer than one in 10^8 intervals between interruptions completes one."""
BISECTIONS = 80


class Interruptions(NamedTuple):
    """The cost of interruptions and saves to a job.

    Attributes:
        rate: Interruptions of the job per second.
        stall: Seconds that a save stops training.
        write: Seconds from the beginning of a save until it is complete.
        recovery: Seconds from an interruption until training continues: detection, restart and reading.
    """

    rate: float
    stall: float
    write: float
    recovery: float

    def cycle(self, interval: float) -> float:
        """Seconds from the beginning of one save to the next, which waits until the first is complete."""
        return max(interval + self.stall, self.write)

    def shares(self, interval: float) -> "Shares":
        """Shares of wall-clock time with a save every `interval` seconds of training."""
        cycle = self.cycle(interval)
        if not self.rate:
            return Shares(interval / cycle, 1 - interval / cycle, 0.0, 0.0)
        lost = self.rate * (cycle + self.write + self.recovery)
        if lost > LARGEST_EXPONENT:
            down = -expm1(-min(self.rate * self.recovery, LARGEST_EXPONENT))
            return Shares(0.0, 0.0, 1 - down, down)
        running = exp(-self.rate * self.recovery)
        saved = running * self.rate * cycle * exp(-self.rate * self.write) / expm1(self.rate * cycle)
        useful = saved * interval / cycle
        return Shares(useful, saved - useful, running - saved, 1 - running)

    def goodput(self, interval: float) -> float:
        """Share of wall-clock time in steps that are kept."""
        return self.shares(interval).useful

    @property
    def young(self) -> float:
        """Young's interval in seconds, sqrt(2 · stall / rate); infinite without interruptions."""
        return sqrt(2 * self.stall / self.rate) if self.rate else float("inf")

    def best_interval(self, step: float, num_steps: int) -> int:
        """Steps between two saves with the largest goodput; `step` is in seconds.

        Goodput has one maximum over all intervals: at the solution of l t = 1 - exp(-l (t + stall)), or, if later, where a save completes
        just as the next one begins.
        """
        if not self.rate:
            return num_steps
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if middle < -expm1(-middle - self.rate * self.stall) else (low, middle)
        seconds = max(low / self.rate, self.write - self.stall)
        least = min(num_steps, max(1, int(seconds / step)))
        return max(least, min(num_steps, least + 1), key=lambda steps: self.goodput(steps * step))


class Shares(NamedTuple):
    """Shares of wall-clock time, which sum to 1.

    Attributes:
        useful: Steps that are kept: the goodput.
        stalls: Training waits for a save, in time that is kept.
        repeated: Steps, and saves among them, that an interruption undoes.
        down: Recovery from interruptions.
    """

    useful: float
    stalls: float
    repeated: float
    down: float
