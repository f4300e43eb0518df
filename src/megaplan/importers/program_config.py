"""`ProgramConfig`: the configuration of another program while it is read."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.importers.structure import Policy
from megaplan.scalars import MAX_INT


class ProgramConfig:
    """Values by key, of the types that the program takes; all errors are raised together.

    Attributes:
        defaults: The program's defaults.
        name: Name of the configuration in diagnostics.
        values: Values that it states.
    """

    defaults: ClassVar[Mapping[str, Any]]

    def __init__(self, name: str, policy: Policy | None) -> None:
        """`policy` is that for keys that the importer does not know."""
        self.name, self._policy = name, policy or Policy()
        self.values: dict[str, Any] = {}
        self._errors: list[Diagnostic] = []
        self._defaulted: list[str] = []
        self._said: list[str] = []

    def _at(self, key: str) -> Location:
        return Location(self.name, key=key)

    def _shown(self, key: str) -> str:
        return f"{key} = {json.dumps(self.values.get(key, self.defaults.get(key)), default=str)}"

    @property
    def _absent(self) -> str:
        """Keys that are read and not stated, with their defaults."""
        return ", ".join(f"{key} = {json.dumps(self.defaults[key])}" for key in dict.fromkeys(self._defaulted)) or "none"

    def value(self, key: str) -> Any:
        """The value of a key, or the program's default."""
        if key not in self.values:
            self._defaulted.append(key)
        return self.values.get(key, self.defaults[key])

    def whole(self, key: str, least: int = 1) -> int:
        """An integer from `least` on."""
        found = self.value(key)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= MAX_INT:
            self.wrong(key, f"an integer from {least} on")
            return max(1, least)
        return found

    def number(self, key: str) -> float:
        """A number that is not negative."""
        found = self.value(key)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
            self.wrong(key, "a number from 0 on")
            return 1.0
        return float(found)

    def switch(self, key: str) -> bool:
        """A truth value."""
        found = self.value(key)
        if not isinstance(found, bool):
            self.wrong(key, "true or false")
        return bool(found)

    def choice(self, key: str, choices: Mapping[str, Any]) -> Any:
        """The value that one of some words means."""
        found = self.value(key)
        if not isinstance(found, str) or found not in choices:
            self.wrong(key, " or ".join(each or '""' for each in choices))
            return next(iter(choices.values()))
        return choices[found]

    def wrong(self, key: str, wanted: str, *hints: str) -> None:
        """Reports a value of another type (MP916)."""
        self._errors.append(diagnostic("MP916", f"{self._shown(key)}, and it is {wanted}", self._at(key), hints))

    def refuse(self, key: str, why: str, *hints: str) -> None:
        """Reports a setting that a spec cannot express (MP914)."""
        self._errors.append(diagnostic("MP914", f"{self._shown(key)}: {why}", self._at(key), hints))

    def say(self, text: str) -> None:
        """Adds a line to the note about assumptions."""
        self._said.append(text)

    def refusal(self) -> MegaplanError:
        """The error of everything that was wrong so far."""
        return MegaplanError(self._errors)
