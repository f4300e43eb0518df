"""Commands of a script that start others: functions, files, shells, wrappers, batch jobs, and the launches."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from megaplan.importers.megatron.recording.jobs import JOB, directives, slurm, tasks
from megaplan.importers.megatron.recording.names import BATCH, LAUNCHERS, PYTHONS, SHELLS, WRAPPERS, inner_program
from megaplan.importers.megatron.recording.rows import RecordLine
from megaplan.importers.megatron.shell.builtins import Builtins
from megaplan.importers.megatron.shell.scan import NeedsBashError
from megaplan.importers.megatron.shell.syntax import Body, Parser
from megaplan.importers.megatron.shell.words import Value
from megaplan.importers.megatron.unset import UNSET, readable, unset

MAX_DEPTH, MANY_ARGUMENTS = 24, 8


class Left(Exception):  # noqa: N818 (not an error: a command that leaves loops, a function or the script)
    """The command `exit`, `return`, `break` or `continue`.

    Attributes:
        kind: The command.
        line: Line of the command.
        count: Number that follows it.
    """

    def __init__(self, kind: str, line: int, count: int) -> None:
        super().__init__(kind)
        self.kind, self.line, self.count = kind, line, count


class Programs(Builtins):
    """Commands of a script that start programs.

    Attributes:
        launches: The commands that start a program with arguments.
        absent: Files that it sources or runs and that are not here.
    """

    def __init__(self, variables: dict[str, Value], name: str, argv: Sequence[str], folder: Path | None) -> None:
        super().__init__(variables, name, argv, folder)
        self.launches: list[RecordLine] = []
        self.absent: list[RecordLine] = []
        self._functions: dict[str, Body] = {}
        self._submitted: set[Path] = set()
        self._locals: list[dict[str, Value | None]] = []
        self._depth = 0

    def followed(self, body: Body) -> bool | None:
        """The status of commands, after they are followed."""
        raise NotImplementedError

    def tested(self, words: list[str]) -> bool:
        """The status of `[`."""
        raise NotImplementedError

    def _script(self, text: str, line: int = 1) -> bool | None:
        if self._depth > MAX_DEPTH:
            raise NeedsBashError(self._line, "commands inside commands without an end")
        self._depth += 1
        try:
            return self.followed(Parser(text.replace("\r\n", "\n"), line).script())
        finally:
            self._depth -= 1

    @contextmanager
    def _child(self) -> Iterator[list[str]]:
        """Changes of variables are undone at the end; output is kept."""
        held = (dict(self.variables), self.positional, self._current, self._out, self._given)
        out: list[str] = []
        self._out = out
        try:
            yield out
        except Left as left:
            if left.kind not in ("exit", "return"):
                raise
        finally:
            self.variables, self.positional, self._current, self._out, self._given = held

    def output(self, commands: str, line: int) -> str:
        """Output of commands; a placeholder for what is not known."""
        if (match := re.fullmatch(r"\s*<\s*(\S+)\s*", commands)) is not None:
            commands = f"cat {match[1]}"
        with self._child() as out:
            self._script(commands, line or self._line)
        return "".join(out)

    def _call(self, fields: list[str], lines: list[int]) -> bool | None:
        """The status of a command, after the commands that it starts are followed; None if it is not known."""
        name, program = fields[0], fields[0].rpartition("/")[2]
        own = self._own.get(name) or self.builtins.get(name)
        options = sum(word.startswith("--") for word in fields[2 if program in PYTHONS else 0 :])
        status: bool | None = None
        if name in self._functions:
            status = self._function(name, fields[1:])
        elif own is not None:
            status = own(self, fields[1:])
        elif program in SHELLS or name.endswith(".sh"):
            status = self._shell(fields if program in SHELLS else ["bash", *fields])
        elif program == "sbatch":
            status = self._batch(fields)
        elif program in WRAPPERS | BATCH:
            status = self._wrapped(fields, lines)
        elif program in LAUNCHERS or options >= (1 if program in PYTHONS else MANY_ARGUMENTS):
            environment = {key: value for key, value in self.variables.items() if isinstance(value, str)}
            self.launches.append(RecordLine("launch", tuple(fields), "", self.file, lines[0], environment, tuple(lines), self.files))
            status = True
        elif program in PYTHONS and "-c" in fields:
            status = self.count_gpus(fields)
        else:
            self._out.append(unset(f"({program})"))
        return status

    def _function(self, name: str, argv: list[str]) -> bool | None:
        if self._depth > MAX_DEPTH:
            raise NeedsBashError(self._line, f"{name}, a function that calls itself")
        outer, self.positional = self.positional, argv
        self._depth += 1
        self._locals.append({})
        try:
            return self.followed(self._functions[name])
        except Left as left:
            if left.kind != "return":
                raise
            return left.count == 0
        finally:
            self._depth -= 1
            self.positional = outer
            for key, value in self._locals.pop().items():
                self.variables.pop(key, None)
                if value is not None:
                    self.variables[key] = value

    def _shell(self, fields: list[str]) -> bool | None:
        rest = fields[1:]
        while rest and rest[0].startswith(("-", "+")) and not re.fullmatch(r"-[a-z]*c", rest[0]):
            rest = rest[2 if rest[0] in ("-o", "+o") else 1 :]
        if rest and rest[0].startswith("-"):
            return self._nested(rest[1] if len(rest) > 1 else "", rest[2:])
        if not rest or rest[0] == "-":
            return None if UNSET.search(self._given) else self._nested(self._given, rest[1:])
        file = self._here(rest[0])
        text = self._read(file)
        if text is None:
            self._missing(file)
            return None
        return self._nested(text, rest, file)

    def _nested(self, text: str, argv: list[str], file: str = "") -> bool | None:
        """Follows the text of another shell."""
        held = self.name, self.file, self._folder, self._functions
        path = self._path(file) if file else None
        status: bool | None = None
        with self._child() as out:
            self.positional = argv[1:]
            if path is not None:
                self.name = self.file = file
                self._folder, self._functions = path.parent, {}
            directives(text, self.variables)  # type: ignore[arg-type]
            try:
                status = self._script(text, 1 if path is not None else self._line)
            finally:
                self.name, self.file, self._folder, self._functions = held
        self._out += out
        return status

    def _batch(self, fields: list[str]) -> bool | None:
        place = next((at for at, word in enumerate(fields) if at and not word.startswith("-") and self._read(word) is not None), None)
        self.variables |= {key: value for key, value in JOB.items() if key not in self.variables}
        slurm(fields[1:place], self.variables)  # type: ignore[arg-type]
        if place is not None and (path := self._path(fields[place])) is not None:
            if path in self._submitted:
                return True  # a job that submits itself again
            self._submitted.add(path)
        wrapped = next((word.partition("=")[2] or fields[at + 1] for at, word in enumerate(fields) if word.split("=")[0] == "--wrap"), None)
        if wrapped is not None:
            return self._nested(wrapped, [])
        return self._nested(self._given, []) if place is None else self._shell(["bash", *fields[place:]])

    def _wrapped(self, fields: list[str], lines: list[int]) -> bool | None:
        place, is_line = inner_program(fields, lambda word: self._path(word) is not None)
        for key, value in _passed_on(fields[1:place]):
            self.set(key, value)
        if place is None:
            self._out.append(unset(f"({fields[0]})"))
            return None
        (slurm if fields[0].rpartition("/")[2] in BATCH else tasks)(fields[:place], self.variables)  # type: ignore[arg-type]
        if is_line:
            return self._nested(fields[place], [])
        program = ["python"] if fields[place].endswith(".py") else []
        return self._call([*program, *fields[place:]], [*lines[place : place + len(program)], *lines[place:]])

    def _missing(self, path: str) -> None:
        self.absent.append(RecordLine("absent", (readable(path),), "", self.name, self._line, {}))

    def _source(self, words: list[str]) -> bool | None:
        file = self._here(words[0]) if words else ""
        text = self._read(file)
        path = self._path(file) if text is not None else None
        if text is None or path is None:
            self._missing(words[0] if words else "")
            return None
        held = self.file, self._folder, self.positional
        self.file, self._folder = str(path), path.parent
        self.positional = words[1:] or self.positional
        try:
            return self._script(text)
        except NeedsBashError as error:
            raise NeedsBashError(self._line, f"{path.name}, a sourced file with {error.what}") from None
        except Left as left:
            if left.kind != "return":
                raise
            return True
        finally:
            self.file, self._folder, self.positional = held

    def _joined(self, words: list[str]) -> bool | None:
        return self._script(" ".join(words), self._line)

    def _leave(self, kind: str, words: list[str]) -> bool:
        number = int(words[0]) if words and re.fullmatch(r"\d{1,3}", words[0]) else int(kind in ("break", "continue"))
        raise Left(kind, self._line, number)

    _own: ClassVar[dict[str, Callable[[Programs, list[str]], bool | None]]] = {
        **{kind: lambda shell, words, kind=kind: shell._leave(kind, words) for kind in ("exit", "return", "break", "continue")},  # type: ignore[misc]
        **{
            "source": _source,
            ".": _source,
            "[": lambda shell, words: shell.tested(words),
            "test": lambda shell, words: shell.tested(words),
            "eval": _joined,
        },
    }


_OF_RAY = "--runtime-env-json"


def _passed_on(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Variables that a wrapper gives to the command which it starts.

    These are `NAME=VALUE` of `env`, `docker run -e` and `mpirun -x`, `--env=NAME=VALUE`, `srun --export=ALL,NAME=VALUE`, and `env_vars` in
    the JSON of `ray job submit --runtime-env-json`.
    """
    for at, word in enumerate(words):
        if word.startswith(_OF_RAY):
            text = word.partition("=")[2] or " ".join(words[at + 1 : at + 2])
            try:
                found = json.loads(text)["env_vars"].items()
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue
            yield from ((str(key), str(value)) for key, value in found)
            continue
        pairs = word[len("--export=") :].split(",") if word.startswith("--export=") else [word.removeprefix("--env=")]
        yield from ((match[1], match[2]) for pair in pairs if (match := re.match(r"([A-Za-z_]\w*)=(.*)", pair, re.DOTALL)) is not None)
