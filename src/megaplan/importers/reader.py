"""Reading a config field by field: every field is read, listed as irrelevant, told as not carried, or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.importers.tables import IGNORED, MUST_BE, NOT_CARRIED
from megaplan.scalars import MAX_INT, MAX_LAYERS
from megaplan.spec.source import SourceMap

_MAX_SHOWN = 80


class ConfigReader:
    """One config while it is read.

    A getter returns the field's value; where the field is missing or wrong it notes that and returns a value of the type asked for, which
    nobody sees, for `finish_reading` raises before anything is derived from it.

    Args:
        config: The config's fields.
        source: Where they stand.
        family: `model_type`.
    """

    def __init__(self, config: Mapping[str, Any], source: SourceMap, family: str) -> None:
        self.family = family
        self._config = config
        self._source = source
        self._read = {"model_type"}
        self._errors: list[Diagnostic] = []
        self._not_carried: dict[str, str] = {}

    def has(self, key: str) -> bool:
        """Whether the field stands in the config, null included."""
        return key in self._config

    def value(self, key: str) -> Any:
        """The field as it stands; None if it is absent."""
        return self._config.get(key)

    def whole(self, key: str, *, least: int = 1) -> int:
        """A required integer of at least `least`."""
        value = self._required(key, f"{least}" if least else "0")
        return value if self._is_whole(key, value, least) else least

    def layers(self, letters: int) -> int:
        """`num_hidden_layers`, each of so many letters."""
        value, most = self.whole("num_hidden_layers"), MAX_LAYERS // letters
        if value > most:
            self.wrong("num_hidden_layers", value, f"at most {most:,}")
        return min(value, most)

    def whole_or_null(self, key: str, *, least: int = 1) -> int | None:
        """A required integer that null switches off; the field must stand there."""
        value = self._required(key, "null")
        return value if value is None or self._is_whole(key, value, least) else None

    def number(self, key: str) -> float:
        """A required positive number."""
        value = self._required(key, "1.0e-5")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.wrong(key, value, "a positive number")
            return 1.0
        return float(value)

    def flag(self, key: str) -> bool:
        """A required true or false."""
        value = self._required(key, "false")
        if not isinstance(value, bool) and value is not _MISSING:
            self.wrong(key, value, "true or false")
        return value is True

    def text(self, key: str) -> str:
        """A required text."""
        value = self._required(key, '"…"')
        if not isinstance(value, str):
            self.wrong(key, value, "a text")
            return ""
        return value

    def items(self, key: str) -> tuple[Any, ...]:
        """A required list."""
        value = self._required(key, "[]")
        if not isinstance(value, list):
            self.wrong(key, value, "a list")
            return ()
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An optional mapping; empty if absent or null."""
        value = self._config.get(key)
        self._read.add(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.wrong(key, value, "a mapping or null")
            return {}
        return value

    def same(self, *keys: str) -> str:
        """The first of several names of one field that the config has; the others must say the same."""
        given = [key for key in keys if key in self._config] or [keys[0]]
        self._read.update(given)
        for other in given[1:]:
            if self._config[other] != self._config[given[0]]:
                detail = f"{given[0]} = {_shown(self._config[given[0]])} and {other} = {_shown(self._config[other])} are one value"
                self.contradicts(other, detail, f"write one value for {given[0]} and {other}")
        return given[0]

    def skip(self, *keys: str) -> None:
        """Fields that do not matter to this config, whatever they hold."""
        self._read.update(keys)

    def only(self, key: str, accepted: Sequence[Any], why: str) -> None:
        """A required field of which a spec can express some values alone."""
        value = self._required(key, _shown(accepted[0]))
        if value is not _MISSING and not _among(value, accepted):
            self.cannot(key, value, why, accepted[0])

    def wrong(self, key: str, value: Any, wanted: str) -> None:
        """The field's value is of another type, or outside its bounds."""
        if value is not _MISSING:
            self._errors.append(diagnostic("MP804", f"{key} = {_shown(value)}, and it is {wanted}", self._source.locate(key)))

    def cannot(self, key: str, value: Any, why: str, instead: Any) -> None:
        """The field's value has no counterpart in a spec."""
        detail = f"{key} = {_shown(value)}: {why}"
        hint = f'to plan the model without it, write "{key}": {_shown(instead)} in a copy of the config'
        self._errors.append(diagnostic("MP805", detail, self._source.locate(key), (hint,)))

    def contradicts(self, key: str, detail: str, fix: str) -> None:
        """Two fields that cannot both hold."""
        self._errors.append(diagnostic("MP807", detail, self._source.locate(key), (fix,)))

    def tell(self, key: str, value: Any, effect: str) -> None:
        """A warning: the field changes what is computed, no tensor, and a spec does not carry it."""
        self._not_carried[key] = f"{key} = {_shown(value)}: {effect}"

    def finish_reading(self) -> None:
        """Judge the fields that nobody read, then stop if anything is wrong.

        Raises:
            MegaplanError: Everything found so far.
        """
        for key, value in self._config.items():
            if key not in self._read:
                self._read.add(key)
                self._judge(key, value)
        self.stop_if_wrong()

    def stop_if_wrong(self) -> None:
        """Raise what was found.

        Raises:
            MegaplanError: Everything found so far.
        """
        if self._errors:
            raise MegaplanError(self._errors)

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """One warning that lists what the config says and the spec does not carry; empty if there is nothing."""
        if not self._not_carried:
            return ()
        first = self._source.locate(next(iter(self._not_carried)))
        return (diagnostic("MP820", "\n".join(self._not_carried.values()), first, severity=Severity.WARNING),)

    def _judge(self, key: str, value: Any) -> None:
        if key in MUST_BE:
            accepted, why = MUST_BE[key]
            if not _among(value, accepted):
                self.cannot(key, value, why, accepted[0])
        elif key in NOT_CARRIED:
            neutral, effect = NOT_CARRIED[key]
            if not _among(value, neutral):
                self.tell(key, value, effect)
        elif key not in IGNORED:
            detail = f"{key} = {_shown(value)}: no field of {self.family} that the import knows, so what it changes is not known"
            hint = f'remove "{key}" from a copy of the config if it changes no tensor'
            self._errors.append(diagnostic("MP806", detail, self._source.locate(key), (hint,)))

    def _required(self, key: str, like: str) -> Any:
        self._read.add(key)
        if key not in self._config:
            detail = f"{self.family} has no field {key}; the default of a class is not the model that was released"
            hint = f'add "{key}", as in "{key}": {like}, with the released model\'s value'
            self._errors.append(diagnostic("MP803", detail, Location(file=self._source.file, key=key), (hint,)))
            return _MISSING
        return self._config[key]

    def _is_whole(self, key: str, value: Any, least: int) -> bool:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_INT:
            return True
        self.wrong(key, value, f"an integer of at least {least}")
        return False


class _Missing:
    """The value of a field that is not there and was told so."""


_MISSING = _Missing()


def _among(value: Any, accepted: Sequence[Any]) -> bool:
    """Whether the value is one of `accepted`; true is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
