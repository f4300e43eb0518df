"""What every group of rules looks at, and the arithmetic that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.spec.models import Mamba2, Model, Spec
from megaplan.spec.pattern import Pattern
from megaplan.spec.wording import series

Locate = Callable[[str], Location]
_MAX_LISTED = 12
_MAX_DIVISOR = 1024


@dataclass(frozen=True, slots=True)
class Checked:
    """A spec under check; `pattern` is None if its text does not parse, and rules about layers are then left out."""

    spec: Spec
    pattern: Pattern | None
    locate: Locate

    def has(self, letter: str) -> bool:
        """Whether a layer has the letter."""
        return self.pattern is not None and letter in self.pattern.layers

    def count(self, letter: str) -> int:
        """How many layers have the letter."""
        return self.pattern.layers.count(letter) if self.pattern is not None else 0

    def error(self, code: str, detail: str, key: str, *hints: str) -> Diagnostic:
        """An error at a key."""
        return diagnostic(code, detail, self.locate(key), hints)

    def warning(self, code: str, detail: str, key: str, *hints: str) -> Diagnostic:
        """A warning at a key."""
        return diagnostic(code, detail, self.locate(key), hints, Severity.WARNING)


def mamba_width(model: Model) -> tuple[str, int] | None:
    """Where the head count of M blocks comes from, and the count; None if there is no section or no whole number of heads."""
    mamba = model.mamba
    if mamba is None:
        return None
    if isinstance(mamba, Mamba2) and mamba.num_heads is not None:
        return "mamba.num_heads", mamba.num_heads
    if (mamba.expand * model.hidden_size) % mamba.head_dim:
        return None
    return "mamba.expand · hidden_size / mamba.head_dim", mamba.expand * model.hidden_size // mamba.head_dim


def divisors(number: int) -> list[int]:
    """Divisors up to 1024, rising."""
    return [candidate for candidate in range(1, min(number, _MAX_DIVISOR) + 1) if number % candidate == 0]


def use_one_of(numbers: list[int]) -> str:
    """`use 1, 2, 4, 8 or 16`."""
    if len(numbers) > _MAX_LISTED:
        return f"use {', '.join(map(str, numbers[:_MAX_LISTED]))} or another divisor"
    return f"use {series([str(number) for number in numbers])}"


def remainder(name: str, value: int, degree_name: str, degree: int) -> str:
    """`moe.num_experts = 16, mesh.ep = 6, and 16 % 6 = 4`."""
    return f"{name} = {value}, {degree_name} = {degree}, and {value} % {degree} = {value % degree}"
