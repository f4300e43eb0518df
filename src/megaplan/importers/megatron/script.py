"""Launch arguments from a bash script: those of the command that it would run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.hosts.megatron.argument import Kind
from megaplan.hosts.megatron.not_carried import IGNORED, IGNORED_PREFIXES
from megaplan.hosts.megatron.vocabulary import ARGUMENTS
from megaplan.importers.megatron.arguments import Given, name_of, typed
from megaplan.importers.megatron.shell.expand import UNKNOWN, Field, readable
from megaplan.importers.megatron.shell.run import Shell, follow
from megaplan.importers.megatron.shell.words import ScriptError

OF_LAUNCHER = frozenset({"nnodes", "nproc_per_node"})
"""Arguments that are read before the program's name."""
_SPLIT = re.compile(r"[ \t\n]+")


def read_script(text: str, name: str, environment: Mapping[str, str], argv: Sequence[str]) -> Given:
    """The arguments of the command with the most of them.

    Args:
        text: The script, or arguments alone.
        name: What diagnostics call it.
        environment: Variables that it finds.
        argv: Its own arguments; of a script that refers to none of its own they follow the command's.

    Raises:
        MegaplanError: MP916, it cannot be read, or nothing in it has an argument.
    """
    if _first(text).startswith("--"):
        alone = read_words([*_plain_words(text, name), *(Field(word, 0) for word in argv)])
        return Given(alone.values, alone.lines, dict(environment), alone.left_out)
    try:
        shell = follow(text, environment, argv)
    except ScriptError as error:
        raise MegaplanError([diagnostic("MP916", f"{name}: {error}", Location(name, error.line))]) from None
    except RecursionError:
        raise MegaplanError([diagnostic("MP916", f"{name}: expansions or groups are nested too deeply", Location(name))]) from None
    words, left_out = _launched(shell)
    more = [] if shell.scope.read_positional else [Field(word, 0) for word in argv]
    if not words and not more:
        raise MegaplanError([diagnostic("MP916", f"{name} has no argument that begins with --", Location(name), ("--num-layers 32 …",))])
    stop, start = _program(words)
    launcher = read_words(words[:stop])
    program = read_words([*words[start:], *more])
    values = {key: value for key, value in launcher.values.items() if key in OF_LAUNCHER} | program.values
    lines = {**launcher.lines, **program.lines}
    values |= _slurm(shell, values)
    variables = {key: found[0].text for key, found in shell.scope.values.items() if found}
    variables |= dict(word.text.split("=", 1) for word in words[:stop] if re.match(r"[A-Za-z_]\w*=", word.text))
    return Given(values, lines, variables, (*((line, readable(why)) for line, why in shell.left_out), *left_out, *program.left_out))


def _first(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")


def _plain_words(text: str, name: str) -> Iterator[Field]:
    """Words of arguments alone, on one line or several: no sign but a quotation means anything in them.

    Raises:
        MegaplanError: MP916, a quotation is not closed.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield from (Field(word, number) for word in shlex.split(line.rstrip().removesuffix("\\"), comments=True))
        except ValueError as error:
            raise MegaplanError([diagnostic("MP916", f"{name}: {str(error).lower()}", Location(name, number))]) from None


def _launched(shell: Shell) -> tuple[list[Field], tuple[tuple[int, str], ...]]:
    """Words of the launch; of a file without a command those of its variables."""
    best = max(shell.commands, key=lambda command: (_count(command), shell.commands.index(command)), default=[])
    if _count(best) > len(OF_LAUNCHER):
        return best, ()
    held = {name: [Field(text, each.line) for each in found for text in _SPLIT.split(each.text) if text] for name, found in _held(shell)}
    named = {name: words for name, words in held.items() if words and words[0].text.startswith("--")}
    words = [word for found in named.values() for word in found]
    return words, ((words[0].line, f"no command is launched: the arguments are those of {', '.join(named)}"),) if words else ()


def _held(shell: Shell) -> list[tuple[str, list[Field]]]:
    return list(shell.scope.values.items())


def _count(command: Sequence[Field]) -> int:
    return sum(word.text.startswith("--") for word in command)


def _program(words: Sequence[Field]) -> tuple[int, int]:
    """Where the launcher's arguments end and the program's begin: around its name, a file of Python or a module."""
    texts = [word.text for word in words]
    for place, text in enumerate(texts):
        if text.endswith(".py"):
            return place, place + 1
        if text == "-m" and place + 1 < len(texts) and not texts[place + 1].startswith("torch.distributed"):
            return place, place + 2
    return 0, 0


def read_words(words: Sequence[Field]) -> Given:
    """Arguments from words: a switch has no value, an argument with several words a list of them."""
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    left_out: list[tuple[int, str]] = []
    key: str | None = None
    for word, line in words:
        empty = UNKNOWN.fullmatch(word) is not None and not UNKNOWN.sub("", word)
        if word.startswith("--") and len(word) > 2:
            written, equals, value = word.partition("=")
            key = name_of(readable(written))
            values[key] = typed(value) if equals else True
            lines[key] = line
        elif empty and (key is None or _is_switch(key) or values[key] is not True):
            left_out.append((line, f"{readable(word)} is set nowhere, and is read as empty"))  # as bash does
        elif key is not None:
            held = values[key]
            values[key] = typed(word) if held is True else [*(held if isinstance(held, list) else [held]), typed(word)]
    return Given(values, lines, left_out=tuple(left_out))


def _is_switch(key: str) -> bool:
    if key in IGNORED or key.startswith(IGNORED_PREFIXES):
        return False  # paths and the like, which are not read
    return key not in ARGUMENTS or ARGUMENTS[key].kind is Kind.SWITCH


def _slurm(shell: Shell, values: Mapping[str, Any]) -> dict[str, int]:
    """Nodes and processes of a batch script's directives, where the launcher does not say them."""
    held = {key: shell.scope.values[key][0].text for key in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE") if key in shell.scope.values}
    if values.get("nproc_per_node") is not None or len(held) < 2 or not all(text.isdigit() for text in held.values()):
        return {}
    if "world_size" in values:
        return {}
    return {"nnodes": int(held["SLURM_NNODES"]), "nproc_per_node": int(held["SLURM_NTASKS_PER_NODE"])}
