"""Generation by one tensor group: sequences begin as slots become free, and all running ones advance together."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from megaplan.budget.decoding import Served

GOLDEN = 0.6180339887498949
MOST_SIMULATED = 1024
"""Sequences of a group that are simulated one by one; more are simulated in as many bundles."""


class Generation(NamedTuple):
    """Generation of a group's sequences.

    Attributes:
        seconds: Seconds until the last one ends, prefill included.
        prefill_seconds: Seconds of prefill.
        slots: Sequences that run at a time at most.
        empty: Share of these slots, over the steps, that no sequence uses.
        steps: Decoding steps.
    """

    seconds: float
    prefill_seconds: float
    slots: int
    empty: float
    steps: float


def generate(model: Served, lengths: list[float], prompt: float, slots: int, prefill_seconds: float) -> Generation:
    """The generation of these response lengths, in an order that mixes short and long ones.

    Args:
        model: Served model.
        lengths: Tokens of each response, rising.
        prompt: Tokens of a prompt.
        slots: Sequences that run at a time.
        prefill_seconds: Seconds of all prefill, which is added.
    """
    count = len(lengths)
    bundle = max(1.0, count / MOST_SIMULATED)
    kept = lengths if bundle == 1 else [lengths[min(count - 1, int((index + 1) * bundle) - 1)] for index in range(MOST_SIMULATED)]
    order = sorted(range(len(kept)), key=lambda index: index * GOLDEN % 1)
    room = max(1, min(len(kept), int(slots / bundle)))
    running: list[tuple[float, float]] = []  # (step at which it ends, step at which it began)
    now = seconds = used = begun = 0.0

    def advance() -> None:
        nonlocal now, seconds, used, begun
        end, start = heappop(running)
        number, steps = len(running) + 1, end - now
        context = prompt + now - begun / number + steps / 2
        seconds += steps * model.decode_seconds(number * bundle, context)
        now, used, begun = end, used + steps * number, begun - start

    for index in order:
        if len(running) == room:
            advance()
        heappush(running, (now + kept[index], now))
        begun += now
    while running:
        advance()
    return Generation(seconds + prefill_seconds, prefill_seconds, min(count, slots), max(0.0, 1 - used / (room * now)), now)
