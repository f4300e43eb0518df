"""The spec under check, in the form that every group of rules uses."""

from collections.abc import Callable
from typing import NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.spec.models import Spec
from megaplan.spec.pattern import Pattern

Locate = Callable[[str], Location]


class Checked(NamedTuple):
    """A spec under check; `pattern` is None if its text does not parse, and then rules about layers do not run."""

    spec: Spec
    pattern: Pattern | None
    locate: Locate

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.spec.model.hidden_size

    @property
    def letters(self) -> str | None:
        """One letter per layer; None if the pattern does not parse."""
        return None if self.pattern is None else self.pattern.layers

    @property
    def attends_ahead(self) -> bool:
        """True if multi-token prediction attends in addition to the layers."""
        mtp = self.spec.model.features.mtp
        return mtp is not None and "A" in mtp.letters

    def has(self, letter: str) -> bool:
        """True if a layer has the letter."""
        return self.pattern is not None and letter in self.pattern.layers

    def count(self, letter: str) -> int:
        """Number of layers with the letter."""
        return self.pattern.layers.count(letter) if self.pattern is not None else 0

    def error(self, code: str, detail: str, key: str, *hints: str) -> Diagnostic:
        """An error at a key."""
        return diagnostic(code, detail, self.locate(key), hints)

    def note(self, code: str, detail: str, key: str, *hints: str) -> Diagnostic:
        """A note at a key."""
        return diagnostic(code, detail, self.locate(key), hints, Severity.NOTE)

    def warning(self, code: str, detail: str, key: str, *hints: str) -> Diagnostic:
        """A warning at a key."""
        return diagnostic(code, detail, self.locate(key), hints, Severity.WARNING)
