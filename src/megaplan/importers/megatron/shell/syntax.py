"""Statements of a bash script, from its tokens: commands, lists, conditions, loops, choices and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megaplan.importers.megatron.shell.words import DOCUMENTS, REDIRECTIONS, Lexer, ScriptError, Token, Word


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command: its words with leading assignments, and the here-documents it reads, each with whether it is quoted."""

    words: tuple[Word, ...]
    documents: tuple[tuple[str, bool], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Test:
    """`[[ … ]]`, or `(( … ))` with `sum`."""

    tokens: tuple[Token, ...]
    line: int
    sum: str | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """Statements one after another; each connector, `&&`, `||` or `;`, precedes its statement."""

    steps: tuple[tuple[str, Statement], ...]


@dataclass(frozen=True, slots=True)
class Negated:
    """`! statement`."""

    body: Statement


@dataclass(frozen=True, slots=True)
class Condition:
    """`if`: branches of a condition and a body each, then what else runs."""

    branches: tuple[tuple[Chain, Chain], ...]
    otherwise: Chain
    line: int


@dataclass(frozen=True, slots=True)
class Choice:
    """`case`: a word, then patterns and a body each."""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], Chain], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Loop:
    """`for NAME in words`, or `while` where `condition` is given; `until` repeats while it does not hold.

    Attributes:
        step: Sum at the end of each round of `for ((`.
    """

    name: str
    words: tuple[Word, ...] | None
    condition: Chain | None
    until: bool
    body: Chain
    line: int
    step: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """A function's definition."""

    name: str
    body: Chain


Statement = Command | Test | Chain | Negated | Condition | Choice | Loop | Function
_BEFORE_GROUPS = frozenset({"time", "-p", "coproc"})
"""Words of a command that a group in parentheses may follow."""
_ENDS = frozenset({"then", "else", "elif", "fi", "do", "done", "esac", "}"})


def parse(text: str, line: int = 1) -> Chain:
    """The statements of a script whose first line has this number.

    Raises:
        ScriptError: A quotation or a compound statement is not closed.
    """
    return _Parser(Lexer(text, line).tokens()).chain(frozenset())


@dataclass(slots=True)
class _Parser:
    tokens: Sequence[Token]
    index: int = 0

    def chain(self, ends: frozenset[str], signs: frozenset[str] = frozenset()) -> Chain:
        """Statements up to a word of `ends` or an operator of `signs`, which is left."""
        steps: list[tuple[str, Statement]] = []
        connector = ";"
        while (token := self._peek()) is not None:
            if token.kind == "operator" and token.text in signs:
                break
            if token.kind in DOCUMENTS:
                self.index += 1
                continue
            if token.kind == "operator" and token.text != "(":
                self.index += 1
                connector = token.text if token.text in ("&&", "||") else ";" if token.text != "\n" or connector == ";" else connector
                continue
            if token.word is not None and token.word.plain in ends:
                break
            if token.word is not None and token.word.plain in _ENDS:
                raise ScriptError(f"'{token.word.plain}' is out of place", token.line)
            before = self.index
            steps.append((connector, self._statement(signs)))
            connector = ";"
            if self.index == before:
                raise ScriptError("this is not understood", token.line)
        return Chain(tuple(steps))

    def _peek(self) -> Token | None:
        return self.tokens[self.index] if self.index < len(self.tokens) else None

    def _plain(self) -> str | None:
        token = self._peek()
        return token.word.plain if token is not None and token.word is not None else None

    def _is(self, operator: str) -> bool:
        token = self._peek()
        return token is not None and token.kind == "operator" and token.text == operator

    def _expect(self, word: str) -> None:
        if self._plain() != word:
            token = self._peek()
            raise ScriptError(f"'{word}' is missing", token.line if token is not None else self.tokens[-1].line)
        self.index += 1

    def _block(self, *ends: str) -> Chain:
        found = self.chain(frozenset(ends))
        if self._plain() not in ends:
            raise ScriptError(f"'{ends[-1]}' is missing", self.tokens[-1].line)
        return found

    def _statement(self, signs: frozenset[str]) -> Statement:
        plain = self._plain()
        compound: dict[str, Callable[[], Statement]] = {
            "if": self._if,
            "case": self._case,
            "for": self._for,
            "while": self._while,
            "until": self._while,
            "[[": self._test,
        }
        if plain in compound:
            return compound[plain]()
        if plain == "!":
            self.index += 1
            return Negated(self._statement(signs))
        if plain == "function" or self._defines():
            return self._function()
        return self._group() or self._command()

    def _group(self) -> Chain | Test | None:
        """Statements in parentheses or braces, or a sum in double parentheses."""
        token = self._peek()
        if token is None:
            raise ScriptError("a command is missing at the end", self.tokens[-1].line)
        if token.kind == "sum":
            self.index += 1
            return Test((), token.line, token.text)
        if self._is("("):
            return self._subshell()
        if self._plain() != "{":
            return None
        self.index += 1
        body = self._block("}")
        self.index += 1
        return body

    def _subshell(self) -> Chain:
        self.index += 1
        body = self.chain(frozenset(), frozenset({")"}))
        self.index += 1
        return body

    def _defines(self) -> bool:
        following = self.tokens[self.index + 1 : self.index + 3]
        return [each.text for each in following] == ["(", ")"] and all(each.kind == "operator" for each in following)

    def _function(self) -> Function:
        if self._plain() == "function":
            self.index += 1
        name = self._plain() or ""
        self.index += 1
        while self._is("(") or self._is(")") or self._is("\n"):
            self.index += 1
        body = self._statement(frozenset())
        return Function(name, body if isinstance(body, Chain) else Chain(((";", body),)))

    def _if(self) -> Condition:
        line, branches = self.tokens[self.index].line, []
        while self._plain() in ("if", "elif"):
            self.index += 1
            condition = self._block("then")
            self.index += 1
            branches.append((condition, self._block("elif", "else", "fi")))
        otherwise = Chain(())
        if self._plain() == "else":
            self.index += 1
            otherwise = self._block("fi")
        self._expect("fi")
        return Condition(tuple(branches), otherwise, line)

    def _while(self) -> Loop:
        line, until = self.tokens[self.index].line, self._plain() == "until"
        self.index += 1
        condition = self._block("do")
        self.index += 1
        body = self._block("done")
        self.index += 1
        return Loop("", None, condition, until, body, line)

    def _for(self) -> Loop | Chain:
        line = self.tokens[self.index].line
        self.index += 1
        token = self._peek()
        name = self._plain() or ""
        self.index += 1
        words: tuple[Word, ...] | None = None
        if self._plain() == "in":
            self.index += 1
            words = self._words()
        while self._is(";") or self._is("\n"):
            self.index += 1
        self._expect("do")
        body = self._block("done")
        self.index += 1
        if token is None or token.kind != "sum":
            return Loop(name, words, None, False, body, line)
        first, condition, step = (*token.text.split(";"), "", "")[:3]
        holds = Chain(((";", Test((), line, condition.strip() or "1")),))
        return Chain(((";", Test((), line, first)), (";", Loop("", None, holds, False, body, line, step))))

    def _words(self) -> tuple[Word, ...]:
        found: list[Word] = []
        while (token := self._peek()) is not None and token.word is not None:
            found.append(token.word)
            self.index += 1
        return tuple(found)

    def _case(self) -> Choice:
        line = self.tokens[self.index].line
        self.index += 1
        token = self._peek()
        word = token.word if token is not None else None
        self.index += 1
        while self._is("\n"):
            self.index += 1
        if word is None or self._plain() != "in":
            raise ScriptError("'case' is not followed by a word and 'in'", line)
        self.index += 1
        branches: list[tuple[tuple[Word, ...], Chain]] = []
        while True:
            while self._is("\n") or self._is(";;") or self._is("("):
                self.index += 1
            if self._plain() == "esac" or self._peek() is None:
                break
            patterns: list[Word] = []
            while (token := self._peek()) is not None and not self._is(")"):
                if token.word is not None:
                    patterns.append(token.word)
                self.index += 1
            self.index += 1
            branches.append((tuple(patterns), self.chain(frozenset({"esac"}), frozenset({";;"}))))
        self._expect("esac")
        return Choice(word, tuple(branches), line)

    def _test(self) -> Test:
        line = self.tokens[self.index].line
        self.index += 1
        start = self.index
        while (token := self._peek()) is not None:
            self.index += 1
            if token.word is not None and token.word.plain == "]]":
                return Test(tuple(self.tokens[start : self.index - 1]), line)
        raise ScriptError("']]' is missing", line)

    def _command(self) -> Command:
        line = self.tokens[self.index].line
        words: list[Word] = []
        while (token := self._peek()) is not None:
            if token.word is not None:
                words.append(token.word)
                self.index += 1
            elif token.kind == "operator" and token.text in REDIRECTIONS:
                self.index += 1
                self._target()
            elif self._is("(") and not all(word.plain in _BEFORE_GROUPS for word in words):
                if not (words[-1].plain or "x").endswith(("?", "*", "+", "@", "!")):
                    raise ScriptError("'(' stands in a command without quotation marks, which bash refuses", token.line)
                self._enclosed()  # a pattern such as !(name)
            else:
                break
        return Command(tuple(words), tuple(self._documents()), line)

    def _target(self) -> None:
        """What a redirection names is no word of the command: a file, or in parentheses a command, as in `> >(tee log)`."""
        while (token := self._peek()) is not None and token.kind == "operator" and token.text in REDIRECTIONS:
            self.index += 1
        if self._is("("):
            self._enclosed()
        else:
            self.index += 1

    def _enclosed(self) -> None:
        """Everything up to the parenthesis that closes this one."""
        depth = 0
        while self._peek() is not None:
            depth += self._is("(") - self._is(")")
            self.index += 1
            if not depth:
                return

    def _documents(self) -> Iterator[tuple[str, bool]]:
        """Here-documents follow the line that names them."""
        rest = self.tokens[self.index :]
        end = next((index for index, token in enumerate(rest) if token.kind == "operator" and token.text == "\n"), len(rest))
        for token in rest[end + 1 :]:
            if token.kind not in DOCUMENTS:
                return
            yield token.text, token.kind == DOCUMENTS[1]
