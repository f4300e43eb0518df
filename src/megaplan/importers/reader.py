"""Reading a config field by field: every field is read, listed as irrelevant, reported, or refused.

A field that the config lacks has the default of transformers' class, as in every program that loads the config; one note lists them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.importers.defaults import ClassFacts, class_facts
from megaplan.importers.structure import names_a_tensor, names_an_encoder, sizes_of_parts, switches_of_own_code
from megaplan.importers.tables import IGNORED, MUST_BE, NOT_CARRIED
from megaplan.scalars import MAX_INT, MAX_LAYERS
from megaplan.spec.document import SourceMap

_MAX_SHOWN = 80


class ConfigReader:
    """A config while it is read.

    A getter returns the field's value; if the field is missing or wrong it records that and returns a value of the requested type. The
    dummy is never used, because `finish_reading` raises before anything is derived from it.

    Args:
        config: The config's fields.
        source: Position of the fields.
        family: `model_type`.
        facts: Facts of the class that loads the config.
        strict: True if absent and unknown fields are errors.

    Attributes:
        other: The model type of the class that `architectures` names, if `model_type` is another one.
    """

    def __init__(self, config: Mapping[str, Any], source: SourceMap, family: str, facts: ClassFacts, *, strict: bool = False) -> None:
        self.family, self.facts, self.strict = family, facts, strict
        self._config = {name: value for name, value in config.items() if facts.renamed.get(name) not in config}
        self._names = {facts.renamed.get(name, name): name for name in self._config}
        self.other = ""
        self._source = source
        self._read = {"model_type", *(set(config) - set(self._config))}
        self._errors: list[Diagnostic] = []
        self._not_carried: dict[str, str] = {}
        self._defaults: dict[str, Any] = {}
        self._unknown: dict[str, Any] = {}
        for key in facts.renamed.keys() & config.keys():
            name = facts.renamed[key]
            if name in self._config and None not in (config[key], config[name]) and config[key] != config[name]:
                detail = f"{name} = {_shown(config[name])} and {key} = {_shown(config[key])} are one value"
                self.contradicts(name, detail, f"write one value for {name} and {key}")

    def has(self, key: str) -> bool:
        """True if the config has the field, null included."""
        return key in self._names

    def value(self, key: str) -> Any:
        """The field's raw value, or the class's default; None if there is neither."""
        if key in self._names:
            return self._config[self._names[key]]
        return self.facts.fields.get(key)

    def whole(self, key: str, *, least: int = 1) -> int:
        """A required integer of at least `least`."""
        value = self._required(key, f"{least}" if least else "0")
        return value if self._is_whole(key, value, least) else least

    def layers(self, letters: int, key: str = "num_hidden_layers") -> int:
        """The number of decoder layers, each of several letters."""
        value, most = self.whole(key), MAX_LAYERS // letters
        if value > most:
            self.wrong(key, value, f"at most {most:,}")
        return min(value, most)

    def whole_or_null(self, key: str, *, least: int = 1) -> int | None:
        """A required positive integer; null means off."""
        value = self._required(key, "null")
        return value if value is None or self._is_whole(key, value, least) else None

    def factor(self, key: str) -> float | None:
        """A positive number; off if null or absent."""
        return None if self._value_of(key) is None else self.number(key)

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
        if value is None and key in self.facts.fields:
            return False
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
        """A required list; null is an empty one."""
        value = self._required(key, "[]")
        if value is None and key in self.facts.fields:
            return ()
        if not isinstance(value, list):
            self.wrong(key, value, "a list")
            return ()
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An optional mapping; empty if absent or null."""
        value = self._value_of(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.wrong(key, value, "a mapping or null")
            return {}
        return value

    def inside(self, key: str, known: Sequence[str]) -> Mapping[str, Any]:
        """An optional mapping whose fields are known; one that is not, and that decides a tensor, is refused."""
        found = self.mapping(key)
        for name, value in found.items():
            if name not in known and self._decides(name, value):
                self._refuse_unknown(f"{key}.{name}", value)
        return found

    def same(self, *keys: str) -> str:
        """The first of several names of one field that the config has; the others must agree."""
        given = [key for key in keys if key in self._names] or [keys[0]]
        self.skip(*given)
        for other in given[1:]:
            if self.value(other) != self.value(given[0]):
                detail = f"{given[0]} = {_shown(self.value(given[0]))} and {other} = {_shown(self.value(other))} are one value"
                self.contradicts(other, detail, f"write one value for {given[0]} and {other}")
        return given[0]

    def skip(self, *keys: str) -> None:
        """Ignores fields that do not matter to this config, whatever their values."""
        self._read.update(self._names.get(key, key) for key in keys)

    def only(self, key: str, accepted: Sequence[Any], why: str) -> None:
        """A required field whose values a spec can express only in part."""
        value = self._required(key, _shown(accepted[0]))
        if value is not _MISSING and not _among(value, accepted):
            self.cannot(key, value, why, accepted[0])

    def published(self, key: str, built: Any, why: str) -> None:
        """A field of published configs that the class does not read, and that says nothing new at the value that is built, or at null."""
        self.skip(key)
        if not _among(self.value(key), (built, None)):
            self.cannot(key, self.value(key), why, built)

    def wrong(self, key: str, value: Any, wanted: str) -> None:
        """Reports a value of another type, or outside its bounds."""
        if value is None and key not in self._names:  # a default that builds nothing
            self._missing(key, "[]" if "list" in wanted else '"…"' if "text" in wanted else "1")
        elif value is not _MISSING:
            name = self._names.get(key, key)
            self._errors.append(diagnostic("MP804", f"{name} = {_shown(value)}, and it is {wanted}", self._source.locate(name)))

    def cannot(self, key: str, value: Any, why: str, instead: Any) -> None:
        """Reports a value that has no counterpart in a spec, and one to plan the model without it."""
        name = self._names.get(key, key)
        self.refuse(key, value, why, f'to plan the model without it, write "{name}": {_shown(instead)} in a copy of the config')

    def refuse(self, key: str, value: Any, why: str, *hints: str) -> None:
        """Reports a value that has no counterpart in a spec, and that no other value replaces."""
        name = self._names.get(key, key)
        self._errors.append(diagnostic("MP805", f"{name} = {_shown(value)}: {why}", self._source.locate(name), hints))

    def contradicts(self, key: str, detail: str, fix: str) -> None:
        """Reports two fields that contradict each other."""
        if key not in self._names and key in self.facts.fields:
            detail = f"{detail}; {key} is the class's default"
        key = self._names.get(key, key)
        self._errors.append(diagnostic("MP807", detail, self._source.locate(key), (fix,)))

    def warn(self, key: str, value: Any, effect: str) -> None:
        """A warning about a field that changes the computation but no tensor, and that a spec does not carry."""
        self.skip(key)
        key = self._names.get(key, key)
        self._not_carried[key] = f"{key} = {_shown(value)}: {effect}"

    def finish_reading(self) -> None:
        """Judges the fields that no import read, then stops if anything is wrong.

        Raises:
            MegaplanError: Everything found so far.
        """
        for key, value in self._config.items():
            if key not in self._read:
                self._read.add(key)
                self._judge(key, value)
        for key in NOT_CARRIED if not self.strict else ():
            if key not in self._names and key not in self._defaults and key in self.facts.fields:
                self._judge(key, self.facts.fields[key])
        self.stop_if_wrong()

    def finish_counting(self) -> None:
        """Refuses fields that name a tensor but are read by neither the structure nor the class, then stops if there are errors.

        Raises:
            MegaplanError: Everything found so far.
        """
        for key, value in self._config.items():
            known = self.facts.renamed.get(key, key)
            if known in ("vocab_size", "text_hidden_size") or self._repeats(known, value):  # no encoder of patches reads these fields
                continue
            if key not in self._read and known not in self.facts.fields and known not in self.facts.common and self._decides(known, value):
                self._refuse_unknown(key, value)
        self.stop_if_wrong()

    def _repeats(self, key: str, value: Any) -> bool:
        """True if an unknown field has the name of a class's field behind a prefix, and the value that is built."""
        return any(key.endswith(f"_{name}") and self.value(name) == value for name in self.facts.fields)

    def stop_if_wrong(self) -> None:
        """Raises what was found.

        Raises:
            MegaplanError: Everything found so far.
        """
        if self._errors:
            raise MegaplanError(self._errors)

    @property
    def knows_nothing(self) -> bool:
        """True if the config has fields, and the class has none of them."""
        return bool(self._unknown) and set(self._unknown) == set(self._config) - {"model_type"}

    @property
    def own_code(self) -> bool:
        """True if code that is published with the weights builds the model, by what `auto_map` and `architectures` name."""
        code, named = self.value("auto_map"), self.value("architectures")
        mapped = isinstance(code, dict) and any(name.startswith("AutoModel") for name in code)
        return not self.facts.version or mapped or (isinstance(named, list) and any(each != self.facts.model_class for each in named))

    @property
    def _layers(self) -> Any:
        """The number of layers, under any of its names; None if the config has none."""
        return next((self.value(name) for name in _SAME[2] if self.value(name) is not None), None)

    @property
    def failed(self) -> bool:
        """True if an error was found already, so that values may be dummies."""
        return bool(self._errors)

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """One warning each for settings that the spec does not carry, for defaults that were taken, and for unknown fields."""
        found: list[Diagnostic] = []
        if self._not_carried:
            first = self._source.locate(next(iter(self._not_carried)))
            found.append(diagnostic("MP820", "\n".join(self._not_carried.values()), first, severity=Severity.WARNING))
        if self._defaults:
            taken = ", ".join(f"{key} = {_shown(value)}" for key, value in sorted(self._defaults.items()))
            detail = f"{taken}: not in the config, so as in {self.facts.origin}"
            found.append(diagnostic("MP822", detail, Location(self._source.file), severity=Severity.NOTE))
        if self._unknown:
            named = ", ".join(f"{key} = {_shown(value)}" for key, value in self._unknown.items())
            whose = "transformers'" if self.facts.version else "the repository's"
            detail = f"{named}: no field of {whose} {self.family}, which loads the model without it"
            found.append(diagnostic("MP823", detail, self._source.locate(next(iter(self._unknown))), severity=Severity.NOTE))
        return tuple(found)

    def _judge(self, name: str, value: Any) -> None:
        key = self.facts.renamed.get(name, name)
        if key in MUST_BE and (key in self.facts.fields or key in self.facts.common or self.strict):
            accepted, why = MUST_BE[key]
            if not _among(value, accepted):
                self.cannot(key, value, why, accepted[0])
        elif key in NOT_CARRIED:
            neutral, effect = NOT_CARRIED[key]
            if not _among(value, neutral):
                self.warn(key, value, effect)
        elif key not in IGNORED:
            self._unread(name, key, value)

    def _unread(self, name: str, key: str, value: Any) -> None:
        """The diagnostic for a field that the import does not read; a warning if the class has no such field."""
        if key in self.facts.fields and _among(value, (self.facts.fields[key],)):
            return
        loads = not self.strict and self.facts.origin and key not in self.facts.fields
        if loads and names_an_encoder(key) and (isinstance(value, dict) or self._decides(key, value)):
            self.warn(key, value, "of an encoder: not imported, and not counted")
            return
        if loads and not self._decides(key, value):
            if key not in self.facts.common:
                self._unknown[name] = value
            return
        self._refuse_unknown(name, value)

    def _refuse_unknown(self, name: str, value: Any) -> None:
        detail = f"{name} = {_shown(value)}: no field of {self.family} that the import knows, so its effect is unknown"
        hint = f'remove "{name}" from a copy of the config if it changes no tensor'
        if name in class_facts(self.other).fields:
            hint = f'write "model_type": "{self.other}" in a copy of the config: its class is in architectures, and reads {name}'
        self._errors.append(diagnostic("MP806", detail, self._source.locate(name), (hint,)))

    def _decides(self, key: str, value: Any) -> bool:
        """True if an unknown field's name says that it decides the number or size of tensors, and its value differs from the class's."""
        heads, hidden = self.value("num_attention_heads"), self.value("hidden_size")
        if sizes_of_parts(key, value, self._layers) or (self.own_code and switches_of_own_code(key, value)):
            return True
        if isinstance(value, bool) or not isinstance(value, int) or value < 2:
            return False
        if any(value == self.value(other) for names in _SAME if key in names for other in names if other != key):
            return False
        if key == "intermediate_size" and self.has("moe_intermediate_size"):  # a field of related models with dense layers
            return False
        plain = (key == "head_dim" and isinstance(heads, int) and value * heads == hidden) or (key in _SAME[4] and value == heads)
        return names_a_tensor(key, value) and not plain

    def _value_of(self, key: str) -> Any:
        """The field, or the class's default; null if there is neither."""
        if key not in self._names and key in self.facts.fields and not self.strict:
            if self.facts.fields[key] is not None:
                self._defaults[key] = self.facts.fields[key]
            return self.facts.fields[key]
        self.skip(key)
        return self._config[self._names[key]] if key in self._names else None

    def _required(self, key: str, like: str) -> Any:
        if key in self._names or (key in self.facts.fields and not self.strict):
            return self._value_of(key)
        self._missing(key, like)
        return _MISSING

    def _missing(self, key: str, like: str) -> None:
        detail = f"{self.family} has no field {key}, which decides the structure"
        if self.facts.fields.get(key) is not None:
            like = _shown(self.facts.fields[key])
        hint = f'add "{key}", as in "{key}": {like}, with the released model\'s value'
        self._errors.append(diagnostic("MP803", detail, Location(file=self._source.file, key=key), (hint,)))

    def _is_whole(self, key: str, value: Any, least: int) -> bool:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_INT:
            return True
        self.wrong(key, value, f"an integer of at least {least}")
        return False


_SAME = (
    ("num_experts", "n_routed_experts", "num_local_experts", "num_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk"),
    ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    ("num_attention_heads", "num_heads", "n_heads", "n_head"),
    ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    ("head_dim", "attention_head_dim", "kv_channels"),
    ("hidden_size", "d_model", "n_embd", "embed_dim"),
    ("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"),
    ("vocab_size", "padded_vocab_size", "org_vocab_size"),
)
"""Names of one count in configs of different classes."""


class _Missing:
    """The value of a field that is missing and already reported."""


_MISSING = _Missing()


def _among(value: Any, accepted: Sequence[Any]) -> bool:
    """True if the value is one of `accepted`; true is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
