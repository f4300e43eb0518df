"""The syntax of bash that launch scripts have: a text as commands."""

import re
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

from megaplan.importers.megatron.shell.scan import CLOSES, NeedsBashError, Piece, Scanner, Word


class Command(NamedTuple):
    """A command.

    Attributes:
        kind: `simple`, `test` (`[[ … ]]`), `sum` (`((…))`), `if`, `while`, `until`, `for`, `count`, `case`, `function`, `group` or `child`.
        line: Line of its first word.
        words: Words of a simple command, a test, a loop or a case.
        text: Name of a loop's variable or of a function; the expression of a sum.
        parts: Conditions, or patterns, each with the commands after it.
        given: Sign and word of its input redirection.
        written: Sign and word of the file that it writes.
    """

    kind: str
    line: int
    words: tuple[Word, ...] = ()
    text: str = ""
    parts: "tuple[tuple[Any, Body], ...]" = ()
    given: tuple[str, Word] | None = None
    written: tuple[str, Word] | None = None


class Step(NamedTuple):
    """Commands joined by pipes: the sign before them, and if their status is reversed."""

    sign: str
    reversed: bool
    commands: list[Command]


Body = list[Step]
_BLANK = re.compile(r"(?:[ \t]|\\\n)+|#[^\n]*")
_SIGN = re.compile(r"&&|\|\||;(?!;)|&|\n")
_RESERVED = re.compile(r";;&?|;&|[)}]|(?:[a-z]+|[{!]|\[\[)(?=[\s;()&|<>]|$)")
_REDIRECT = re.compile(r"(?:\d+|&)?(>>|>\||>&|<&|<>|<<<|<<-?|>|<)(?!\()[ \t]*")
_HERE = re.compile(r"""(['"\\]?)([^\s'"\\;|&<>()]+)['"]?""")
_FUNCTION = re.compile(r"([^\s;&|<>()$\"'=]+)[ \t]*\([ \t]*\)\s*")
_LIST = re.compile(r"([A-Za-z_]\w*(?:\[[^]\n]*\])?\+?=)\(")
_MATCH = re.compile(r"(?:(?!\s+(?:\]\]|&&|\|\|))[^\n])+")
_TEST_SIGN = re.compile(r"&&|\|\||[()<>]")


class Parser(Scanner):
    """Reads the commands of a text."""

    def script(self) -> Body:
        """Every command of the text.

        Raises:
            NeedsBashError: It has another construct.
        """
        return self._body()

    def _skip(self, *, lines: bool = False) -> None:
        while self._left:
            if (blank := _BLANK.match(self.text, self._at)) is not None:
                self._at = blank.end()
            elif lines and self.text[self._at] == "\n":
                self._at = self._jumps.get(self._at, self._at + 1)
            else:
                break

    def _peek(self) -> str:
        found = _RESERVED.match(self.text, self._at)
        return found[0] if found is not None else ""

    def _take(self, *words: str, lines: bool = True) -> str:
        """Passes one of some words.

        Raises:
            NeedsBashError: Another word is there.
        """
        self._skip(lines=lines)
        found = next((word for word in words if self.text.startswith(word, self._at)), None)
        if found is None:
            raise NeedsBashError(self._line, f"no {words[0]!r} before {self.text[self._at :].partition(chr(10))[0].strip()[:40]!r}")
        self._at += len(found)
        return found

    def _body(self, *ends: str) -> Body:
        """Commands up to one of some words, which is left for the caller."""
        steps, sign = list[Step](), ";"
        while True:
            self._skip(lines=True)
            if self._peek() in ends or not self._left:
                if ends and not self._left:
                    raise NeedsBashError(self._line, f"no {ends[0]!r} at its end")
                return steps
            steps.append(self._step(sign))
            self._skip()
            found = _SIGN.match(self.text, self._at)
            if found is not None and found[0] != "\n":
                self._at = found.end()
            elif found is None and self._left and self._peek() not in ends:
                raise self._stop()
            sign = found[0] if found is not None and found[0] in ("&&", "||") else ";"

    def _step(self, sign: str) -> Step:
        negated = False
        while self._peek() == "!":
            self._take("!")
            self._skip()
            negated = not negated
        commands = [self._command()]
        while True:
            self._skip()
            if not self.text.startswith("|", self._at) or self.text.startswith("||", self._at):
                return Step(sign, negated, commands)
            self._at += 2 if self.text.startswith("|&", self._at) else 1
            self._skip(lines=True)
            commands.append(self._command())

    def _command(self) -> Command:
        line, name, outer, self._given, self._written = self._line, self._peek(), (self._given, self._written), None, None
        readers: dict[str, Callable[[int], Command]] = {
            **{"if": self._if, "while": self._while, "until": self._while, "for": self._for, "select": self._for, "case": self._case},
            **{"function": self._function, "{": self._group, "[[": self._test},
        }
        if self.text.startswith("((", self._at):
            end = self._closing(self._at)
            command = Command("sum", line, text=self.text[self._at + 2 : end - 2])
            self._at = end
        elif self.text.startswith("(", self._at):
            command = self._group(line)
        elif name in readers:
            command = readers[name](line)
        elif _FUNCTION.match(self.text, self._at) is not None:
            command = self._function(line)
        else:
            command = self._simple(line)
        while self._redirect():
            pass
        command, (self._given, self._written) = command._replace(given=self._given, written=self._written), outer
        return command

    def _if(self, line: int) -> Command:
        parts, word = list[tuple[Any, Body]](), self._take("if")
        while word != "fi":
            if word == "else":
                parts.append((None, self._body("fi")))
            else:
                condition = self._body("then")
                self._take("then")
                parts.append((condition, self._body("fi", "else", "elif")))
            word = self._take("elif", "else", "fi")
        return Command("if", line, parts=tuple(parts))

    def _while(self, line: int) -> Command:
        kind, condition = self._take("while", "until"), self._body("do")
        return Command(kind, line, parts=((condition, self._loop()),))

    def _loop(self) -> Body:
        if self._take("do", "{") == "{":
            return self._until("}")
        return self._until("done")

    def _until(self, end: str) -> Body:
        body = self._body(end)
        self._take(end)
        return body

    def _for(self, line: int) -> Command:
        self._take("for", "select")
        self._skip()
        if self.text.startswith("((", self._at):
            end = self._closing(self._at)
            text, self._at = self.text[self._at + 2 : end - 2], end
            self._skip()
            self._at += self.text.startswith(";", self._at)
            return Command("count", line, text=text, parts=((None, self._loop()),))
        name, words = self._word().plain, [Word(line, (Piece("variable", "@", quoted=True),))]
        self._skip(lines=True)
        if self._peek() == "in":
            self._take("in")
            words = self._words()
        self._skip()
        self._at += self.text.startswith(";", self._at)
        return Command("for", line, tuple(words), name, ((None, self._loop()),))

    def _words(self) -> list[Word]:
        """Words up to the end of a command."""
        words = list[Word]()
        while True:
            self._skip()
            if not self._left or self.text[self._at] in "\n;)" or self.text.startswith(("&&", "||"), self._at):
                return words
            words.append(self._word())

    def _case(self, line: int) -> Command:
        self._take("case")
        self._skip()
        word, parts = self._word(), list[tuple[Any, Body]]()
        self._take("in")
        while True:
            self._skip(lines=True)
            if self._peek() == "esac":
                self._take("esac")
                return Command("case", line, (word,), parts=tuple(parts))
            self._at += self.text.startswith("(", self._at)
            patterns = list[Word]()
            while not patterns or self._take("|", ")") == "|":
                self._skip()
                patterns.append(self._word())
            parts.append((patterns, self._body(";;", "esac", ";&", ";;&")))
            if self._peek() != "esac":
                self._take(";;&", ";;", ";&")

    def _function(self, line: int) -> Command:
        if self._peek() == "function":
            self._take("function")
            self._skip()
            name, found = self._word().plain, None
            self._skip()
            if self.text.startswith("()", self._at):
                self._at += 2
        elif (found := _FUNCTION.match(self.text, self._at)) is not None:
            name, self._at = found[1], found.end()
        self._skip(lines=True)
        return Command("function", line, text=name, parts=((None, [Step(";", False, [self._command()])]),))

    def _group(self, line: int) -> Command:
        sign = self._take("{", "(")
        return Command("group" if sign == "{" else "child", line, parts=((None, self._until(CLOSES[sign])),))

    def _test(self, line: int) -> Command:
        self._take("[[")
        words = list[Word]()
        while True:
            self._skip(lines=True)
            if self.text.startswith("]]", self._at):
                self._at += 2
                return Command("test", line, tuple(words))
            if words and words[-1].plain == "=~" and self.text[self._at] not in "\"'$" and (raw := _MATCH.match(self.text, self._at)):
                words.append(Word(self._line, (Piece("text", raw[0]),)))
                self._at = raw.end()
            elif (sign := _TEST_SIGN.match(self.text, self._at)) is not None:
                words.append(Word(self._line, (Piece("text", sign[0]),)))
                self._at = sign.end()
            else:
                words.append(self._word())

    def _simple(self, line: int) -> Command:
        words = list[Word]()
        while True:
            self._skip()
            if (
                not self._left
                or self.text[self._at] in "\n;|)"
                or (self.text[self._at] == "&" and self.text[self._at + 1 : self._at + 2] != ">")
            ):
                break
            if self._redirect():
                continue
            words.append(self._list() or self._word())
        if not words and self._given is None:
            raise self._stop()
        return Command("simple", line, tuple(words))

    def _list(self) -> Word | None:
        """An assignment of an array."""
        found = _LIST.match(self.text, self._at)
        if found is None:
            return None
        line, self._at, words = self._line, found.end(), list[Word]()
        while True:
            self._skip(lines=True)
            if self.text.startswith(")", self._at):
                self._at += 1
                return Word(line, (Piece("text", found[1]), Piece("list", "", words=tuple(words))))
            words.append(self._word())

    def _redirect(self) -> bool:
        """Parses a redirection; the names of read and written files are recorded."""
        self._skip()
        found = _REDIRECT.match(self.text, self._at)
        if found is None:
            return False
        self._at = found.end()
        if found[1] in ("<<", "<<-"):
            self._given = ("<<", self._here_document(strips=found[1] == "<<-"))
            return True
        word = self._word()
        if found[1] in ("<", "<<<"):
            self._given = (found[1], word)
        elif found[1] in (">", ">>", ">|") and found[0][0] in ">1":
            self._written = (found[1], word)
        return True

    def _here_document(self, *, strips: bool) -> Word:
        found = _HERE.match(self.text, self._at)
        newline = self.text.find("\n", self._at)
        if found is None or newline < 0:
            raise self._stop()
        self._at, begin, lines = found.end(), self._jumps.get(newline, newline + 1), list[str]()
        at = begin
        while at < len(self.text):
            line, _, _ = self.text[at:].partition("\n")
            at += len(line) + 1
            line = line.lstrip("\t") if strips else line
            if line == found[2]:
                break
            lines.append(line + "\n")
        self._jumps[newline] = min(at, len(self.text))
        number = self._first + bisect_left(self._breaks, begin)
        return Word(number, (Piece("text", "".join(lines), quoted=True),)) if found[1] else Parser("".join(lines), number).quoted()
