"""Diagnostics for one value of a wrong type, name or size."""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from shlex import quote
from typing import Any, NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, MegaplanError
from megaplan.hosts.registry import HOSTS
from megaplan.spec.document import KeyPath, SourceMap, dotted, parse_document
from megaplan.spec.fields import accepts, all_keys, defaults_of, kinds_of, legal_keys
from megaplan.spec.other_names import DTYPES, GLOBAL_BATCH, keys_named, microbatches_of, value_named
from megaplan.spec.rules import of_another_host
from megaplan.units import parse_bytes
from megaplan.wording import argument, plural, quoted, series, show

_MAX_LISTED = 24
_SEQUENCE_PARALLEL = {"sp", "sequence_parallel", "sequence_parallelism"}
_OTHER_WORDS = DTYPES | {"mha": "gqa", "mqa": "gqa"}
_SWITCHES = {"yes": "true", "on": "true", "y": "true", "1": "true", "no": "false", "off": "false", "n": "false", "0": "false"}
_AMBIGUOUS = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*_[0-9_]*|[0-9][0-9_]*(:[0-9]+)+|0[xob][0-9a-fA-F_]+)")
_PLAIN_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_NAMED_UNIT = re.compile(r"_([kmgt]i?b)$")
_BASES = {"0x": 16, "0o": 8, "0b": 2}


class Fault(NamedTuple):
    """A finding of the models: its type, path and input, and the surrounding document."""

    type: str
    path: KeyPath
    value: Any
    context: Mapping[str, Any]
    document: Any

    @property
    def key(self) -> str:
        """The dotted key."""
        return dotted(self.path)


def missing_keys(path: KeyPath, names: list[str], document: Any, source: SourceMap) -> Diagnostic:
    """Required keys that are missing in a section."""
    section = dotted(path)
    wanted = series(names, "and")
    detail = f"{section} lacks {wanted}" if section else f"the spec lacks {wanted}"
    kind = _at(document, path)
    if isinstance(kind, Mapping) and isinstance(kind.get("kind"), str):
        detail += f", which kind {kind['kind']} needs"
    hint = f"add {wanted} {'below ' + section if section else 'at the top level'}"
    return diagnostic("MP121", detail, source.locate(dotted((*path, names[0]))), (hint,))


def unknown_key(path: KeyPath, document: Any, source: SourceMap) -> Diagnostic:
    """The diagnostic for a key that its section does not have."""
    name, section, where = str(path[-1]), dotted(path[:-1]), source.locate(dotted(path))
    if path[:-1] == ("mesh",) and name in _SEQUENCE_PARALLEL:
        tp = _at(document, ("mesh", "tp"))
        detail = (
            f"mesh.{name} = {show(_at(document, path))}; sequence parallelism is on exactly when mesh.tp > 1, and mesh.tp = {show(tp or 1)}"
        )
        return diagnostic(
            "MP217", detail, where, (f"remove mesh.{name}", "mesh: {tp: 8}, for tensor and sequence parallelism over 8 ranks")
        )
    legal = legal_keys(path[:-1], document)
    hints = near_keys(path, document, _at(document, path))
    if name == "<<":
        hints = ["merge keys are not read; write the keys out"]
    hints = hints or [f"remove {dotted(path)}"]
    listed = series([str(key) for key in list(legal)[:_MAX_LISTED]], "and")
    detail = f"{quoted(name)} is not a key of {section or 'a spec'}" + (f"; its keys are {listed}" if legal else "")
    return diagnostic("MP120", detail, where, hints)


def near_keys(path: KeyPath, document: Any, value: Any) -> list[str]:
    """Hints of the keys that an unknown key with this value may have meant."""
    name, section = str(path[-1]), path[:-1]
    meant = [dotted(key) if given == value else f"{dotted(key)}: {argument(given)}" for key, given in meant_settings(path, document, value)]
    owners = [kind for kind in kinds_of(section) if name in legal_keys(section, _with_kind(section, kind))]
    return [f"did you mean {series(meant)}?"] if meant else [f"{name} is a key of kind {series(owners)}"] if owners else []


def meant_settings(path: KeyPath, document: Any, value: Any) -> list[tuple[KeyPath, Any]]:
    """Keys that may have been meant by an unknown key and whose type accepts its value, each with the value; sizes are in bytes."""
    if str(path[-1]).lower() in GLOBAL_BATCH and isinstance(value, int):
        known = isinstance(document, Mapping) and document  # without the other factors of the batch, the quotient is not known
        return [(("schedule", "num_microbatches"), count) for count in microbatches_of(document, value)] if known else []
    found: list[tuple[KeyPath, Any]] = []
    for key in _meant_keys(path, document):
        size = _size(str(path[-1]), key, value)
        given = value_named(dotted(key), value) if size is None else size
        if accepts(key, given, document):
            found.append((key, given))
    return found


def _size(name: str, key: KeyPath, value: Any) -> int | None:
    """The bytes of a size such as 80GB, or of a number under a name with a unit such as memory_gb, for a key that holds bytes."""
    unit = _NAMED_UNIT.search(name.lower())
    if unit and isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value}{unit[1]}"
    if not isinstance(value, str) or not (key[-1] == "capacity" or "reserve" in key):
        return None
    try:
        return parse_bytes(value)
    except ValueError:
        return None


def _meant_keys(path: KeyPath, document: Any) -> list[KeyPath]:
    """Keys that an unknown key may mean: by other tools' names, else similar ones in its section, else similar ones anywhere.

    Empty for a key of the section's other kinds.
    """
    name, section = str(path[-1]), path[:-1]
    plain = name.lower().replace("-", "_")
    legal = [str(key) for key in legal_keys(section, document)]
    others = keys_named(dotted(section), plain)
    if others is None:
        near = [(*section, key) for key in get_close_matches(plain, legal, n=1)]
    else:
        near = [(*section, key) for key in others if key in legal] or [tuple(key.split(".")) for key in others if "." in key]
    if near or others == ():
        return near
    if any(name in legal_keys(section, _with_kind(section, kind)) for kind in kinds_of(section)):
        return []
    return _elsewhere(plain, {name, plain, *(others or ())})


def _elsewhere(plain: str, wanted: set[str]) -> list[KeyPath]:
    """Keys of any section with this last name, or with a similar one if there is none."""
    elsewhere = [key for key in all_keys() if key[-1] in wanted]
    if elsewhere:  # excludes keys that are nested much deeper than the wrong one, such as those of an encoder
        shallow = min(map(len, elsewhere)) + 1
        return sorted((key for key in elsewhere if len(key) <= shallow), key=dotted)[:4]
    by_name = {str(key[-1]): key for key in all_keys()}
    return [by_name[key] for key in get_close_matches(plain, by_name, n=1, cutoff=0.8)]


def _with_kind(section: KeyPath, kind: str) -> Any:
    """A document with only a section of that kind."""
    document: Any = {"kind": kind}
    for step in reversed(section):
        document = {step: document}
    return document


def describe(fault: Fault, source: SourceMap) -> Diagnostic:
    """The diagnostic for one wrong value; of a key that the spec's host does not have, that it is of another host."""
    if fault.path[0] == "host" and len(fault.path) > 1:
        name, key = (_at(fault.document, ("host", "name")) or next(iter(HOSTS))), str(fault.path[1])
        if key != "name" and name in HOSTS and key not in HOSTS[name].keys:
            return of_another_host(key, name, source.locate)
    code, detail, hints = _MAKERS.get(fault.type, _other)(fault)
    hints = [hint for hint in hints if _is_taken(fault, hint)] or _without_a_meaning(fault)
    of_kind = fault.type in ("union_tag_invalid", "union_tag_not_found")
    key = f"{fault.key}.kind" if of_kind else fault.key
    where = source.locate(fault.key if fault.type == "union_tag_not_found" else key)
    if key in source.overrides or (of_kind and where.file in source.overrides.values()):
        name = f"{key.rpartition('.')[2]}: "  # a hint for the command line is another argument of the command
        hints = [f"--set {quote(f'{key}={hint.removeprefix(name)}')}" if hint.startswith(name) else hint for hint in hints]
    return diagnostic(code, detail, where, hints)


def _is_taken(fault: Fault, hint: str) -> bool:
    """False for a line `key: value` with a value that the key's type does not take."""
    key = fault.path[: _depth(fault)]
    name, separator, text = hint.partition(": ")
    if not separator or not key or name != key[-1]:
        return True
    try:
        return accepts(key, parse_document(text, None).value, fault.document)
    except MegaplanError:
        return True


def _without_a_meaning(fault: Fault) -> list[str]:
    """Hints for a value that means nothing: the key's default, else its bound, else the command that describes the key."""
    key = fault.path[: _depth(fault)]
    if len(key) == len(fault.path) and (defaults := defaults_of(key, fault.document)):
        return [_line(fault, argument(defaults[0]))]
    if "le" in fault.context or "ge" in fault.context:
        return [_line(fault, str(next(iter(fault.context.values()))))]
    return [_line(fault, "1")] if fault.type == "greater_than" and isinstance(fault.value, int) else [f"megaplan explain {dotted(key)}"]


def _depth(fault: Fault) -> int:
    """Number of steps to the key whose line has the value: an item of a list is in the line of the list."""
    return next((depth for depth in range(len(fault.path), 0, -1) if isinstance(fault.path[depth - 1], str)), 0)


def _line(fault: Fault, text: str) -> str:
    """The line `key: value` that has `text` in the place of the value; if the value is a list, the line has all its items."""
    depth = _depth(fault)
    return f"{fault.path[depth - 1]}: {_with_item(_at(fault.document, fault.path[:depth]), fault.path[depth:], text)}"


def _with_item(value: Any, path: KeyPath, text: str) -> str:
    if not path:
        return text
    items = [_with_item(item, path[1:], text) if index == path[0] else argument(item) for index, item in enumerate(value)]
    return f"[{', '.join(items)}]"


Words = tuple[str, str, list[str]]


def _choice(fault: Fault) -> Words:
    legal = re.findall(r"'([^']*)'", str(fault.context.get("expected", "")))
    return _not_legal(fault.key, fault.value, legal, partial(_line, fault))


def _kind(fault: Fault) -> Words:
    return _not_legal(f"{fault.key}.kind", _at(fault.document, (*fault.path, "kind")), list(kinds_of(fault.path)), "kind: {}".format)


def _not_legal(key: str, value: Any, legal: list[str], line: Callable[[str], str]) -> Words:
    word = str(value).lower() if isinstance(value, str) else ""
    near = [_OTHER_WORDS[word]] if _OTHER_WORDS.get(word) in legal else get_close_matches(word, legal, n=1)
    hints = [line(near[0])] if near else [f"use {series(legal)}"]
    return "MP123", f"{key} = {show(value)}, but the legal values are {series(legal, 'and')}", hints


def _no_kind(fault: Fault) -> Words:
    kinds = kinds_of(fault.path)
    having = [kind for kind in kinds if set(fault.value) <= set(legal_keys(fault.path, _with_kind(fault.path, kind)))]
    return "MP122", f"{fault.key} has no key kind; the kinds are {series(kinds, 'and')}", [f"kind: {kind}" for kind in having or kinds]


def _integer(fault: Fault) -> Words:
    value, meant = fault.value, None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        meant = str(int(value))
    elif isinstance(value, str):
        size = _size(str(fault.path[-1]), fault.path, value)
        meant = _meant_integer(value) if size is None else str(size)
    shown = f"{show(value)} ({_what(value)})"
    if isinstance(value, str) and _AMBIGUOUS.fullmatch(value):
        shown = f"{show(value)} (another number to another YAML reader)"
    return "MP124", f"{fault.key} = {shown}, but it takes a plain integer", [_line(fault, meant)] if meant is not None else []


def _meant_integer(text: str) -> str | None:
    plain = text.strip().replace("_", "").replace(",", "")
    if len(plain) > 20:
        return None
    try:
        return str(int(plain, _BASES.get(plain[:2].lower(), 10)))
    except ValueError:
        return None


def _number(fault: Fault) -> Words:
    meant = fault.value.strip().replace("_", "") if isinstance(fault.value, str) else ""
    hints = [_line(fault, meant)] if _PLAIN_NUMBER.fullmatch(meant) else []
    return "MP125", f"{fault.key} = {show(fault.value)} ({_what(fault.value)}), but it takes a number", hints


def _what(value: Any) -> str:
    kinds = {
        bool: "a yes/no value",
        str: "text",
        float: "a number with a fraction or exponent",
        type(None): "empty",
        list: "a list",
        dict: "a section",
    }
    return kinds.get(type(value), "a number")


def _switch(fault: Fault) -> Words:
    meant = _SWITCHES.get(str(fault.value).lower())
    hints = [_line(fault, meant)] if meant else ["use true or false"]
    return "MP126", f"{fault.key} = {show(fault.value)}, but it takes true or false", hints


def _text(fault: Fault) -> Words:
    plain = fault.value is not None and not isinstance(fault.value, list | dict)
    return (
        "MP127",
        f"{fault.key} = {show(fault.value)} ({_what(fault.value)}), but it takes text",
        [_line(fault, f'"{show(fault.value)}"')] if plain else [],
    )


def _section(fault: Fault) -> Words:
    keys = [str(key) for key in legal_keys(fault.path, fault.document)]
    state = "is empty" if fault.value is None else f"= {show(fault.value)}"
    shape = _line(fault, f"{{{keys[0]}: …}}") if keys else ""
    optional = fault.value is None and defaults_of(fault.path, fault.document)
    hint = f"remove {fault.key} to keep its defaults" if optional else shape
    return "MP128", f"{fault.key} {state}, and it is a section with the keys {series(keys[:_MAX_LISTED], 'and')}", [hint] if hint else []


def _list(fault: Fault) -> Words:
    hints = [_line(fault, f"[{fault.value}]")] if isinstance(fault.value, int) else []
    return "MP129", f"{fault.key} = {show(fault.value)} ({_what(fault.value)}), but it takes a list", hints


def _bounds(fault: Fault) -> Words:
    bound = {
        "greater_than": "above",
        "greater_than_equal": "at least",
        "less_than_equal": "at most",
    }[fault.type]
    limit = next(iter(fault.context.values()))
    shown = f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
    return "MP130", f"{fault.key} = {show(fault.value)}, but it must be {bound} {shown}", []


def _finite(fault: Fault) -> Words:
    return "MP131", f"{fault.key} = {show(fault.value)}", []


def _pair(fault: Fault) -> Words:
    path = fault.path[:-1] if fault.type == "missing" else fault.path
    value = _at(fault.document, path)
    length = len(value) if isinstance(value, list) else 0
    return "MP132", f"{dotted(path)} = {show(value)} has {length} items, and a span has 2: [start, stop)", []


_FORMS = {r"^\d\d\.\d\d$": "a year and a month, such as 26.04"}
"""Texts that are not names, by the pattern of their key."""


def _text_form(fault: Fault) -> Words:
    if (form := _FORMS.get(str(fault.context.get("pattern")))) is not None:
        return "MP134", f"{fault.key} = {show(fault.value)}, but it must be {form}", [_line(fault, "null")]
    meant = re.sub(r"[^A-Za-z0-9._-]+", "-", str(fault.value)[:100]).strip("-._")
    detail = f"{fault.key} = {show(fault.value)}, but a name has 1 to 100 letters, digits, dots, dashes and underscores"
    return "MP133", detail, [_line(fault, meant)] if meant else []


def _quantity(fault: Fault) -> Words:
    return "MP470", f"{fault.key}: {fault.context.get('reason')}", []


def _multiple(fault: Fault) -> Words:
    return "MP134", f"{fault.key} = {show(fault.value)}, but it must be a multiple of {fault.context['multiple_of']}", []


def _length(fault: Fault) -> Words:
    return "MP132", f"{fault.key} = {show(fault.value)}, but it takes {plural(fault.context['min_length'], 'item')} or more", []


def _other(fault: Fault) -> Words:
    return "MP134", f"{fault.key} = {show(fault.value)}", []


_MAKERS = {
    "literal_error": _choice,
    "quantity": _quantity,
    "union_tag_invalid": _kind,
    "union_tag_not_found": _no_kind,
    "int_type": _integer,
    "float_type": _number,
    "bool_type": _switch,
    "string_type": _text,
    "model_type": _section,
    "model_attributes_type": _section,
    "dict_type": _section,
    "tuple_type": _list,
    "greater_than": _bounds,
    "greater_than_equal": _bounds,
    "less_than_equal": _bounds,
    "finite_number": _finite,
    "multiple_of": _multiple,
    "too_short": _length,
    "too_long": _pair,
    "missing": _pair,
    "string_pattern_mismatch": _text_form,
    "string_too_short": _text_form,
    "string_too_long": _text_form,
}


def _at(document: Any, path: KeyPath) -> Any:
    for step in path:
        if isinstance(document, Mapping):
            document = document.get(str(step))
        elif isinstance(document, list) and isinstance(step, int) and step < len(document):
            document = document[step]
        else:
            return None
    return document
