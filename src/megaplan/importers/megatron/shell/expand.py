"""Expansion of words: variables, arrays, defaults, patterns and sums. What is set nowhere stays in the text between two NUL signs."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import translate
from typing import NamedTuple

from megaplan.importers.megatron.shell.words import OPEN, Lexer, Part, PartKind, Word

HARD = "\xa0"
UNKNOWN = re.compile("\0([^\0]*)\0")
_BRACED = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_NAME = re.compile(r"\b[A-Za-z_]\w*", re.ASCII)


def _quotient(left: int, right: int) -> int:
    """Towards zero, as in C."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def _power(base: int, power: int) -> int:
    """Its last 64 bits.

    Raises:
        ValueError: The power is negative.
    """
    if power < 0:
        raise ValueError("no whole number")
    return pow(base, power, 1 << 64)


_SUMS: dict[type[ast.operator] | type[ast.cmpop], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
    ast.Pow: _power,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Field(NamedTuple):
    """One word after expansion, and the line of its text."""

    text: str
    line: int


def unknown(name: str) -> str:
    """The text of what is not known; its blanks part no words."""
    joined = re.sub(r"[ \t\n]+", HARD, name)
    return f"{OPEN}{joined}{OPEN}"


def unknown_names(text: str) -> list[str]:
    """Names of what a text misses."""
    return [name.replace(HARD, " ") for name in UNKNOWN.findall(text)]


def readable(text: str) -> str:
    """A text with `$NAME` for what it misses."""
    return UNKNOWN.sub(r"$\1", text).replace(HARD, " ")


class Kept(NamedTuple):
    """A variable as it was before a function made one of its own; None where it was not set."""

    fields: list[Field] | None
    array: bool
    keyed: dict[str, Field] | None


@dataclass(slots=True)
class Scope:
    """Variables of a script: lists of one field, or of several for an array.

    Attributes:
        values: By name; `-1` has those of the command line.
        arrays: Names that hold an array.
        keyed: Arrays whose elements have keys, by name and key; `values` has their elements too.
        pointers: Names that stand for another variable's (`declare -n`).
        output: What a command gives that needs not be run; None of any other.
        read_positional: Whether the script refers to its own arguments.
    """

    values: dict[str, list[Field]] = field(default_factory=dict)
    arrays: set[str] = field(default_factory=set)
    keyed: dict[str, dict[str, Field]] = field(default_factory=dict)
    pointers: dict[str, str] = field(default_factory=dict)
    positional: list[Field] = field(default_factory=list)
    read_positional: bool = False
    output: Callable[[Scope, str, int], str | None] = lambda _scope, _text, _line: None

    def set(self, name: str, fields: list[Field], *, array: bool) -> None:
        """Give a variable a value."""
        self.values[name] = fields
        (self.arrays.add if array else self.arrays.discard)(name)

    def set_keyed(self, name: str, elements: dict[str, Field]) -> None:
        """Give an array with keys its elements."""
        self.keyed[name] = elements
        self.set(name, list(elements.values()), array=True)

    def kept(self, name: str) -> Kept:
        """A variable as it is."""
        return Kept(self.values.get(name), name in self.arrays, self.keyed.get(name))

    def restore(self, name: str, kept: Kept) -> None:
        """A variable as it was."""
        self.values.pop(name, None)
        self.keyed.pop(name, None)
        if kept.keyed is not None:
            self.keyed[name] = kept.keyed
        if kept.fields is not None:
            self.set(name, kept.fields, array=kept.array)

    def fields(self, word: Word) -> list[Field]:
        """The words that one word becomes."""
        found: list[Field] = []
        started, text, line = False, "", word.line
        for part in word.parts:
            pieces = self._part(part, word.line)
            if part.quoted and part.kind is PartKind.VARIABLE and not _is_list(part.text):
                pieces = [Field(" ".join(piece.text for piece in pieces), pieces[0].line if pieces else word.line)]
            if part.quoted or part.kind is PartKind.TEXT:
                split = [(piece, index > 0, True) for index, piece in enumerate(pieces)]
                keeps = bool(pieces) or not _is_list(part.text)
            else:
                split, keeps = list(_split(pieces)), False
            for piece, new, whole in split:
                if new and started:
                    found.append(Field(text, line))
                    started, text = False, ""
                if piece.text or whole:
                    line = piece.line if not text else line
                    text, started = text + piece.text, True
            started = started or keeps
        return [*found, Field(text, line)] if started else found

    def text(self, word: Word) -> str:
        """The word as one text, as in an assignment."""
        return "".join(" ".join(piece.text for piece in self._part(part, word.line)) for part in word.parts)

    def pattern(self, word: Word) -> str:
        """The word as a pattern, in which quoted characters match themselves."""
        pieces = []
        for part in word.parts:
            text = " ".join(piece.text for piece in self._part(part, word.line))
            pieces.append(re.sub(r"([*?\[])", r"[\1]", text) if part.quoted else text)
        return "".join(pieces)

    def sum(self, text: str) -> int | None:
        """The value of a sum; None where a variable in it is set nowhere or it is none."""
        expanded = "".join(each.text for each in self._words(text.replace('"', ""), 0)) if "$" in text else text
        plain = _NAME.sub(lambda found: self._number(found[0]), expanded).strip()
        plain = re.sub(r"&&", " and ", re.sub(r"\|\|", " or ", plain))
        try:
            return _evaluate(ast.parse(plain or "0", mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError, OverflowError):
            return None

    def _number(self, name: str) -> str:
        found = self.values.get(name, [])
        return found[0].text or "0" if found else f"unset_{name}"

    def _part(self, part: Part, line: int) -> list[Field]:
        if part.kind is PartKind.TEXT:
            return [Field(part.text, line)]
        if part.kind is PartKind.COMMAND:
            given = self.output(self, part.text, line)
            return [Field(unknown(f"({part.text.strip()})") if given is None else given.rstrip("\n"), line)]
        if part.kind is PartKind.ARITHMETIC:
            value = self.sum(part.text)
            return [Field(unknown(f"(({part.text.strip()}))") if value is None else str(int(value)), line)]
        return self._variable(part.text, line)

    def _variable(self, text: str, line: int) -> list[Field]:
        if text.startswith("#") and len(text) > 1:
            inner = _BRACED.fullmatch(text[1:])
            found = self._value(self.pointers.get(inner[1], inner[1]), inner[2]) if inner else None
            size = 0 if found is None else len(found) if inner and inner[2] in ("@", "*") else len(found[0].text) if found else 0
            return [Field(str(size), line)]
        match = _BRACED.fullmatch(text.removeprefix("!"))
        if match is None:
            return [Field(unknown(text), line)]
        name, index, rest = self.pointers.get(match[1], match[1]), match[2], match[3]
        if text.startswith("!") and index in ("@", "*") and name in self.arrays:
            return [Field(key, line) for key in self.keyed.get(name, map(str, range(len(self.values[name]))))]
        if text.startswith("!"):  # the variable whose name the variable holds
            pointed = self._value(name, index)
            return self._variable(pointed[0].text, line) if pointed else [Field(unknown(name), line)]
        return self._operated(name, self._value(name, index), rest, line)

    def _value(self, name: str, index: str | None) -> list[Field] | None:
        """Fields of a variable; None where it is not set."""
        if name in ("@", "*"):
            self.read_positional = True
            return self.positional
        if name == "#":
            self.read_positional = True
            return [Field(str(len(self.positional)), 0)]
        if name.isdigit():
            self.read_positional = self.read_positional or name != "0"
            return self.positional[int(name) - 1 : int(name)] or None if name != "0" else None
        found = self.values.get(name)
        if found is None or index in ("@", "*") or name not in self.arrays:
            return found
        return self._element(name, "0" if index is None else index)

    def _element(self, name: str, index: str) -> list[Field] | None:
        if name in self.keyed:
            found = self.keyed[name].get("".join(each.text for each in self._words(index, 0)))
            return None if found is None else [found]
        place, held = self.sum(index), self.values[name]
        return [held[place]] if place is not None and -len(held) <= place < len(held) else None

    def _operated(self, name: str, found: list[Field] | None, rest: str, line: int) -> list[Field]:
        known = found is not None and not any(UNKNOWN.fullmatch(each.text) for each in found)
        full = known and any(each.text for each in found or [])
        for sign in (":-", ":=", "-", "=", ":+", "+", ":?", "?"):
            if rest.startswith(sign):
                holds = full if sign.startswith(":") else known
                if sign.endswith("+"):
                    return self._words(rest[len(sign) :], line) if holds else []
                if holds or sign.endswith("?"):
                    break
                other = self._words(rest[len(sign) :], line)
                if sign.endswith("="):
                    self.set(name, other, array=False)
                return other
        if found is None:
            return [] if name in ("@", "*") else [Field(unknown(name), line)]
        if not rest or rest[:2] in (":?", ":-", ":=") or rest[0] in "?-=":
            return found
        return [Field(_changed(each.text, rest, name), each.line) for each in found]

    def _words(self, text: str, line: int) -> list[Field]:
        """The text behind a sign such as `:-`, expanded."""
        inner = Lexer(f'"{text}"' if not text.startswith(('"', "'")) else text, line).tokens()
        return [Field(" ".join(self.text(token.word) for token in inner if token.word is not None), line)]


def _is_list(text: str) -> bool:
    return text in ("@",) or "[@]" in text or text.startswith("@")


def _split(pieces: list[Field]) -> Iterator[tuple[Field, bool, bool]]:
    """Pieces of unquoted expansions: text, whether a new word begins before it, whether it counts even if it is empty."""
    for index, piece in enumerate(pieces):
        new = index > 0
        for offset, part in enumerate(re.split(r"[ \t\n]+", piece.text)):
            yield Field(part, piece.line), new or offset > 0, False
            new = False


def _changed(text: str, rest: str, name: str) -> str:
    """`#`, `##`, `%`, `%%`: what is left without a pattern; `/` and `//`: replaced; `,,` and `^^`: another case."""
    if rest in (",,", "^^"):
        return text.lower() if rest == ",," else text.upper()
    for sign in ("##", "#", "%%", "%"):
        if rest.startswith(sign):
            shape = re.compile(translate(rest[len(sign) :]))
            cuts = range(len(text) + 1)
            ends = reversed(cuts) if sign in {"##", "%"} else cuts
            for cut in ends:
                if shape.fullmatch(text[:cut] if sign[0] == "#" else text[cut:]):
                    return text[cut:] if sign[0] == "#" else text[:cut]
            return text
    if rest.startswith("/"):
        whole = rest.startswith("//")
        old, _, new = rest.lstrip("/").partition("/")
        return text.replace(old, new) if whole else text.replace(old, new, 1)
    return unknown(f"{name}{rest}")


def _evaluate(node: ast.expr) -> int:
    """The value of a sum's tree.

    Raises:
        ValueError, KeyError: It has a name or another sign.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else int(not value) if isinstance(node.op, ast.Not) else value
    if isinstance(node, ast.BinOp):
        value = int(_SUMS[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
        return (value + (1 << 63)) % (1 << 64) - (1 << 63)  # bash's whole numbers have 64 bits
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_SUMS[type(node.ops[0])](_evaluate(node.left), _evaluate(node.comparators[0])))
    if isinstance(node, ast.BoolOp):
        values = [_evaluate(value) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError("no sum of whole numbers")
