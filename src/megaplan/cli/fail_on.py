"""`--fail-on oom,headroom<4GiB,step>1.5s,step>+5%,tokens<-5%`: conditions under which `diff` and `check` exit 3."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaplan.diagnostics import refuse
from megaplan.errors import MegaplanError
from megaplan.layout.step_time import PlannedTime
from megaplan.plan.document import Estimates
from megaplan.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    Time = PlannedTime | str

FAILED_ON = 3
_HEADROOM = "headroom<"
_STEP = re.compile(r"step>(?:(\d+(?:\.\d+)?)(s|ms)|\+(\d+(?:\.\d+)?)%)")
_TOKENS = re.compile(r"tokens<(?:(\d+(?:\.\d+)?)|-(\d+(?:\.\d+)?)%)")
_RATE = " tokens/s per device"
_EXAMPLE = "--fail-on 'oom,headroom<4GiB,step>1.5s,tokens<-5%'"


@dataclass(frozen=True, slots=True)
class Headroom:
    """A condition as the user wrote it (`text`); a rank with less headroom than `below_bytes` meets it."""

    text: str
    below_bytes: int

    def met_by(self, estimates: Estimates) -> list[str]:
        """One sentence for each distinct budget that meets it."""
        return [
            f"{self.text}: headroom {format_bytes(rank.headroom_bytes)} on {rank.label}"
            for rank in estimates.ranks
            if rank.headroom_bytes < self.below_bytes
        ]


def _untimed(*times: Time | None) -> str | None:
    """The reason why the first of these steps without a time has none; None if each has one."""
    return next((time for time in times if isinstance(time, str)), None)


@dataclass(frozen=True, slots=True)
class TimeCondition:
    """A condition as the user wrote it; it is met if a figure of the step exceeds `limit`, or `share` of the older plan's figure.

    One of both is None.

    Attributes:
        text: The condition.
        limit: Seconds, or tokens per second and device.
        share: Share of the old figure.
        rates: True for tokens per second and device, of which fewer meet it; else more seconds of the step do.
    """

    text: str
    limit: float | None
    share: float | None
    rates: bool = False

    def met_by(self, before: Time | None, after: Time) -> list[str]:
        """One sentence if it is met, or if it cannot be decided because a step has no time."""
        if untimed := _untimed(before if self.share is not None else after, after):
            return [f"{self.text}: not timed: {untimed}"]
        new, shown = self._figure(after)
        if self.limit is not None:
            return [f"{self.text}: {shown}"] if self._beyond(new, self.limit) else []
        assert self.share is not None
        old, shown_before = self._figure(before)
        values = f"{shown_before.removesuffix(_RATE if self.rates else ' s')} → {shown.removeprefix('step ')}"
        return [f"{self.text}: {values}, {100 * (new / old - 1):+.1f} %"] if self._beyond(new / old, self.share) else []

    def _beyond(self, value: float, limit: float) -> bool:
        return value < limit if self.rates else value > limit

    def _figure(self, time: Time | None) -> tuple[float, str]:
        assert isinstance(time, PlannedTime)
        rate = time.tokens_per_second_per_device
        return (rate, f"{rate:,.0f}{_RATE}") if self.rates else (time.seconds, f"step {time.seconds:.4g} s")


Condition = Headroom | TimeCondition


def parse_conditions(text: str | None, *, compares: bool = True) -> tuple[Condition, ...]:
    """The conditions of one option, separated by commas.

    Args:
        text: The option; None for none.
        compares: True if there is an older plan, whose step a new one can exceed by a share.

    Raises:
        MegaplanError: MP486.
    """
    return tuple(_parse(part.strip(), compares=compares) for part in text.split(",")) if text is not None else ()


def met(conditions: tuple[Condition, ...], estimates: Estimates, times: Callable[[], tuple[Time | None, Time]]) -> list[str]:
    """Sentences of the conditions that a plan meets.

    Args:
        conditions: Conditions of the option.
        estimates: Estimates of the plan.
        times: Steps of the older plan (None without one) and of this one; called only if a condition needs them.
    """
    return [
        reason
        for condition in conditions
        for reason in (condition.met_by(estimates) if isinstance(condition, Headroom) else condition.met_by(*times()))
    ]


def _parse(part: str, *, compares: bool) -> Condition:
    compact = part.replace(" ", "")
    if compact == "oom":
        return Headroom(part, 0)
    if compact.startswith(_HEADROOM):
        try:
            return Headroom(part, parse_bytes(compact.removeprefix(_HEADROOM)))
        except ValueError as error:
            raise refuse("MP486", f"--fail-on {part}: {error}", _EXAMPLE) from None
    if (found := _STEP.fullmatch(compact)) is not None:
        length, unit, percent = found.groups()
        if length is not None:
            return TimeCondition(part, float(length) / (1000 if unit == "ms" else 1), None)
        if compares:
            return TimeCondition(part, None, 1 + float(percent) / 100)
        raise _no_older_plan(part, "step>1.5s")
    if (found := _TOKENS.fullmatch(compact)) is not None:
        rate, percent = found.groups()
        if rate is not None:
            return TimeCondition(part, float(rate), None, rates=True)
        if compares:
            return TimeCondition(part, None, 1 - float(percent) / 100, rates=True)
        raise _no_older_plan(part, "tokens<15000")
    raise refuse(
        "MP486", f"--fail-on {part!r} is not oom, headroom<SIZE, step>SECONDS, step>+PERCENT, tokens<RATE or tokens<-PERCENT", _EXAMPLE
    )


def _no_older_plan(part: str, instead: str) -> MegaplanError:
    return refuse(
        "MP486",
        f"--fail-on {part}: a check has no older plan to compare with",
        f"--fail-on '{instead}', or megaplan diff OLD NEW --fail-on '{part}'",
    )
