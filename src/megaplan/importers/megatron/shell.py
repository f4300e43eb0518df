"""The straight-line part of bash that launch scripts consist of: variables, arrays, arithmetic, files that are sourced, one launch.

Whatever bash decides by a condition, a loop or a program is refused (`NeedsBashError`): a recording reads it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megaplan.importers.megatron.unset import readable, unset, unset_names

VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}$`'\"]*))?\}|\$([A-Za-z_]\w*)")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
MAX_SOURCED_BYTES, MAX_DEPTH = 2**20, 8
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_LIST = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")
_PIECE = re.compile(r"(?P<plain>[^\s'\"\\$`(){}|&;<>*?\[\]]+)|'(?P<single>[^']*)'|\\(?P<escaped>[^\n])")
_REDIRECT = r"(?:\d|&)?>{1,2}[ \t]*(?:&\d|[^\s;|&<>()]+)|<[ \t]*[^\s;|&<>()]+"
_PASSED = re.compile(rf"(?:[ \t]|\\\n)+|#[^\n]*|{_REDIRECT}")
_PIPE = re.compile(r"\|(?!\|)(?:\\\n|>&\d|&>|[^\n;&])*")
"""A pipe into what reads the launch's output."""
_SEPARATOR = re.compile(r"\n|;(?!;)|&&|&")
_END = re.compile(r"\Z|[\s;|&><)]|\\\n")
_HERE = r"""(?:\$\{BASH_SOURCE(?:\[0\])?(?::-\$0)?\}|\$BASH_SOURCE|\$0|\$\{0\})"""
_FOLDER = re.compile(
    rf"""(?:cd(?:\s+-P|\s+--)?\s+)?"?(?:\$\(\s*)?dirname\s+(?:--\s+)?"?(?:\$\((?:realpath|readlink -f)\s+)?"?{_HERE}"?\)?"?\s*\)?"""
    r"""(?P<above>(?:/\.\.)*)"?(?:\s*(?:&?>\s*/dev/null|\d>&\d))*(?:\s*(?:&&|;)\s*pwd(?:\s+-P)?)?"""
)
_IGNORED = frozenset(
    [
        "set",
        "cd",
        "mkdir",
        "echo",
        "printf",
        "module",
        "ulimit",
        "conda",
        "date",
        "rm",
        "cp",
        "ln",
        "sleep",
        "wait",
        "exit",
        "true",
        "unset",
        "shopt",
        "trap",
        "ls",
        "cat",
        "pwd",
        "pushd",
        "popd",
    ]
)
"""Commands that change nothing of what a launch is given."""
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_STRUCTURE = frozenset(
    ("if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac", "function", "eval", "select")
)
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
Value = str | list[str]


class Field(NamedTuple):
    """A word and its line."""

    text: str
    line: int


class NeedsBashError(Exception):
    """A construct that bash alone can read, with its line."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line, self.what = line, what


class _Piece(NamedTuple):
    """A part of a word: its kind (text, variable, array or program), its text or name, whether it is quoted, and a variable's default."""

    kind: str
    text: str
    quoted: bool
    default: str | None = None


class Shell:
    """Variables and launch of a script while its commands are read in order.

    Args:
        variables: Variables that it finds.
        folder: Folder of the script; None for a text without a file.
    """

    def __init__(self, variables: Mapping[str, str], folder: Path | None) -> None:
        self.variables: dict[str, Value] = dict(variables)
        self.launch: list[Field] = []
        self.notes: list[tuple[int, str]] = []
        self._folder = folder

    @property
    def texts(self) -> dict[str, str]:
        """Variables that are no arrays."""
        return {name: value for name, value in self.variables.items() if isinstance(value, str)}

    def run(self, text: str, depth: int = 0) -> None:
        """Reads a script.

        Raises:
            NeedsBashError: It has another construct of bash, or several launches.
        """
        for words in _Commands(text, self).commands():
            self._command(words, depth)

    def _command(self, words: list[tuple[int, list[_Piece]]], depth: int) -> None:
        declares = _start(words[0][1]) in _DECLARES
        while words and (declares or ASSIGNMENT.match(_start(words[0][1]))):
            line, pieces = words.pop(0)
            self._assign("".join(self._single(piece, line) for piece in pieces))
        if not words:
            return
        line, name = words[0][0], _start(words[0][1])
        if name in _STRUCTURE:
            raise NeedsBashError(line, name)
        fields = [field for number, pieces in words for field in self.fields_of(pieces, number)]
        if name == "exec":
            fields = fields[1:]
        if name in ("source", "."):
            self._source(fields, line, depth)
        elif name == "printf" and len(fields) > 3 and fields[1].text == "-v":
            self.variables[fields[2].text] = _formatted(fields[3].text, [field.text for field in fields[4:]], line)
        elif name not in _IGNORED and fields:
            if self.launch:
                raise NeedsBashError(line, f"a second command, {readable(fields[0].text)}")
            self.launch = fields

    def _assign(self, assignment: str) -> None:
        match = ASSIGNMENT.match(assignment)
        if match is None:
            return  # a declaration without a value
        name, value = match[1], assignment[match.end() :]
        held = self.variables.get(name, "")
        self.variables[name] = f"{held}{value}" if match[2] and isinstance(held, str) else value

    def assign_list(self, name: str, words: list[str], *, more: bool) -> None:
        """Sets an array, or appends to it."""
        held = self.variables.get(name, [])
        self.variables[name] = [*(held if isinstance(held, list) else [held]), *words] if more else words

    def _source(self, fields: Sequence[Field], line: int, depth: int) -> None:
        path = fields[1].text if len(fields) > 1 else ""
        tried = [Path(path), *([self._folder / path] if self._folder is not None else [])]
        found = (
            None if unset_names(path) else next((one for one in tried if one.is_file() and one.stat().st_size <= MAX_SOURCED_BYTES), None)
        )
        if found is None or depth >= MAX_DEPTH or not path:
            return self.notes.append((line, f"{readable(path)} is sourced, and was not read: it is no file here"))
        outer, self._folder = self._folder, found.parent
        try:
            self.run(found.read_text(encoding="utf-8", errors="replace"), depth + 1)
        except NeedsBashError as error:
            raise NeedsBashError(line, f"{found.name}, a sourced file with {error.what}") from None
        finally:
            self._folder = outer

    def _single(self, piece: _Piece, line: int) -> str:
        if piece.kind == "array":
            return " ".join(self.words_of(piece.text))
        if piece.kind == "variable":
            held = self.text_of(piece.text)
            return held if held is not None else piece.default if piece.default is not None else unset(piece.text)
        return self.answer(piece.text, line) if piece.kind == "program" else piece.text

    def words_of(self, name: str) -> list[str]:
        """The words of an array; a text is one, an unset one none."""
        held = self.variables.get(name, [])
        return list(held) if isinstance(held, list) else [held]

    def text_of(self, name: str) -> str | None:
        """The text of a variable, the first word of an array; None if it is set nowhere."""
        held = self.variables.get(name)
        return (held[0] if held else "") if isinstance(held, list) else held

    def answer(self, command: str, line: int) -> str:
        """The output of a program in `$(…)`: the script's folder, or a placeholder that no argument may need."""
        match = _FOLDER.fullmatch(command.strip())
        if match is not None:
            folder = Path() if self._folder is None else self._folder
            return str(folder) + (match["above"] or "")
        if command.startswith("("):
            return self._arithmetic(command[1:-1], line)
        return unset(f"({command.split(maxsplit=1)[0] if command.split() else ''})")

    def _arithmetic(self, expression: str, line: int) -> str:
        def number(match: re.Match[str]) -> str:
            held = self.text_of(match[1])
            if held is None or not re.fullmatch(r"-?\d+", held):
                raise LookupError(match[1])
            return str(int(held))

        try:
            tree = ast.parse(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", number, expression).strip(), mode="eval")
            return str(_value(tree.body))
        except LookupError as error:
            return unset(str(error.args[0]))
        except (SyntaxError, ValueError, ZeroDivisionError):
            raise NeedsBashError(line, f"$(({expression}))") from None

    def fields_of(self, pieces: Sequence[_Piece], line: int) -> Iterator[Field]:
        """Words of one word of the script: unquoted variables are split at spaces, arrays give a word for each of theirs."""
        done, open_ = list[str](), None
        for piece in pieces:
            for index, part in enumerate(self._parts(piece, line, alone=len(pieces) == 1)):
                if index:
                    done.append(open_ or "")
                    open_ = ""
                open_ = (open_ or "") + part
        if open_ is not None:
            done.append(open_)
        yield from (Field(word, line) for word in done)

    def _parts(self, piece: _Piece, line: int, *, alone: bool) -> list[str]:
        """The words of a piece; `alone` if it is a whole word.

        Raises:
            NeedsBashError: A program's output, a pattern of files, or spaces at the ends of a part.
        """
        if piece.kind == "array":
            words = self.words_of(piece.text)
            return words if piece.quoted else [part for word in words for part in word.split()]
        text = self._single(piece, line)
        if piece.kind == "program" and not piece.quoted and text.startswith("\0("):
            raise NeedsBashError(line, repr(f"$({piece.text})"))
        if piece.kind != "variable" or piece.quoted:
            return [text]
        if re.search(r"[*?\[]", text) or not (alone or text == text.strip()):
            raise NeedsBashError(line, f"${piece.text}, a variable whose words bash makes from {readable(text).strip()[:40]!r}")
        return text.split()


class _Commands:
    """The commands of a text, each as words of pieces; variables are replaced when a word is read, after earlier commands have run."""

    def __init__(self, text: str, shell: Shell) -> None:
        self._text, self._shell, self._at = text, shell, 0

    def commands(self) -> Iterator[list[tuple[int, list[_Piece]]]]:
        """Every command.

        Raises:
            NeedsBashError: Another construct of bash.
        """
        text, words = self._text, list[tuple[int, list[_Piece]]]()
        while self._at < len(text):
            if (passed := _PASSED.match(text, self._at)) is not None or (words and (passed := _PIPE.match(text, self._at)) is not None):
                self._at = passed.end()
            elif (ends := _SEPARATOR.match(text, self._at)) is not None:
                self._at = ends.end()
                if words:
                    yield words
                words = []
            elif not words and (found := _LIST.match(text, self._at)) is not None:
                self._list(found)
            else:
                words.append((self._line, self._word()))
        if words:
            yield words

    @property
    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _stop(self) -> NeedsBashError:
        return NeedsBashError(self._line, repr(self._text[self._at :].partition("\n")[0].strip()[:60]))

    def _list(self, found: re.Match[str]) -> None:
        """An array of words in parentheses."""
        begin, self._at, words = self._at, found.end(), list[str]()
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at].isspace() or self._text.startswith("\\\n", self._at):
                self._at += 2 if self._text[self._at] == "\\" else 1
            elif self._text[self._at] == "#":
                self._at = end if (end := self._text.find("\n", self._at)) >= 0 else len(self._text)
            else:
                line, pieces = self._line, self._word()
                words += [field.text for field in self._shell.fields_of(pieces, line)]
        if self._at >= len(self._text):
            self._at = begin
            raise self._stop()
        self._at += 1
        self._shell.assign_list(found[1], words, more=bool(found[2]))

    def _word(self) -> list[_Piece]:
        pieces, text = list[_Piece](), self._text
        while True:
            if (found := _PIECE.match(text, self._at)) is not None:
                kind = str(found.lastgroup)
                pieces.append(_Piece("text", found[kind], quoted=kind != "plain"))
                self._at = found.end()
            elif text.startswith('"', self._at):
                pieces += self._double()
            elif (piece := self._expansion(quoted=False)) is not None:
                pieces.append(piece)
            else:
                break
        if not pieces or _END.match(text, self._at) is None:
            raise self._stop()
        return pieces

    def _double(self) -> list[_Piece]:
        """The pieces of a text in double quotation marks."""
        text, begin, held = self._text, self._at, ""
        pieces = list[_Piece]()
        self._at += 1
        while self._at < len(text) and text[self._at] != '"':
            if text[self._at] == "\\" and self._at + 1 < len(text) and text[self._at + 1] in '"\\$`\n':
                held += "" if text[self._at + 1] == "\n" else text[self._at + 1]
                self._at += 2
            elif text[self._at] in "$`":
                piece = self._expansion(quoted=True)
                if piece is None:
                    self._at = begin
                    raise self._stop()
                pieces += [_Piece("text", held, quoted=True), piece] if held else [piece]
                held = ""
            else:
                held += text[self._at]
                self._at += 1
        if self._at >= len(text):
            self._at = begin
            raise self._stop()
        self._at += 1
        return [*pieces, _Piece("text", held, quoted=True)] if held or not pieces else pieces

    def _expansion(self, *, quoted: bool) -> _Piece | None:
        """A variable, array, sum or program; None if it is none of them."""
        text = self._text
        if (array := _ARRAY.match(text, self._at)) is not None:
            self._at = array.end()
            return _Piece("array", array[1], quoted)
        if (found := VARIABLE.match(text, self._at)) is not None:
            self._at = found.end()
            name = found[1] or found[3]
            return _Piece("variable", name, quoted, found[2])
        if not text.startswith("$(", self._at):
            return None
        depth, at = 0, self._at + 1
        while at < len(text):
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
            if not depth:
                inside = text[self._at + 2 : at - 1]
                self._at = at
                return _Piece("program", inside, quoted)
        return None


def _start(pieces: Sequence[_Piece]) -> str:
    """The unquoted beginning of a word."""
    return pieces[0].text if pieces and pieces[0].kind == "text" and not pieces[0].quoted else ""


def _value(node: ast.AST) -> int:
    """The value of a sum of integers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(ast.dump(node))


def _formatted(form: str, values: list[str], line: int) -> str:
    """The text of `printf`, whose format is used again while values are left."""
    marks = re.findall(r"%%|%[^%]", form)
    if any(mark not in ("%%", "%s", "%d", "%q") for mark in marks):
        raise NeedsBashError(line, f"printf {form!r}")
    plain = form.replace("\\n", "\n").replace("\\t", "\t")
    count, done = len([mark for mark in marks if mark != "%%"]), ""
    while True:
        now, values = values[:count], values[count:]
        queue = iter([*now, *([""] * (count - len(now)))])
        done += re.sub(r"%%|%[sdq]", lambda match, queue=queue: "%" if match[0] == "%%" else next(queue), plain)  # type: ignore[misc]
        if not values or not count:
            return done
