"""The words of bash: texts in quotation marks, variables, sums and programs, which are expanded when a script is followed."""

import re
from bisect import bisect_left
from typing import NamedTuple

from megaplan.importers.megatron.unset import unset


class NeedsBashError(Exception):
    """A construct that bash alone can read, with its line."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line, self.what = line, what


class Piece(NamedTuple):
    """A part of a word.

    Attributes:
        kind: `text`, `variable`, `sum`, `program` or, for an array in parentheses, `list`.
        text: The text, the inside of `${…}`, or the expression, or the commands.
        quoted: True if its result is one word.
        words: The words of an array.
    """

    kind: str
    text: str
    quoted: bool = False
    words: "tuple[Word, ...]" = ()


class Word(NamedTuple):
    """A word of a command, and its line."""

    line: int
    pieces: tuple[Piece, ...]

    @property
    def start(self) -> str:
        """The unquoted text that it begins with."""
        first = self.pieces[0] if self.pieces else None
        return first.text if first is not None and first.kind == "text" and not first.quoted else ""

    @property
    def plain(self) -> str:
        """The word if it is unquoted text without expansions, otherwise empty."""
        return self.start if len(self.pieces) == 1 else ""


_PLAIN = re.compile("(?:\0[^\0]*\0|[^\0\\s'\"\\\\$`;&|<>()])+")
_LOOSE = re.compile(r"[^'\"\\$`]+")
_BLANK_VALUE = re.compile(r"<([\w ,./:-]*)>")
"""A value that the script's user is asked to fill in."""
_PARAMETER = re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$!-])")
CLOSES = {"(": ")", "{": "}"}


class Scanner:
    """Reads the words of a text from front to back.

    Args:
        text: A script, or a part of one.
        line: The line on which it begins.
    """

    def __init__(self, text: str, line: int = 1) -> None:
        self.text, self._at, self._first = text, 0, line
        self._breaks = [match.start() for match in re.finditer("\n", text)]
        self._jumps: dict[int, int] = {}  # line ends, each with the end of the here-documents that follow
        self._given: tuple[str, Word] | None = None
        self._written: tuple[str, Word] | None = None

    def operand(self) -> Word:
        """The whole text as one word, in which spaces are text."""
        return Word(self._first, tuple(self._pieces(_LOOSE)))

    def quoted(self) -> Word:
        """The whole text as if it were in double quotation marks."""
        return Word(self._first, tuple(self._double(None)))

    @property
    def _line(self) -> int:
        return self._first + bisect_left(self._breaks, self._at)

    def _stop(self) -> NeedsBashError:
        return NeedsBashError(self._line, repr(self.text[self._at :].lstrip().partition("\n")[0].strip()[:60]) if self._left else "no end")

    @property
    def _left(self) -> bool:
        return self._at < len(self.text)

    def _word(self) -> Word:
        line, pieces = self._line, self._pieces(_PLAIN)
        if not pieces:
            raise self._stop()
        return Word(line, tuple(pieces))

    def _pieces(self, plain: re.Pattern[str]) -> list[Piece]:
        pieces, text = list[Piece](), self.text
        while self._left:
            if (found := plain.match(text, self._at)) is not None:
                pieces.append(Piece("text", found[0]))
                self._at = found.end()
            elif text[self._at] == "\\":
                if not text.startswith("\\\n", self._at):
                    pieces.append(Piece("text", text[self._at + 1 : self._at + 2], quoted=True))
                self._at += 2
            elif text[self._at] == "'" or text.startswith("$'", self._at):
                pieces.append(self._single())
            elif text[self._at] == '"' or text.startswith('$"', self._at):
                self._at += 2 if text[self._at] == "$" else 1
                pieces += self._double('"') or [Piece("text", "", quoted=True)]
            elif pieces and pieces[-1].text.endswith("=") and (blank := _BLANK_VALUE.match(text, self._at)) is not None:
                pieces.append(Piece("text", unset(blank[1])))
                self._at = blank.end()
            elif text.startswith(("<(", ">("), self._at):
                end = self._closing(self._at + 1)
                pieces.append(Piece("program", text[self._at + 2 : end - 1], quoted=True))
                self._at = end
            elif text[self._at] in "$`":
                pieces.append(self._expansion(quoted=False))
            else:
                break
        return pieces

    def _single(self) -> Piece:
        begin = self.text.index("'", self._at) + 1
        end = self.text.find("'", begin)
        if end < 0:
            raise self._stop()
        escapes, self._at = self.text[self._at] == "$", end + 1
        return Piece("text", unescaped(self.text[begin:end]) if escapes else self.text[begin:end], quoted=True)

    def _double(self, end: str | None) -> list[Piece]:
        """The pieces up to a closing quotation mark, or of the whole text."""
        text, begin, held, pieces = self.text, self._at, "", list[Piece]()
        while self._left and text[self._at] != end:
            if text[self._at] == "\\" and text[self._at + 1 : self._at + 2] in (*'"\\$`', "\n"):
                held += "" if text[self._at + 1] == "\n" else text[self._at + 1]
                self._at += 2
            elif text[self._at] in "$`":
                pieces += [Piece("text", held, quoted=True)] if held else []
                pieces.append(self._expansion(quoted=True))
                held = ""
            else:
                held += text[self._at]
                self._at += 1
        if end is not None and not self._left:
            self._at = begin - 1
            raise self._stop()
        self._at += end is not None
        return [*pieces, Piece("text", held, quoted=True)] if held else pieces

    def _expansion(self, *, quoted: bool) -> Piece:
        """A variable, sum or program; any other sign is text."""
        text, begin = self.text, self._at
        if text[begin] == "`":
            end = text.find("`", begin + 1)
            if end < 0:
                raise self._stop()
            self._at = end + 1
            return Piece("program", text[begin + 1 : end].replace("\\", ""), quoted)
        if text.startswith(("$(", "${"), begin):
            self._at = end = self._closing(begin + 1)
            if text.startswith("$((", begin) and text[end - 2] == ")":
                return Piece("sum", text[begin + 3 : end - 2], quoted)
            return Piece("program" if text[begin + 1] == "(" else "variable", text[begin + 2 : end - 1], quoted)
        if (found := _PARAMETER.match(text, begin)) is not None:
            self._at = found.end()
            return Piece("variable", found[1], quoted)
        self._at += 1
        return Piece("text", "$", quoted)

    def _closing(self, at: int) -> int:
        """The position after the bracket that closes the one at a position."""
        text, open_ = self.text, list[str]()
        while at < len(text):
            sign = text[at]
            if sign == "\\":
                at += 1
            elif open_ and sign == open_[-1]:
                open_.pop()
                if not open_:
                    return at + 1
            elif open_[-1:] == ['"']:
                if text.startswith(("$(", "${"), at):
                    at += 1
                    open_.append(CLOSES[text[at]])
            elif sign == '"':
                open_.append('"')
            elif sign == "'":
                at = max(at, text.find("'", at + 1))
            elif sign in CLOSES:
                open_.append(CLOSES[sign])
            at += 1
        raise self._stop()


_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"', "r": "", "e": "", "a": ""}


def unescaped(text: str) -> str:
    """A text with marks of line ends and tabs replaced."""
    return re.sub(r"\\([ntrea\\'\"])", lambda match: _ESCAPES[match[1]], text)
