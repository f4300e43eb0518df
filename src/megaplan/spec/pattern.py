"""The blocks that a depth of multi-token prediction has between its projection and its output norm."""

import re
from collections.abc import Hashable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.families.dense import DENSE
from megaplan.families.dense.section import Mlp
from megaplan.families.family import Family
from megaplan.families.registry import FAMILIES
from megaplan.spec.models import Model
from megaplan.wording import plural, quoted, series

LETTERS = "".join(FAMILIES)
BOUNDARY = "|"
ALPHABET = f"{', '.join(f'{family.letter} ({family.title})' for family in FAMILIES.values())} and '|' (stage boundary)"

_LONG_NAME = re.compile(rf"([{LETTERS}])(?:_?block)", re.IGNORECASE)
_PATTERN = re.compile(rf"[{LETTERS}{BOUNDARY}]+", re.IGNORECASE)
_MAX_SHOWN = 60
_MEGATRON = {"*": "A", "-": "D", "+": "A"}
_MEGATRON_HINTS = {
    "*": "Megatron's '*' is A with attention.kind gqa",
    "+": "Megatron's '+' is A with attention.kind mla",
    "-": "Megatron's '-' is D",
    "/": "Megatron's '/' begins multi-token prediction; write features.mtp instead",
}

Span = tuple[int, int]
"""Layers [start, stop)."""


class Pattern(NamedTuple):
    """A parsed pattern.

    Attributes:
        text: Text in upper case.
        layers: One letter per layer, expanded; `len(layers)` is `num_layers`.
        spans: Half-open layer spans between the boundaries, in order; None if the text has no `|`.
    """

    text: str
    layers: str
    spans: tuple[Span, ...] | None

    def counts(self) -> dict[str, int]:
        """Layers by letter, for letters that occur, in alphabetical order."""
        return {letter: self.layers.count(letter) for letter in LETTERS if letter in self.layers}

    def describe(self) -> str:
        """`64 layers = 32 A + 32 D`."""
        return f"{plural(len(self.layers), 'layer')} = {' + '.join(f'{count} {letter}' for letter, count in self.counts().items())}"


def parse_pattern(text: str, num_layers: int, location: Location | None = None) -> Pattern:
    """Parse a pattern.

    Args:
        text: Text of the spec; lower case is normalised.
        num_layers: Letters in the whole model.
        location: Position of the text, for diagnostics.

    Raises:
        MegaplanError: MP301 unknown letter, MP303 length, MP304 empty, MP306 spaces; all that are found.
    """
    where = location or Location(key="model.pattern")
    found = list(_character_errors(text, where)) or list(_length_errors(text, num_layers, where))
    if found:
        raise MegaplanError(found)
    normal = text.upper()
    if BOUNDARY not in normal:
        return Pattern(normal, (normal * -(-num_layers // len(normal)))[:num_layers], None)
    stops = [0]
    for part in normal.split(BOUNDARY):
        stops.append(stops[-1] + len(part))
    return Pattern(normal, normal.replace(BOUNDARY, ""), tuple(pairwise(stops)))


def has_boundaries(text: str) -> bool:
    """True if the pattern decides the split (`|`)."""
    return BOUNDARY in text


def _character_errors(text: str, where: Location) -> Iterator[Diagnostic]:
    if _PATTERN.fullmatch(text):
        return
    if not text.replace(BOUNDARY, "").strip():
        yield diagnostic("MP304", f"{where.key} = {quoted(text)}", where, ("pattern: AD",))
        return
    names = _LONG_NAME.findall(text)
    if names and not _LONG_NAME.sub("", text).strip(" ,;-_|>+/\t\n"):
        detail = f"{where.key} = {quoted(text, _MAX_SHOWN)} spells block names, but one letter is one layer"
        boundaries = "".join(found.group(1) or BOUNDARY for found in re.finditer(rf"{_LONG_NAME.pattern}|\|", text, re.IGNORECASE))
        yield diagnostic("MP301", detail, where, (f"pattern: {boundaries.upper()[:_MAX_SHOWN]}",))
        return
    spaces = [column for column, letter in enumerate(text, start=1) if letter.isspace()]
    if spaces:
        detail = f"{where.key} = {quoted(text, _MAX_SHOWN)}, with a space at {_columns(spaces)}"
        joined = "".join(text.split()).upper()
        pasteable = len(joined) <= _MAX_SHOWN and set(joined) <= set(LETTERS + BOUNDARY)
        yield diagnostic("MP306", detail, where, (f"pattern: {joined}",) if pasteable else ())
    unknown: dict[str, list[int]] = {}
    for column, letter in enumerate(text, start=1):
        if letter.upper() not in LETTERS + BOUNDARY and not letter.isspace():
            unknown.setdefault(letter.upper() if letter.isascii() else letter, []).append(column)
    if unknown:
        yield _unknown_letters(text, unknown, where)


def _unknown_letters(text: str, unknown: dict[str, list[int]], where: Location) -> Diagnostic:
    faults = series([f"{quoted(letter)} at {_columns(at)}" for letter, at in list(unknown.items())[:8]], "and")
    detail = f"{where.key} = {quoted(text, _MAX_SHOWN)}, with {faults}\nthe alphabet is {ALPHABET}"
    hints = [_MEGATRON_HINTS[letter] for letter in unknown if letter in _MEGATRON_HINTS]
    rewritten = "".join(_MEGATRON.get(letter, letter) for letter in "".join(text.split()).upper())
    if set(unknown) <= set(_MEGATRON) and len(rewritten) <= _MAX_SHOWN:
        hints.append(f"pattern: {rewritten}")
    if any(letter.isdigit() or letter in "()[]{}" for letter in unknown):
        hints.append("there is no repetition: a pattern without '|' is cycled to num_layers")
    return diagnostic("MP301", detail, where, hints)


def empty_slots(text: str, where: Location) -> Iterator[Diagnostic]:
    """MP305 if a boundary of the pattern leaves a slot without a layer."""
    parts = text.split(BOUNDARY)
    empty = [index for index, part in enumerate(parts) if not part]
    if BOUNDARY in text and empty:
        numbers = series([str(index) for index in empty[:8]], "and")
        slots = f"{'slot' if len(empty) == 1 else 'slots'} {numbers} of {len(parts)}"
        detail = f"{where.key} = {quoted(text, _MAX_SHOWN)} leaves {slots} without a layer"
        rewritten = BOUNDARY.join(part for part in parts if part).upper()
        yield diagnostic("MP305", detail, where, (f"pattern: {rewritten}",) if 0 < len(rewritten) <= _MAX_SHOWN else ())


def _length_errors(text: str, num_layers: int, where: Location) -> Iterator[Diagnostic]:
    letters = len(text) - text.count(BOUNDARY)
    if BOUNDARY in text and letters != num_layers:
        detail = f"{where.key} has {plural(letters, 'letter')} and '|', so it is not cycled, and model.num_layers = {num_layers}"
        yield diagnostic("MP303", detail, where, (f"num_layers: {letters}", "remove the '|' to cycle the pattern"))


def _columns(columns: list[int]) -> str:
    shown = [str(column) for column in columns[:5]]
    if len(columns) > len(shown):
        shown.append(f"{len(columns) - len(shown)} more")
    return f"column{'s' if len(columns) > 1 else ''} {series(shown, 'and')}"


NAMES = ("attention", "mlp")
"""Names of the blocks if no pattern is given."""


class DepthBlock(NamedTuple):
    """A block of a depth.

    Attributes:
        name: Name of its module in the depth.
        family: Family of the block.
        section: Dimensions of the block.
        variant: `Family.variant` of a layer after the model's last one: its attention has the model's window, and no indexer.
        operations: `Family.operations` of this kind of layer.
    """

    name: str
    family: Family
    section: Any
    variant: Hashable
    operations: Hashable


@lru_cache(maxsize=64)
def _mlp(ffn_hidden_size: int, activation: str, bias: bool) -> Mlp:
    """A depth's own MLP, the same object for equal values, because evaluations need it often."""
    return Mlp.model_validate({"ffn_hidden_size": ffn_hidden_size, "activation": activation, "bias": bias})


def depth_families(model: Model) -> list[tuple[Family, Any]]:
    """The families of the blocks of each depth in order, each with its section: the model's, but an MLP has the depth's own.

    Raises:
        ValueError: The model has no depths, or lacks a section that they need (an unchecked spec).
    """
    mtp = model.features.mtp
    if mtp is None:
        raise ValueError("the model has no section features.mtp")
    own, families = _mlp(mtp.ffn_hidden_size, mtp.activation, mtp.bias), [FAMILIES[letter] for letter in mtp.letters]
    return [(family, own if family is DENSE else family.section_of(model)) for family in families]


def depth_blocks(model: Model) -> tuple[DepthBlock, ...]:
    """The blocks of each depth in order; errors as for `depth_families`."""
    layer, found, named = model.num_layers, [], model.features.mtp is not None and model.features.mtp.pattern is None
    for index, (family, section) in enumerate(depth_families(model)):
        name = NAMES[index] if named else f"block{index}"
        found.append(DepthBlock(name, family, section, family.variant(section, layer, model.num_layers), family.operations(section, layer)))
    return tuple(found)
