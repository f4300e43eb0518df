"""The expansion of words: variables with their operators, arrays, sums, and outputs of programs."""

import fnmatch
import re
from collections.abc import Iterator, Sequence

from megaplan.importers.megatron.shell.scan import NeedsBashError, Piece, Scanner, Word, unescaped
from megaplan.importers.megatron.shell.sums import UnknownError, total
from megaplan.importers.megatron.unset import UNSET, unset, without_unset

Value = str | list[str] | dict[str, str]
_ELEMENT = re.compile(r"[A-Za-z_]\w*\[[^]]+\]")
MAX_TEXT = 2**20
_PROGRAM = re.compile("\0\\([^\0]*\0")
_BODY = re.compile(r"([#!]?)(\w+|[@*#?$!-])(?:\[((?:[^][]|\[[^]]*\])*)\])?(.*)", re.DOTALL)
_OPERATOR = re.compile(r"(:?[-=+?]|##?|%%?|//?|\^\^?|,,?|:|@)(.*)", re.DOTALL)
_ALL = re.compile(r"^\*|\[\*\]")
"""An array whose words are one text within quotes."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[(.*?)\])?(\+?)=", re.DOTALL)
_BRACES = re.compile(r"\{(?:(-?\d{1,6})\.\.(-?\d{1,6})|([^{},]*(?:,[^{},]*)+))\}")


class StoppedError(Exception):
    """The script ends, as an expansion requires a variable that is set nowhere."""


class Words:
    """Variables of a script, and words with their values.

    Args:
        variables: Variables of the environment.
        name: Name of the script.
        argv: Arguments of the script.

    Attributes:
        demanded: Variables on which the last condition or requirement depends, and which are set nowhere.
    """

    def __init__(self, variables: dict[str, Value], name: str, argv: Sequence[str]) -> None:
        self.variables, self.name, self.positional = variables, name, list(argv)
        self.file = name
        self.references: dict[str, str] = {}
        self.demanded: list[str] = []

    def output(self, commands: str, line: int) -> str:
        """The output of commands."""
        raise NotImplementedError

    def held(self, name: str) -> Value | None:
        """The value of a variable; None if it is set nowhere."""
        name = self.references.get(name, name)
        if name.isdecimal():
            place = int(name) - 1
            return self.name if place < 0 else self.positional[place] if place < len(self.positional) else None
        special = {"#": str(len(self.positional)), "?": "0", "$": "1", "!": "1", "-": "", "BASH_SOURCE": self.file}
        if name in ("@", "*"):
            return self.positional
        return special[name] if name in special else self.variables.get(name)

    def text_of(self, name: str) -> str | None:
        """The text of a variable, the first word of an array."""
        held = self.held(name)
        if isinstance(held, dict):
            return held.get("0", "")
        return (held[0] if held else "") if isinstance(held, list) else held

    def set(self, name: str, value: Value) -> None:
        """Sets a variable.

        Raises:
            NeedsBashError: The value is as long as no launch has it.
        """
        if len(value) > MAX_TEXT:
            raise NeedsBashError(0, f"a value of {name} with more than {MAX_TEXT:,} characters")
        self.variables[self.references.get(name, name)] = value

    def assign(self, word: Word) -> bool:
        """Follows an assignment; False if the word is none."""
        found = _ASSIGNMENT.match(word.start) or _ASSIGNMENT.match("".join(map(self._shown, word.pieces)))
        if found is None or not re.match(r"[A-Za-z_]\w*(?:\[|\+?=|$)", word.start):
            return False
        name, index, more = found[1], found[2], found[3]
        held = self.held(name)
        if word.pieces[-1].kind == "list":
            return self._assign_list(name, word.pieces[-1].words, held if more else None)
        value = "".join(map(self.single, word.pieces))
        value = value[re.match(r"[A-Za-z_]\w*(?:\[.*?\])?\+?=", value, re.DOTALL).end() :]  # type: ignore[union-attr]
        if index is None:
            old = self.text_of(name) or "" if more else ""
            self.set(name, [old + value, *held[1:]] if isinstance(held, list) and held else old + value)
        elif isinstance(held, dict):
            key = self.text(Scanner(index).operand())
            self.set(name, held | {key: (held.get(key, "") if more else "") + value})
        else:
            items, place = _list(held), self.index(index, word.line)
            items += [""] * (min(place, 10_000) + 1 - len(items))
            items[place] = (items[place] if more else "") + value
            self.set(name, items)
        return True

    def _shown(self, piece: Piece) -> str:
        return piece.text if piece.kind == "text" else "$" if piece.kind != "list" else ""

    def _assign_list(self, name: str, words: Sequence[Word], held: Value | None) -> bool:
        if any(re.match(r"\[[^]]+\]=", word.start) for word in words) or isinstance(self.held(name), dict):
            items = dict(held) if isinstance(held, dict) else {}
            for word in words:
                match = re.fullmatch(r"\[(.*?)\]=(.*)", self.text(word), re.DOTALL)
                if match is not None:
                    items[match[1]] = match[2]
            is_map = isinstance(self.held(name), dict) or not all(key.isdecimal() for key in items)
            self.set(name, items if is_map else list(items.values()))
            return True
        self.set(name, [*_list(held), *(field for word in words for field in self.fields(word))])
        return True

    def index(self, text: str, line: int) -> int:
        """A place in an array."""
        value = self.sum(text, line)
        return int(value) if value.lstrip("-").isdigit() else 0

    def text(self, word: Word) -> str:
        """A word as one text."""
        return "".join(map(self.single, word.pieces))

    def single(self, piece: Piece) -> str:
        """A piece as one text."""
        if piece.kind == "text":
            return piece.text
        if piece.kind == "sum":
            return self.sum(piece.text, 0)
        if piece.kind == "program":
            return self.output(piece.text, 0).rstrip("\n")
        found = self.variable(piece.text)
        return self._in_one(piece, found) if isinstance(found, list) else found

    def _in_one(self, piece: Piece, words: Sequence[str]) -> str:
        """An array as one text: `"${NAME[*]}"` puts the first separator between its words, everything else a space."""
        separators = self.text_of("IFS") if piece.quoted and _ALL.search(piece.text) else None
        return (" " if separators is None else separators[:1]).join(words)

    def sum(self, text: str, line: int) -> str:
        """The value of a sum; the placeholder of what is not known in it.

        Raises:
            NeedsBashError: It is not a sum of integers.
        """
        expanded = self.text(Scanner(text).quoted())
        expanded = _ELEMENT.sub(lambda found: self.single(Piece("variable", found[0])), expanded)
        try:
            return str(total(expanded, self.text_of, self.set))
        except UnknownError as error:
            return str(error)
        except ValueError:
            raise NeedsBashError(line, f"$(({text.strip()}))") from None

    def fields(self, word: Word) -> Iterator[str]:
        """The words that a word expands to: unquoted values are split at spaces, arrays give one word per element."""
        if "{" in word.plain:
            yield from _braces(word.plain)
            return
        open_: str | None = None
        for piece in word.pieces:
            for part in self._parts(piece):
                if part is not None:
                    open_ = (open_ or "") + part
                elif open_ is not None:
                    yield open_
                    open_ = None
        if open_ is not None:
            yield open_

    def _parts(self, piece: Piece) -> Iterator[str | None]:
        """Texts of a piece; None is the end of a word."""
        found = self.variable(piece.text) if piece.kind == "variable" else self.single(piece)
        if piece.quoted and isinstance(found, list) and not _ALL.search(piece.text):
            for index, text in enumerate(found):
                if index:
                    yield None
                yield text
            return
        text = self._in_one(piece, found) if isinstance(found, list) else found
        if piece.quoted or piece.kind == "text":
            yield text
            return
        for part in re.split(r"(\s+)", text):
            if part:
                yield None if part.isspace() else part

    def variable(self, body: str) -> str | list[str]:
        """The value of `${…}`: words for an array, otherwise a text, the placeholder if it is set nowhere.

        Raises:
            NeedsBashError: An operator that only bash knows.
        """
        match = _BODY.fullmatch(body)
        if match is None:
            raise NeedsBashError(0, "${" + body[:40] + "}")
        sign, name, index, rest = match.groups()
        if sign == "!":
            return self._indirect(name, index, rest)
        held = self.held(name)
        if index in ("@", "*") or name in "@*":
            words = _list(list(held.values()) if isinstance(held, dict) else held)
            return _count(words, len(words)) if sign == "#" else self._changed_list(words, rest)
        value = self.text_of(name) if index is None else self._element(held, index)
        return _count([value or ""], len(value or "")) if sign == "#" else self._changed(name, value, rest)

    def _indirect(self, name: str, index: str | None, rest: str) -> str | list[str]:
        """The keys of an array, or the variable that a variable names."""
        held = self.held(name)
        if index in ("@", "*"):
            return list(held) if isinstance(held, dict) else [str(place) for place in range(len(_list(held)))]
        target = _BODY.fullmatch(self.text_of(name) or "")
        return self.variable(f"{target[0]}{rest}") if target is not None else unset(name)

    def _element(self, held: Value | None, index: str) -> str | None:
        if isinstance(held, dict):
            return held.get(self.text(Scanner(index).operand()))
        items, place = _list(held), self.index(index, 0)
        return items[place] if -len(items) <= place < len(items) else None

    def _changed_list(self, words: list[str], rest: str) -> str | list[str]:
        match = _OPERATOR.fullmatch(rest)
        if match is None:
            return words
        if match[1] == ":":
            return [*([self.name] if words is self.positional else []), *words][self._slice(match[2])]
        if match[1].lstrip(":") in "-=+?":
            joined = self._changed("", " ".join(words) if words else None, rest)
            return words if words and match[1].lstrip(":") in "-=?" else joined or []
        return [self._changed("", word, rest) for word in words]

    def _slice(self, text: str) -> slice:
        start, _, length = text.partition(":")
        begin = self.index(start, 0)
        return slice(begin, None if not length else begin + self.index(length, 0))

    def _changed(self, name: str, value: str | None, rest: str) -> str:
        """A text with an operator of `${…}` applied."""
        match = _OPERATOR.fullmatch(rest)
        if match is None and rest:
            raise NeedsBashError(0, "${" + f"{name}{rest[:40]}" + "}")
        sign, operand = match.groups() if match is not None else ("", "")
        lacks = value is None or (sign.startswith(":") and not without_unset(value))
        if sign in ("+", ":+"):
            return "" if lacks else self.text(Scanner(operand).operand())
        if lacks and sign in ("-", ":-", "=", ":="):
            found = self.text(Scanner(operand).operand())
            if sign.endswith("="):
                self.set(name, found)
            return found if found or not name.isidentifier() else unset(name)  # expands to nothing; commands that need it get its name
        if lacks and sign.endswith("?"):
            self.demanded = [name]
            raise StoppedError
        if value is None:
            return unset(name)
        if sign == ":":
            return value[self._slice(operand)]
        return value if UNSET.search(value) or sign.lstrip(":") in ("", "-", "=", "?", "@") else self._edited(value, sign, operand)

    def _edited(self, value: str, sign: str, operand: str) -> str:
        if sign[0] in "^,":
            change = str.upper if sign[0] == "^" else str.lower
            return change(value) if len(sign) == 2 else change(value[:1]) + value[1:]
        if sign[0] == "/":
            return self._replaced(value, operand, every=sign == "//")
        pattern = self.pattern(Scanner(operand).operand())
        places = range(len(value) + 1)
        if sign[0] == "#":
            found = [place for place in places if pattern.fullmatch(value[:place])]
            return value[(found[-1] if sign == "##" else found[0]) :] if found else value
        found = [place for place in places if pattern.fullmatch(value[place:])]
        return value[: (found[0] if sign == "%%" else found[-1])] if found else value

    def _replaced(self, value: str, operand: str, *, every: bool) -> str:
        at = next((at for at in range(len(operand)) if operand[at] == "/" and at and operand[at - 1] != "\\"), len(operand))
        pattern, new = self.pattern(Scanner(operand[:at]).operand()), self.text(Scanner(operand[at + 1 :]).operand())
        expression = pattern.pattern.removesuffix(r"\Z").removesuffix(r"\z")
        return re.sub(expression, lambda _: new, value, count=0 if every else 1) if len(value) < 10_000 else value

    def pattern(self, word: Word) -> re.Pattern[str]:
        """The pattern of a word, in which quoted parts mean themselves."""
        parts = [re.sub(r"[*?\[]", r"[\g<0>]", self.single(piece)) if piece.quoted else self.single(piece) for piece in word.pieces]
        return re.compile(fnmatch.translate("".join(parts)), re.DOTALL)


def _list(held: Value | None) -> list[str]:
    """The words of an array; a text is an array of one word."""
    return [held] if isinstance(held, str) else list(held or [])


def _count(texts: Sequence[str], count: int) -> str:
    """A count; the placeholder of an output of which the texts are made."""
    return next((found[0] for text in texts if (found := _PROGRAM.search(text)) is not None), str(count))


def _braces(text: str) -> Iterator[str]:
    """`a{1..3}` and `a{x,y}` as words."""
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    if match[3] is None:
        first, last = int(match[1]), int(match[2])
        step = 1 if last >= first else -1
        inner = [str(each) for each in range(first, last + step, step)][:10_000]
    else:
        inner = match[3].split(",")
    for each in inner:
        yield from _braces(f"{text[: match.start()]}{each}{text[match.end() :]}")


def formatted(form: str, values: Sequence[str]) -> str:
    """The text of `printf`, whose format is used again while values are left; a placeholder for forms of numbers with points."""
    marks = [mark for mark in re.findall(r"%%|%-?0?\d*(?:\.\d+)?[a-zA-Z]", form) if mark != "%%"]
    queue, done = list(values), ""
    for _ in range(max(1, -(-len(queue) // max(1, len(marks))))):
        now = iter([queue.pop(0) if queue else "" for _ in marks])
        done += re.sub(r"%%|%(-?0?\d*)(?:\.\d+)?([a-zA-Z])", lambda match, now=now: _formatted(match, now), form)  # type: ignore[misc]
    return unescaped(done)


def _formatted(match: re.Match[str], values: Iterator[str]) -> str:
    if match[0] == "%%":
        return "%"
    value = next(values)
    if match[2] in "sbq":
        return value
    if match[2] in "di" and re.fullmatch(r"-?\d{0,18}", value):
        return f"%{match[1]}d" % int(value or 0)
    return unset("(printf)") if value else "0"
