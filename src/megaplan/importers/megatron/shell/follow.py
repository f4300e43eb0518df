"""Following a script: its commands in order, up to the launches that they start."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megaplan.importers.megatron.recording.jobs import directives
from megaplan.importers.megatron.recording.rows import Recording, RecordLine
from megaplan.importers.megatron.shell.conditions import Condition, Token
from megaplan.importers.megatron.shell.programs import Left, Programs
from megaplan.importers.megatron.shell.scan import NeedsBashError, Word
from megaplan.importers.megatron.shell.syntax import Body, Command
from megaplan.importers.megatron.shell.words import StoppedError
from megaplan.importers.megatron.unset import UNSET, readable, unset, unset_names

MAX_COMMANDS = 20_000
WRITTEN = (".json", ".sh", ".sbatch", ".slurm", ".sub", ".job")
"""Endings of files that a script writes, and its program reads or a shell runs."""
_DECLARES = frozenset({"export", "local", "declare", "readonly", "typeset"})


class Undecided(NamedTuple):
    """A condition that the script alone does not decide."""

    line: int
    text: str


class Shell(Programs):
    """A script while it is followed.

    Args:
        name: Name of the script.
        variables: Variables of its environment.
        argv: Arguments of the script.
        folder: Folder of the script; None for a text without a file.
        decisions: The outcome of conditions that it does not decide, by their order; the others are false.

    Attributes:
        undecided: Conditions that it did not decide, in order.
        ended: The line on which it ended before its last line; 0 if it did not.
    """

    def __init__(
        self, name: str, variables: Mapping[str, str], argv: Sequence[str], folder: Path | None, decisions: Mapping[int, bool]
    ) -> None:
        super().__init__(dict(variables), name, argv, folder)
        self.undecided: list[Undecided] = []
        self.empty: dict[str, None] = {}
        self.ended = 0
        self._decisions = decisions
        self._count = 0

    def follow(self, text: str) -> None:
        """Follows a whole script.

        Raises:
            NeedsBashError: It has a construct that bash alone can read.
        """
        directives(text, self.variables)  # type: ignore[arg-type]
        try:
            self._script(text)
        except Left as left:
            self.ended = left.line
        except StoppedError:
            self.ended = self._line
        except NeedsBashError as error:
            raise NeedsBashError(error.line or self._line, error.what) from None
        except (RecursionError, re.error) as error:
            raise NeedsBashError(self._line, str(error)) from None

    def recording(self) -> Recording:
        """The launches as a recording has them."""
        unset_rows = [RecordLine("unset", tuple(self.empty), "", self.name, None, {})] if self.empty else []
        words = {name: [held] if isinstance(held, str) else held for name, held in self.variables.items() if not isinstance(held, dict)}
        rows = [
            RecordLine("variable", (name, *(part for each in held for part in each.split())), "", self.name, None, {})
            for name, held in words.items()
            if held and re.match(r"\s*--[a-z]", held[0])
        ]
        ended = "" if self.launches or not self.ended else f"it exits on line {self.ended}"
        return Recording((*self.launches, *self.absent, *unset_rows, *(rows if not self.launches else ())), 0, ended, "")

    def followed(self, body: Body) -> bool | None:
        """The status of commands, after they are followed."""
        status: bool | None = True
        for step in body:
            if (step.sign == "&&" and status is False) or (step.sign == "||" and status is not False):
                continue
            status = self._command(step.commands[0]) if len(step.commands) == 1 else self._pipe(step.commands)
            status = None if status is None else status != step.reversed
        return status

    def _pipe(self, commands: Sequence[Command]) -> bool | None:
        status, given = None, ""
        for command in commands:
            with self._child() as out:
                self._given = given
                status = self._command(command)
            given = "".join(out)
        self._out.append(given)
        return status

    def _command(self, command: Command) -> bool | None:
        self._count, self._line = self._count + 1, command.line
        if self._count > MAX_COMMANDS:
            raise NeedsBashError(command.line, f"loops of more than {MAX_COMMANDS:,} commands")
        line, given = self._line, self._given
        if command.given is not None:
            sign, word = command.given
            text = self.text(word)
            is_file = sign == "<" and word.pieces[0].kind != "program"
            self._given = (self._read(text) or unset(f"({text})")) if is_file else text
        status: bool | None = self._run(command)
        self._line, self._given = line, given if command.given is not None else self._given
        return status

    def _run(self, command: Command) -> bool | None:
        """The status of a command; what it writes to a file that is read later is kept by the file's name."""
        run = getattr(self, f"_run_{command.kind}")
        path = "" if command.written is None else self.text(command.written[1])
        if command.written is None or not path.endswith(WRITTEN):
            return run(command)  # type: ignore[no-any-return]
        held, self._out = self._out, []
        try:
            status: bool | None = run(command)
            before = self.files.get(path, "") if command.written[0] == ">>" else ""
            self.files = {**self.files, path: before + "".join(self._out)}
        finally:
            self._out = held
        return status

    def _run_group(self, command: Command) -> bool | None:
        return self.followed(command.parts[0][1])

    def _run_child(self, command: Command) -> bool | None:
        status: bool | None = True
        with self._child() as out:
            status = self.followed(command.parts[0][1])
        self._out += out
        return status

    def _run_function(self, command: Command) -> bool:
        self._functions[command.text] = command.parts[0][1]
        return True

    def _run_sum(self, command: Command) -> bool | None:
        value = self.sum(command.text, command.line)
        return self._decided(None if UNSET.search(value) else value != "0", f"(({command.text}))")

    def _run_test(self, command: Command) -> bool:
        tokens = list[Token]()
        for word in command.words:
            before = tokens[-1].text if tokens else ""
            pattern = self.pattern(word) if before in ("=", "==", "!=") else None
            texts = [(piece, self.single(piece)) for piece in word.pieces]
            literal = before == "=~"
            text = "".join(re.escape(each) if literal and piece.quoted and piece.kind == "text" else each for piece, each in texts)
            tokens.append(Token(text, pattern, bool(word.plain)))
        return self._tested(tokens)

    def _tested(self, tokens: Sequence[Token]) -> bool:
        names = [name for token in tokens for name in unset_names(token.text) if not name.startswith("(")]
        self.empty |= dict.fromkeys(names)
        self.demanded = names or self.demanded
        found = Condition(tokens, self._path, lambda name: self.held(name) is not None).value()
        return self._decided(found, " ".join(readable(token.text) for token in tokens))

    def _decided(self, found: bool | None, text: str) -> bool:
        if found is None:
            found = self._decisions.get(len(self.undecided), False)
            self.undecided.append(Undecided(self._line, readable(text).strip()[:80]))
        return found

    def _holds(self, condition: Body) -> bool:
        line = self._line
        status = self.followed(condition)
        self._line = line
        return self._decided(status, "the status of a program")

    def _run_if(self, command: Command) -> bool | None:
        for condition, body in command.parts:
            if condition is None or self._holds(condition):
                return self.followed(body)
        return True

    def _run_while(self, command: Command) -> bool:
        condition, body = command.parts[0]
        while self._holds(condition) != (command.kind == "until"):
            if self._left_loop(body):
                break
        return True

    _run_until = _run_while

    def _left_loop(self, body: Body) -> bool:
        """Follows the commands of a loop once; True if they leave it."""
        try:
            self.followed(body)
        except Left as left:
            if left.kind not in ("break", "continue"):
                raise
            if left.count > 1:
                raise Left(left.kind, left.line, left.count - 1) from None
            return left.kind == "break"
        return False

    def _run_for(self, command: Command) -> bool:
        for value in [field for word in command.words for field in self.fields(word)]:
            self.set(command.text, value)
            unknown = any(name.startswith("(") for name in unset_names(value))
            if unknown and not self._decided(None, f"for {command.text} in {value}"):
                continue
            if self._left_loop(command.parts[0][1]):
                break
        return True

    def _run_count(self, command: Command) -> bool:
        first, until, after = (*command.text.split(";"), "", "")[:3]
        self.sum(first, command.line)
        while self.sum(until or "1", command.line) not in ("0", ""):
            if UNSET.search(self.sum(until or "1", command.line)):
                if self._decided(None, f"a loop to {until.strip()}"):
                    self._left_loop(command.parts[0][1])
                break
            self._count += 1
            if self._count > MAX_COMMANDS or self._left_loop(command.parts[0][1]):
                break
            self.sum(after, command.line)
        return True

    def _run_case(self, command: Command) -> bool | None:
        text = self.text(command.words[0])
        for patterns, body in command.parts:
            tokens = [Token(text), Token("=="), Token("")]
            for pattern in patterns:
                if pattern.plain == "*" or self._tested([*tokens[:2], Token(self.text(pattern), self.pattern(pattern))]):
                    return self.followed(body)
        return True

    def _run_simple(self, command: Command) -> bool | None:
        words = list(command.words)
        if words and words[0].plain in _DECLARES:
            return self._declare(words)
        before = dict(self.variables)
        assigned = 0
        while assigned < len(words) and self.assign(words[assigned]):
            assigned += 1
        if assigned == len(words):
            return True
        fields = [(field, word.line) for word in words[assigned:] for field in self.fields(word)]
        while fields and not UNSET.sub("", fields[0][0]):
            fields.pop(0)  # a variable that no command before it sets
        if not fields:
            return None
        status = self._call([text for text, _ in fields], [line for _, line in fields])
        if assigned and fields[0][0] not in ("read", "mapfile"):
            for name in {word.start.partition("=")[0] for word in words[:assigned]}:
                if name in before:
                    self.variables[name] = before[name]
        return status

    def _declare(self, words: Sequence[Word]) -> bool:
        options = "".join(word.plain for word in words[1:] if re.match(r"[-+]\w", word.plain))
        own = self._locals[-1] if self._locals and words[0].plain in ("local", "declare", "typeset") and "g" not in options else None
        for word in words[1:]:
            if re.match(r"[-+]\w", word.plain):
                continue
            name = re.split(r"[^\w]", self.text(word), maxsplit=1)[0] if not word.start else re.match(r"\w*", word.start)[0]  # type: ignore[index]
            if own is not None and name not in own:
                own[name] = self.variables.pop(name, None)
            if "n" in options and words[0].plain != "export":
                self.references[name] = self.text(word).partition("=")[2]
                continue
            if "A" in options and not isinstance(self.variables.get(name), dict):
                self.set(name, {})
            if not self.assign(word) and "=" in (whole := self.text(word)):
                self.set(name, whole.partition("=")[2])
        return True

    def tested(self, words: list[str]) -> bool:
        """The status of `[`."""
        return self._tested([Token(word) for word in (words[:-1] if words[-1:] == ["]"] else words)])
