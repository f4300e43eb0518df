"""Generation by one tensor group: sequences begin while slots and cache are free, and all running ones advance together.

Where the cache is full the sequence that was admitted last is stopped; it is admitted again first, after its tokens are read again.
"""

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

from megaplan.budget.serving import Served

GOLDEN = 0.6180339887498949
MOST_SIMULATED = 1024
"""Sequences of a group that are simulated individually; a larger group is simulated as this number of bundles."""
ROUNDING = 1e-9


class Generation(NamedTuple):
    """Generation of a group's sequences.

    Attributes:
        seconds: Seconds until the last one ends, prefill included.
        prefill_seconds: Seconds of prefill.
        slots: Most sequences that ran at a time.
        empty: Share of these slots, over the steps, that no sequence uses.
        steps: Decoding steps.
        stops: Times that a sequence was stopped because the cache was full.
    """

    seconds: float
    prefill_seconds: float
    slots: int
    empty: float
    steps: float
    stops: int


class Prompt(NamedTuple):
    """Prompts of a group.

    Attributes:
        tokens: Tokens of a prompt.
        seconds: Seconds to read all prompts.
        seconds_per_token: Seconds to read a token of a stopped sequence again.
    """

    tokens: float
    seconds: float
    seconds_per_token: float


class _Group:
    """A tensor group's sequences over time; `now` counts decoding steps."""

    def __init__(self, model: Served, prompt: Prompt, capacity: float, bundle: float) -> None:
        self.model, self.prompt, self.capacity, self.bundle = model, prompt, capacity, bundle
        self.now = self.seconds = self.used = self.begun = self.reread = 0.0
        self.ends: list[tuple[float, int]] = []
        self.running: dict[int, tuple[float, float]] = {}  # step at which it ends; step at which it would have begun without stops
        self.most = self.stops = 0

    @property
    def context(self) -> float:
        """Tokens in the cache."""
        return len(self.running) * (self.prompt.tokens + self.now) - self.begun

    def admit(self, number: int, left: float, done: float) -> None:
        """Begin a sequence, or continue it after `done` tokens."""
        end, start = self.now + left, self.now - done
        self.running[number] = end, start
        self.begun += start
        heappush(self.ends, (end, number))
        self.most = max(self.most, len(self.running))

    def advance(self) -> tuple[int, float, float] | None:
        """Steps until a sequence ends, or until the cache is full; then the stopped sequence, its remaining and its finished tokens."""
        while self.ends[0][1] not in self.running or self.running[self.ends[0][1]][0] != self.ends[0][0]:
            heappop(self.ends)
        number = len(self.running)
        steps, room = self.ends[0][0] - self.now, (self.capacity - self.context) / number
        full = room < steps and number > 1
        steps = max(0.0, room) if full else steps
        if steps:
            self.seconds += steps * self.model.decode_seconds(number * self.bundle, self.context / number + steps / 2)
        self.now, self.used = self.now + steps, self.used + steps * number
        stopped = next(reversed(self.running)) if full else heappop(self.ends)[1]
        end, start = self.running.pop(stopped)
        self.begun -= start
        if not full:
            return None
        self.stops += 1
        self.reread += self.prompt.tokens + self.now - start
        return stopped, end - self.now, self.now - start


def generate(model: Served, lengths: list[float], prompt: Prompt, slots: int, cache_tokens: float) -> Generation:
    """The generation of these response lengths, in an order that mixes short and long ones.

    Args:
        model: Served model.
        lengths: Tokens of each response, rising.
        prompt: Prompts.
        slots: Sequences that run at a time at most.
        cache_tokens: Tokens in the cache at most.
    """
    count = len(lengths)
    bundle = max(1.0, count / MOST_SIMULATED)
    kept = lengths if bundle == 1 else [lengths[min(count - 1, int((index + 1) * bundle) - 1)] for index in range(MOST_SIMULATED)]
    order = sorted(range(len(kept)), key=lambda index: index * GOLDEN % 1)
    group = _Group(model, prompt, cache_tokens / bundle, bundle)
    waiting = deque((index, kept[index], 0.0) for index in order)
    room = max(1, int(slots / bundle))
    while waiting or group.running:
        while waiting and len(group.running) < room:
            number, left, done = waiting[0]
            if group.running and group.context + prompt.tokens + done > group.capacity * (1 - ROUNDING):
                break
            group.admit(number, left, done)
            waiting.popleft()
        if stopped := group.advance():
            waiting.appendleft(stopped)
    prefill = prompt.seconds + group.reread * bundle * prompt.seconds_per_token
    empty = max(0.0, 1 - group.used / (group.most * group.now))
    return Generation(group.seconds + prefill, prefill, min(count, int(group.most * bundle)), empty, group.now, group.stops)
