"""`--set KEY=VALUE`: a value of a spec replaced on the command line, with a position for diagnostics."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from shlex import quote
from typing import Any

import yaml

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.spec.document import Document, KeyPath, SourceMap, dotted, parse_document
from megaplan.spec.fields import legal_keys
from megaplan.spec.other_names import GLOBAL_BATCH, GPUS
from megaplan.spec.read import NO_CONTROL
from megaplan.spec.type_errors import meant_settings, near_keys
from megaplan.wording import argument as as_argument
from megaplan.wording import quoted, series

LABEL = "--set "
"""Prefix of the location of a value from the command line."""
MOST_WIDTH = 10_000
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_SETTING = re.compile(rf"\s*{_KEY.pattern}=[^={{}}\[\]\"']+")


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """The document with every `KEY=VALUE` applied, in order; the last value of a key counts. The argument is not modified.

    Returns:
        A new document; MP140 … MP143 are among its faults, and an override that has one is not applied.
    """
    value, source = document.value, document.source
    faults = list(document.faults)
    if not isinstance(value, dict):
        return document
    seen: list[tuple[str, ...]] = []
    for argument in overrides:
        label = f"{LABEL}{quoted(argument, 80)[1:-1]}"
        try:
            path, given = _parse(argument, value, label)
        except MegaplanError as error:
            faults.extend(error.diagnostics)
            continue
        parts = [other for other in seen if len(other) > len(path) and other[: len(path)] == path]
        if parts:
            detail = f"{'.'.join(parts[0])} is set, but {'.'.join(path)} after it replaces the whole section"
            faults.append(diagnostic("MP143", detail, Location(file=label)))
        seen.append(path)
        value = _replaced(value, path, given)
        source = source.with_override(".".join(path), label)
    return Document(value, source, tuple(faults))


def as_arguments(found: Diagnostic, document: Document, *, imported: bool = False) -> Diagnostic:
    """A diagnostic about a value of the command line or of an import, with lines of a file among its hints written as arguments."""
    place = found.location
    if place.key is None or not (imported or (place.file or "").startswith(LABEL)):
        return found
    section = tuple(place.key.split(".")[:-1])
    hints = (_argument(hint, section, document.value) for hint in found.hints)
    return replace(found, hints=tuple(_without_section(hint, document.source) for hint in hints))


def _without_section(hint: str, source: SourceMap) -> str:
    """The hint. If it would replace a section of which an argument sets a key (MP143), the hint names the argument to remove instead."""
    key = hint.removeprefix(LABEL).partition("=")[0] if hint.startswith(LABEL) else None
    return next((f"remove {label}" for given, label in source.overrides.items() if given.startswith(f"{key}.")), hint)


def _argument(hint: str, section: KeyPath, document: Any) -> str:
    """`--set schedule.kind=1f1b` for `kind: 1f1b`, a line of a section; any other hint unchanged."""
    try:
        held = parse_document(f"{{{hint}}}", None)
    except MegaplanError:
        return hint
    lines = held.value
    if (
        held.faults
        or not isinstance(lines, dict)
        or not lines
        or any(value is None and not hint.endswith("null") for value in lines.values())
    ):
        return hint
    texts = []
    for name, value in lines.items():
        own = next((section[:depth] for depth in range(len(section), -1, -1) if name in legal_keys(section[:depth], document)), None)
        if own is None:
            return hint
        texts += _settings((*own, str(name)), value, document)
    return " ".join(f"--set {quote(text)}" for text in texts)


def _settings(path: KeyPath, value: Any, document: Any) -> list[str]:
    """`KEY=VALUE` texts of a value: one of each key that a section has."""
    keys = legal_keys(path, document) if isinstance(value, dict) else {}
    if isinstance(value, dict) and value and all(name in keys for name in value):
        return [text for name, inner in value.items() for text in _settings((*path, name), inner, document)]
    written = yaml.safe_dump(value, default_flow_style=True, width=MOST_WIDTH, sort_keys=False).removesuffix("...\n").strip()
    return [f"{dotted(path)}={written}"]


def _parse(argument: str, document: dict[str, Any], label: str) -> tuple[tuple[str, ...], Any]:
    key, separator, text = argument.partition("=")
    if not separator or not _KEY.fullmatch(key.strip()):
        raise _refusal("MP140", f"{quoted(argument)} is not KEY=VALUE", label, "--set mesh.tp=8")
    if joined := _joined(argument, document):
        detail = f"{quoted(argument)} has {len(joined)} settings, but each needs a separate argument"
        raise _refusal("MP140", detail, label, " ".join(joined))
    path = _known_path(_path_of(key), text.strip(), document, label)
    if not text.strip():
        raise _refusal("MP142", f"{key.strip()} has no value after '='", label, f"--set {key.strip()}=null")
    control = NO_CONTROL.search(text)
    if control:
        raise _refusal("MP142", f"the value has the control character U+{ord(control.group()):04X}", label)
    try:
        given = parse_document(text, None)
        faults = given.faults
    except MegaplanError as error:
        faults = error.diagnostics
    if faults:
        raise MegaplanError(
            [diagnostic("MP142", f"{quoted(text)}: {item.detail}", Location(file=label), item.hints[:-1]) for item in faults]
        )
    return path, given.value


def is_setting(text: str) -> bool:
    """True for `KEY=VALUE` with a dotted key."""
    key, separator, value = text.partition("=")
    return bool(separator and value and _KEY.fullmatch(key))


def _path_of(key: str) -> tuple[str, ...]:
    """The steps of a dotted key, in which dashes are underscores."""
    return tuple(key.strip().replace("-", "_").split("."))


def _joined(argument: str, document: dict[str, Any]) -> list[str]:
    """Arguments for `mesh.tp=2,mesh.pp=4`, several settings in one; empty if the text is one setting."""
    found = []
    for part in argument.split(",") if "," in argument else ():
        if not _SETTING.fullmatch(part):
            return []
        key, _, text = part.partition("=")
        path = _path_of(key)
        if path[-1] in legal_keys(path[:-1], document):
            found.append(f"--set {quote(f'{dotted(path)}={text}')}")
        elif settings := _arguments(meant_settings(path, document, _plain(text)), text, _plain(text)):
            found.append(settings[0])
        else:
            return []
    return found


def _known_path(path: tuple[str, ...], text: str, document: dict[str, Any], label: str) -> tuple[str, ...]:
    """The path with the names of the spec's keys, in whatever case they were written; `device=h100` is the device's name.

    Raises:
        MegaplanError: MP141, a name is not a key of its section; the hints are arguments with the keys that may have been meant.
    """
    found: tuple[str, ...] = ()
    for depth, name in enumerate(path):
        section: KeyPath = found
        legal = [str(known) for known in legal_keys(section, document)]
        same = [known for known in legal if known.lower() == name.lower()]
        if not same:
            where = ".".join(found) or "a spec"
            detail = f"{quoted('.'.join(path))}: {quoted(name)} is not a key of {where}"
            if legal:
                detail += f"; its keys are {series(legal, 'and')}"
            unknown = (*section, name)
            value = _plain(text)
            settings = meant_settings(unknown, document, value) if depth == len(path) - 1 and text else []
            meant = _arguments(settings, text, value)
            if name.lower() in GLOBAL_BATCH and text.isdigit():
                meant = [f"--global-batch {text}", *meant]
            hints = _of_gpus(name, text, document) if section in ((), ("mesh",), ("device",)) else ()
            raise _refusal("MP141", detail, label, *(hints or meant or near_keys(unknown, document, value)))
        found = (*found, name if name in same else same[0])
    return (*found, "name") if found == ("device",) and text[:1] not in ("{", "") and text != "null" else found


def settings_named(name: str, text: str) -> tuple[str, ...]:
    """Arguments `--set KEY=VALUE` for the keys that another tool's option may have meant.

    Args:
        name: Name of the option without dashes in front: `tensor-model-parallel-size`.
        text: Value of the option; `true` for a switch.
    """
    value = _plain(text)
    settings = meant_settings((name.lower().replace("-", "_"),), {}, value)
    return tuple(_arguments(settings, text, value))


def _arguments(settings: Sequence[tuple[KeyPath, Any]], text: str, value: Any) -> list[str]:
    """Arguments for settings; unchanged values keep their original text."""
    return [f"--set {quote(f'{dotted(key)}={text if given is value else as_argument(given)}')}" for key, given in settings]


def _plain(text: str) -> Any:
    """The value of a text of `--set`; the text itself if it is not a YAML value."""
    try:
        return parse_document(text, None).value
    except MegaplanError:
        return text


def _of_gpus(name: str, text: str, document: dict[str, Any]) -> tuple[str, ...]:
    """Hints for a number of GPUs, which is not a key: the product of the mesh's degrees, of which dp_shard is the usual one to change."""
    if name.lower() not in GPUS or not text.isdigit():
        return ()
    mesh = document.get("mesh")
    others = [value for key, value in mesh.items() if key in _DEGREES] if isinstance(mesh, dict) else []
    rest = prod(value for value in others if isinstance(value, int))
    shards = int(text) // rest if rest and int(text) % rest == 0 else int(text)
    return f"--set mesh.dp_shard={shards}", f"--gpus {text}"


_DEGREES = ("pp", "dp_replicate", "cp", "tp")


def _replaced(value: Any, path: tuple[str, ...], given: Any) -> Any:
    """A copy of `value` with `given` at `path`; aliases of the old value elsewhere do not change."""
    if not path:
        return given
    section = value if isinstance(value, dict) else {}
    return {**section, path[0]: _replaced(section.get(path[0]), path[1:], given)}


def _refusal(code: str, detail: str, label: str, *hints: str) -> MegaplanError:
    return MegaplanError([diagnostic(code, detail, Location(file=label), hints)])
