"""Words of a bash script: its text as tokens, each word as parts that are still to be expanded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

OPEN = "\0"
"""Before and after the name of a variable that is set nowhere, or a command whose output is not known."""
OPERATORS = ("<<<", "<<-", ";;", "&&", "||", "<<", ">>", "&>", ">&", "<&", ";", "|", "&", "(", ")", "<", ">", "\n")
DOCUMENTS = ("document", "quoted document")
REDIRECTIONS = frozenset({"<<<", ">>", "&>", ">&", "<&", "<", ">"})
_KEYWORDS = frozenset({"if", "elif", "then", "else", "while", "until", "for", "do", "!", "{", "time"})
_BREAKS = frozenset(" \t\n;&|()<>")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\Z")
_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")


class PartKind(StrEnum):
    """What a part of a word expands from."""

    TEXT = "text"
    VARIABLE = "variable"
    COMMAND = "command"
    ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a word.

    Attributes:
        kind: What it expands from.
        text: Itself; of a variable the text in braces; of a command or a sum the text in parentheses.
        quoted: Whether it is never split into several words.
    """

    kind: PartKind
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Word:
    """Parts of a word and the line that it begins on; `items` are the words of an array's assignment, whose only part is `NAME=`."""

    parts: tuple[Part, ...]
    line: int
    items: tuple[Word, ...] | None = None

    @property
    def plain(self) -> str | None:
        """Its text, where nothing in it is quoted or to be expanded."""
        plain = all(part.kind is PartKind.TEXT and not part.quoted for part in self.parts) and self.items is None
        return "".join(part.text for part in self.parts) if plain else None


@dataclass(frozen=True, slots=True)
class Token:
    """An operator, a word, a sum in double parentheses, or the text of a here-document."""

    kind: str
    line: int
    text: str = ""
    word: Word | None = None


class ScriptError(ValueError):
    """A script that ends inside a quotation or an expansion; carries the line."""

    def __init__(self, why: str, line: int) -> None:
        super().__init__(why)
        self.line = line


@dataclass(slots=True)
class Lexer:
    """Reads a script's tokens.

    Attributes:
        text: The script.
        line: Of the next character.
        position: Of the next character.
    """

    text: str
    line: int = 1
    position: int = 0
    _documents: list[tuple[str, bool, bool]] = field(default_factory=list)

    def tokens(self, closing: str = "") -> list[Token]:
        """All tokens up to the end, or to `closing` at this level.

        Raises:
            ScriptError: A quotation or an expansion is not closed.
        """
        found: list[Token] = []
        while self.position < len(self.text):
            self._skip()
            if self.position >= len(self.text):
                break
            line, operator = self.line, self._operator()
            if operator is None:
                word = self._word()
                if word is not None:
                    found.append(Token("word", line, word=word))
            elif operator == closing:
                self._take(len(operator))
                return found
            elif self.text.startswith("((", self.position) and (not found or _begins(found[-1])):
                self._take(2)
                found.append(Token("sum", line, self._balanced("(", ")", depth=2)))
            elif operator in ("<<", "<<-"):
                self._take(len(operator))
                self._skip()
                mark = self._word()
                if mark is not None:
                    text = "".join(part.text for part in mark.parts)
                    self._documents.append((text, any(part.quoted for part in mark.parts), operator == "<<-"))
            else:
                self._take(len(operator))
                found.append(Token("operator", line, operator))
                if operator == "\n":
                    found += self._bodies()
        if closing:
            raise ScriptError(f"'{closing}' is missing", self.line)
        return found

    def _bodies(self) -> list[Token]:
        found = []
        for mark, quoted, indented in self._documents:
            lines, start = [], self.line
            while self.position < len(self.text):
                end = self.text.find("\n", self.position)
                end = len(self.text) if end < 0 else end
                each = self.text[self.position : end]
                self._take(end + 1 - self.position)
                if (each.lstrip("\t") if indented else each).rstrip() == mark:
                    break
                lines.append(each)
            found.append(Token(DOCUMENTS[quoted], start, "\n".join(lines)))
        self._documents.clear()
        return found

    def _take(self, count: int) -> str:
        taken = self.text[self.position : self.position + count]
        self.line += taken.count("\n")
        self.position += count
        return taken

    def _skip(self) -> None:
        """Blanks, continued lines and comments."""
        while self.position < len(self.text):
            if self.text[self.position] in " \t\r":
                self._take(1)
            elif re.compile(r"\\[ \t\r]*\n").match(self.text, self.position):  # blanks after a backslash are an oversight
                self._take(self.text.index("\n", self.position) + 1 - self.position)
            elif self.text[self.position] == "#":
                end = self.text.find("\n", self.position)
                self._take((len(self.text) if end < 0 else end) - self.position)
            else:
                return

    def _operator(self) -> str | None:
        return next((each for each in OPERATORS if self.text.startswith(each, self.position)), None)

    def _word(self) -> Word | None:
        """The word that begins here; None for a descriptor's number before a redirection."""
        line, parts = self.line, list[Part]()
        while self.position < len(self.text) and self.text[self.position] not in _BREAKS:
            self._part(parts, quoted=False)
            if self.text.startswith("(", self.position) and len(parts) == 1 and _ARRAY.fullmatch(parts[0].text):
                self._take(1)
                items = tuple(token.word for token in self.tokens(")") if token.word is not None)
                return Word(tuple(parts), line, items)
        digits = len(parts) == 1 and parts[0].text.isdigit() and not parts[0].quoted
        if digits and self.position < len(self.text) and self.text[self.position] in "<>":
            return None
        return Word(tuple(parts), line)

    def _part(self, parts: list[Part], *, quoted: bool) -> None:
        """The next part, joined to the last one where both are text of one kind."""
        sign = self.text[self.position]
        if sign == "\\" and self.position + 1 < len(self.text):
            following = self.text[self.position + 1]
            self._take(2)
            if following == "\r" and self.text.startswith("\n", self.position):
                self._take(1)
            elif following != "\n":
                kept = "\\" if quoted and following not in '$`"\\' else ""
                _append(parts, Part(PartKind.TEXT, kept + following, quoted=True))
        elif sign == OPEN:  # of a text that was expanded once: no sign in it means anything
            end = self.text.find(OPEN, self.position + 1)
            _append(parts, Part(PartKind.TEXT, self._take(max(end, self.position) + 1 - self.position), quoted))
        elif sign == "'" and not quoted:
            self._take(1)
            _append(parts, Part(PartKind.TEXT, self._until("'"), quoted=True))
        elif sign == '"' and not quoted:
            self._quotation(parts)
        elif sign == "`":
            self._take(1)
            _append(parts, Part(PartKind.COMMAND, self._until("`"), quoted))
        elif sign == "$":
            self._expansion(parts, quoted=quoted)
        else:
            _append(parts, Part(PartKind.TEXT, self._take(1), quoted))

    def _quotation(self, parts: list[Part]) -> None:
        line = self.line
        self._take(1)
        _append(parts, Part(PartKind.TEXT, "", quoted=True))
        while not self.text.startswith('"', self.position):
            if self.position >= len(self.text):
                raise ScriptError("a double quotation is never closed", line)
            self._part(parts, quoted=True)
        self._take(1)

    def _expansion(self, parts: list[Part], *, quoted: bool) -> None:
        rest = self.text[self.position + 1 : self.position + 3]
        if rest == "((":
            self._take(3)
            parts.append(Part(PartKind.ARITHMETIC, self._balanced("(", ")", depth=2), quoted))
        elif rest[:1] == "(":
            self._take(2)
            parts.append(Part(PartKind.COMMAND, self._balanced("(", ")"), quoted))
        elif rest[:1] == "{":
            self._take(2)
            parts.append(Part(PartKind.VARIABLE, self._balanced("{", "}"), quoted))
        elif rest[:1] == "'" and not quoted:
            self._take(2)
            _append(parts, Part(PartKind.TEXT, self._until("'"), quoted=True))
        elif (name := _NAME.match(self.text, self.position + 1)) is not None:
            self._take(1 + len(name[0]))
            parts.append(Part(PartKind.VARIABLE, name[0], quoted))
        else:
            _append(parts, Part(PartKind.TEXT, self._take(1), quoted))

    def _until(self, mark: str) -> str:
        line, end = self.line, self.text.find(mark, self.position)
        if end < 0:
            raise ScriptError(f"{mark} is never closed", line)
        return self._take(end + 1 - self.position)[:-1]

    def _balanced(self, opening: str, closing: str, depth: int = 1) -> str:
        """The text before the character that closes this level; quotations within hide signs."""
        start, line, wanted, marks = self.position, self.line, depth, ""
        while self.position < len(self.text):
            sign = self._take(1)
            if sign == "\\" and marks != "'":
                self._take(1)
            elif sign == marks:
                marks = ""
            elif sign in "'\"" and not marks:
                marks = sign
            elif marks != "'":
                depth += (sign == opening) - (sign == closing)
            if not depth:
                return self.text[start : self.position - wanted]
        raise ScriptError(f"'{closing}' is missing", line)


def _begins(before: Token) -> bool:
    """Whether a statement begins behind a token."""
    return before.kind == "operator" or (before.word is not None and before.word.plain in _KEYWORDS)


def _append(parts: list[Part], part: Part) -> None:
    if parts and parts[-1].kind is part.kind is PartKind.TEXT and parts[-1].quoted is part.quoted:
        part = Part(part.kind, parts.pop().text + part.text, part.quoted)
    parts.append(part)
