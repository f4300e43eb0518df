"""Launch arguments from a text: arguments alone, or a plain script, whose only command in addition to assignments is the launch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.hosts.megatron.argument import Kind
from megaplan.hosts.megatron.not_carried import IGNORED, IGNORED_PREFIXES
from megaplan.hosts.megatron.vocabulary import ARGUMENTS
from megaplan.importers.megatron.arguments import Given, name_of, typed
from megaplan.importers.megatron.shell import ASSIGNMENT, VARIABLE, Field, NeedsBashError, Shell
from megaplan.importers.megatron.unset import UNSET, readable, unset
from megaplan.spec.read import STDIN_NAME

OF_LAUNCHER = {"nnodes": "nnodes", "nproc_per_node": "nproc_per_node", "num_nodes": "nnodes", "num_gpus": "nproc_per_node"}
"""Arguments before the program's name that count processes: those of torchrun, and of deepspeed."""


def read_script(text: str, name: str, environment: Mapping[str, str], argv: Sequence[str]) -> Given:
    """The arguments of a text.

    Args:
        text: A plain script, or arguments alone.
        name: Name of the text in diagnostics.
        environment: Environment variables of the script.
        argv: Arguments that follow its own.

    Raises:
        MegaplanError: MP922 if only bash can read it; MP916 if it is truncated, or has no arguments.
    """
    more = [Field(word, 0) for word in argv]
    if _first(text).startswith("--") or not text:
        alone = read_words([*_alone(text, name), *more])
        return Given(alone.values, alone.lines, dict(environment), alone.left_out)
    shell = Shell(environment, Path(name).parent if name != STDIN_NAME else None)
    try:
        if "#SBATCH" in text:
            raise NeedsBashError(text.count("\n", 0, text.index("#SBATCH")) + 1, "#SBATCH lines")
        shell.run(text)
    except NeedsBashError as error:
        given = [word for pair in environment.items() for word in ("--env", "=".join(pair))]
        file = "launch.sh" if name == STDIN_NAME else name
        command = shlex.join(["megaplan", "import", "megatron", "--record", *given, "--", "bash", file, *argv])
        detail = f"{name} has {error.what}, which bash alone can read"
        raise MegaplanError([diagnostic("MP922", detail, Location(name, error.line), (command,))]) from None
    if not shell.launch and not more:
        raise MegaplanError([diagnostic("MP916", f"{name} has no argument that begins with --", Location(name), ("--num-layers 32 …",))])
    found = read_command([*shell.launch, *more], shell.texts)
    return replace(found, left_out=(*shell.notes, *found.left_out))


def read_command(words: Sequence[Field], environment: Mapping[str, str]) -> Given:
    """The arguments of a launcher and its program."""
    stop, start = _program([word.text for word in words])
    launcher, program = read_words(words[:stop]), read_words(words[start:])
    values = {OF_LAUNCHER[key]: value for key, value in launcher.values.items() if key in OF_LAUNCHER} | program.values
    lines = {OF_LAUNCHER.get(key, key): line for key, line in launcher.lines.items()} | program.lines
    assigned = dict(word.text.split("=", 1) for word in words[:stop] if ASSIGNMENT.match(word.text))
    return Given(values, lines, {**environment, **assigned}, program.left_out)


def read_words(words: Sequence[Field]) -> Given:
    """Arguments from words: a switch has no value, an argument with several words a list of them."""
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    left_out: list[tuple[int, str]] = []
    key: str | None = None
    for word, line in words:
        empty = not UNSET.sub("", word)
        if word.startswith("--") and len(word) > 2:
            written, equals, value = word.partition("=")
            key = name_of(readable(written))
            values[key] = typed(value) if equals else True
            lines[key] = line
        elif empty and (key is None or _is_switch(key) or values[key] is not True):
            if word:
                left_out.append((line, f"{readable(word)} is set nowhere, and is read as empty"))  # as bash does
        elif key is not None:
            held = values[key]
            values[key] = typed(word) if held is True else [*(held if isinstance(held, list) else [held]), typed(word)]
    return Given(values, lines, left_out=tuple(left_out))


def substituted(text: str, variables: Mapping[str, Any]) -> str:
    """A text with the values of the variables in it; unset variables are kept as placeholders."""

    def found(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return str(variables[name]) if name in variables else match[2] if match[2] is not None else unset(name)

    return VARIABLE.sub(found, text)


def _first(text: str) -> str:
    """The first line that is not empty or a comment."""
    return next((line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")


def _alone(text: str, name: str) -> Iterator[Field]:
    """Words of bare arguments, on one line or several; only quotation marks have a meaning in them.

    Raises:
        MegaplanError: MP916 if a quotation is not closed.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield from (Field(word, number) for word in shlex.split(line.rstrip().removesuffix("\\"), comments=True))
        except ValueError as error:
            raise MegaplanError([diagnostic("MP916", f"{name}: {str(error).lower()}", Location(name, number))]) from None


def _program(words: Sequence[str]) -> tuple[int, int]:
    """Positions of the end of the launcher's arguments and the start of the program's: around its name, a Python file or a module."""
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return place, place + 1
        if word == "-m" and place + 1 < len(words) and not words[place + 1].startswith("torch.distributed"):
            return place, place + 2
    return 0, 0


def _is_switch(key: str) -> bool:
    if key in IGNORED or key.startswith(IGNORED_PREFIXES):
        return False  # paths and the like, which are not read
    return key not in ARGUMENTS or ARGUMENTS[key].kind is Kind.SWITCH
