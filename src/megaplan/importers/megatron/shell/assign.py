"""Assignments of a script: variables, arrays, their elements by number or by key, and sums that assign."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from megaplan.importers.megatron.shell.expand import Field, Scope, unknown
from megaplan.importers.megatron.shell.words import Part, PartKind, Word

_PLAIN = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_OPENED, _CLOSED = re.compile(r"([A-Za-z_]\w*)?\[", re.ASCII), re.compile(r"\](\+?)=")
_COUNTED = re.compile(r"([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)\s*(.*))|(\+\+|--)\s*([A-Za-z_]\w*)", re.ASCII | re.DOTALL)
MOST_ELEMENTS = 10_000
"""Of an array of which one element is set."""


class Element(NamedTuple):
    """`NAME[KEY]=VALUE`, or `[KEY]=VALUE` among an array's items, whose name is empty."""

    name: str
    key: Word
    more: bool
    value: Word


def assigns(word: Word) -> bool:
    """Whether the word is an assignment."""
    return _PLAIN.match(_head(word)) is not None or bool((found := _element(word)) and found.name)


def assigned(scope: Scope, word: Word) -> bool:
    """Whether the word is an assignment, which is made."""
    element = _element(word)
    if element is not None and element.name:
        _set_element(scope, scope.pointers.get(element.name, element.name), element)
        return True
    match = _PLAIN.match(_head(word))
    if match is None:
        return False
    name, more = scope.pointers.get(match[1], match[1]), bool(match[2])
    if word.items is not None:
        _set_items(scope, name, word.items, more=more)
        return True
    before = scope.values.get(name, []) if more else []
    text = scope.text(word)[match.end() :]
    scope.set(name, [Field((before[0].text if before else "") + text, word.line)], array=False)
    return True


def declared(scope: Scope, words: Sequence[Word]) -> None:
    """Words behind `declare` and its like; `-A` makes arrays whose elements have keys, `-n` names that stand for others."""
    options = "".join(word.plain or "" for word in words if (word.plain or "").startswith("-"))
    for word in words:
        name = name_of(word)
        if name is None:
            continue
        if "n" in options:
            scope.pointers[name] = scope.text(word).partition("=")[2]
            continue
        if "A" in options:
            scope.keyed.setdefault(name, {})
        assigned(scope, word)


def name_of(word: Word) -> str | None:
    """The variable that a word behind `declare` names."""
    found = re.match(r"[A-Za-z_]\w*", _head(word), re.ASCII)
    return None if found is None else found[0]


def counted(scope: Scope, text: str) -> int | None:
    """The value of a sum, whose assignment (`=`, `+=`, `++` …) is made; None where it is not known."""
    match = _COUNTED.fullmatch(text.strip())
    if match is None:
        return scope.sum(text)
    name, step = match[1] or match[6], match[2] or match[5]
    by, sign = ("1", step[0]) if step else (match[4], match[3])
    found = scope.sum(f"{name} {sign} ({by})" if sign else by)
    scope.set(name, [Field(unknown(f"(({text.strip()}))") if found is None else str(found), 0)], array=False)
    behind = bool(match[2]) and found is not None  # `i++` is what i was
    return found if not behind or found is None else found - (1 if step == "++" else -1)


def _set_items(scope: Scope, name: str, items: Sequence[Word], *, more: bool) -> None:
    elements = [_element(item) for item in items]
    if name in scope.keyed:
        given = {scope.text(each.key): Field(scope.text(each.value), each.key.line) for each in elements if each is not None}
        scope.set_keyed(name, {**(scope.keyed[name] if more else {}), **given})
        return
    held = list(scope.values.get(name, [])) if more else []
    for item, element in zip(items, elements, strict=True):  # an item may refer to the array as it was
        if element is None or element.name:
            held += scope.fields(item)
        else:
            held = _placed(scope, held, element)
    scope.set(name, held, array=True)


def _set_element(scope: Scope, name: str, element: Element) -> None:
    line = element.key.line
    if name in scope.keyed:
        key = scope.text(element.key)
        before = scope.keyed[name].get(key) if element.more else None
        scope.set_keyed(name, {**scope.keyed[name], key: Field((before.text if before else "") + scope.text(element.value), line)})
        return
    scope.set(name, _placed(scope, scope.values.get(name, []), element), array=True)


def _placed(scope: Scope, fields: Sequence[Field], element: Element) -> list[Field]:
    """Fields of an array with one of them set by its number."""
    place, held = scope.sum(scope.text(element.key)), list(fields)
    if place is None or not 0 <= place < MOST_ELEMENTS:
        return held
    held += [Field("", element.key.line)] * (place + 1 - len(held))
    held[place] = Field((held[place].text if element.more else "") + scope.text(element.value), element.key.line)
    return held


def _element(word: Word) -> Element | None:
    """A word that sets one element: `[` is unquoted and in its first part, `]=` in that or a later one."""
    opened = _OPENED.match(_head(word))
    if opened is None or word.items is not None:
        return None
    first = Part(PartKind.TEXT, word.parts[0].text[opened.end() :], quoted=False)
    key: list[Part] = []
    rest = (first, *word.parts[1:])
    for place, part in enumerate(rest):
        closed = _CLOSED.search(part.text) if part.kind is PartKind.TEXT and not part.quoted else None
        if closed is None:
            key.append(part)
            continue
        key.append(Part(PartKind.TEXT, part.text[: closed.start()], quoted=False))
        value = (Part(PartKind.TEXT, part.text[closed.end() :], quoted=False), *rest[place + 1 :])
        return Element(opened[1] or "", Word(tuple(key), word.line), bool(closed[1]), Word(value, word.line))
    return None


def _head(word: Word) -> str:
    """The unquoted beginning of a word."""
    first = word.parts[0] if word.parts else None
    return first.text if first is not None and not first.quoted and first.kind is PartKind.TEXT else ""
