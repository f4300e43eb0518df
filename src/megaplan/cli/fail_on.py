"""`--fail-on oom,headroom<4GiB`: conditions under which `diff` exits 3."""

from __future__ import annotations

from dataclasses import dataclass

from megaplan.diagnostics import refuse
from megaplan.plan.document import Estimates
from megaplan.units import format_bytes, parse_bytes

_HEADROOM = "headroom<"


@dataclass(frozen=True, slots=True)
class Condition:
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


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """The conditions of one option, separated by commas.

    Raises:
        MegaplanError: MP486.
    """
    return tuple(_parse(part.strip()) for part in text.split(","))


def _parse(part: str) -> Condition:
    compact = part.replace(" ", "")
    if compact == "oom":
        return Condition(part, 0)
    if compact.startswith(_HEADROOM):
        try:
            return Condition(part, parse_bytes(compact.removeprefix(_HEADROOM)))
        except ValueError as error:
            raise refuse("MP486", f"--fail-on {part}: {error}", "--fail-on 'oom,headroom<4GiB'") from None
    raise refuse("MP486", f"--fail-on {part!r} is neither oom nor headroom<SIZE", "--fail-on 'oom,headroom<4GiB'")
