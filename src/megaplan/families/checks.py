"""The view of a spec that rules of families need, and the arithmetic that all rules share."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

from megaplan.errors import Diagnostic
from megaplan.wording import series

_MAX_LISTED = 12
_MAX_DIVISOR = 1024


class CheckedSpec(Protocol):
    """A spec under check; rules about layers do not run if the pattern does not parse."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def letters(self) -> str | None:
        """One letter per layer; None if the pattern does not parse."""

    @property
    def attends_ahead(self) -> bool:
        """True if multi-token prediction attends in addition to the layers."""

    def count(self, letter: str) -> int:
        """Number of layers with the letter."""

    def error(self, code: str, detail: str, key: str, *hints: str) -> Diagnostic:
        """An error at a key."""


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Divisors up to 1024, rising; cached because a search of layouts asks for the same ones at every mesh."""
    return tuple([candidate for candidate in range(1, min(number, _MAX_DIVISOR) + 1) if number % candidate == 0])


def use_one_of(numbers: Sequence[int]) -> str:
    """Hint text such as `use 1, 2, 4, 8 or 16`."""
    if len(numbers) > _MAX_LISTED:
        return f"use {', '.join(map(str, numbers[:_MAX_LISTED]))} or another divisor"
    return f"use {series([str(number) for number in numbers])}"


def remainder(name: str, value: int, degree_name: str, degree: int) -> str:
    """Equation text such as `moe.num_experts = 16, mesh.ep = 6, and 16 % 6 = 4`."""
    return f"{name} = {value}, {degree_name} = {degree}, and {value} % {degree} = {value % degree}"


def rising(checked: CheckedSpec, key: str, numbers: tuple[int, ...]) -> Iterator[Diagnostic]:
    """MP332 if a list of layers or cuts does not rise strictly."""
    for before, after in pairwise(numbers):
        if after <= before:
            detail = f"{key.removeprefix('model.')}: {after} follows {before}"
            in_order = sorted(set(numbers))
            hint = f"{key.rpartition('.')[2]}: {in_order}" if len(in_order) <= 24 else "sort the list and remove repetitions"
            yield checked.error("MP332", detail, key, hint)
            return
