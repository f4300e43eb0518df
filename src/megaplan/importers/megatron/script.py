"""Launch arguments from words: arguments of a launcher and of its program."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megaplan.hosts.megatron.argument import Kind
from megaplan.hosts.megatron.not_carried import IGNORED, IGNORED_PREFIXES
from megaplan.hosts.megatron.vocabulary import ARGUMENTS
from megaplan.importers.megatron.arguments import Given, name_of, typed
from megaplan.importers.megatron.unset import UNSET, readable, unset

VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}$`'\"]*))?\}|\$([A-Za-z_]\w*)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
OF_LAUNCHER = {"nnodes": "nnodes", "nproc_per_node": "nproc_per_node", "num_nodes": "nnodes", "num_gpus": "nproc_per_node"}
"""Arguments before the program's name that count processes, of torchrun and of deepspeed."""


class Field(NamedTuple):
    """A word and its line."""

    text: str
    line: int


def read_command(words: Sequence[Field], environment: Mapping[str, str]) -> Given:
    """The arguments of a launcher and its program."""
    stop, start = _program([word.text for word in words])
    launcher, program = read_words(words[:stop]), read_words(words[start:])
    values = {OF_LAUNCHER[key]: value for key, value in launcher.values.items() if key in OF_LAUNCHER}
    values = _included(launcher.values.get("include")) | values | program.values
    lines = {OF_LAUNCHER.get(key, key): line for key, line in launcher.lines.items()} | program.lines
    assigned = dict(word.text.split("=", 1) for word in words[:stop] if _ASSIGNMENT.match(word.text))
    return Given(values, lines, {**environment, **assigned}, program.left_out, program=words[start - 1].text if start else "")


def _included(text: Any) -> dict[str, int]:
    """Nodes and processes that deepspeed's `--include` names, `host:0,1@other:0,1`, if every node has the same number."""
    slots = [part.rpartition(":")[2].count(",") + 1 for part in str(text).split("@") if ":" in part]
    whole = isinstance(text, str) and len(slots) == text.count("@") + 1 and len(set(slots)) == 1
    return {"nnodes": len(slots), "nproc_per_node": slots[0]} if whole else {}


def read_words(words: Sequence[Field]) -> Given:
    """Arguments from words: a switch has no value, an argument with several words a list of them."""
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    empty: dict[str, int] = {}
    key: str | None = None
    for word, line in words:
        lacks = not UNSET.sub("", word)
        if word.startswith("--") and len(word) > 2:
            written, equals, value = word.partition("=")
            key = name_of(readable(written))
            values[key] = typed(value) if equals else True
            lines[key] = line
        elif lacks and (key is None or _is_switch(key) or values[key] is not True):
            if word:
                empty |= {readable(word): line}  # as bash does
        elif key is not None:
            held = values[key]
            values[key] = typed(word) if held is True else [*(held if isinstance(held, list) else [held]), typed(word)]
    said = f"{', '.join(empty)} {'is' if len(empty) == 1 else 'are'} set nowhere, and read as empty"
    return Given(values, lines, left_out=((next(iter(empty.values())), said),) if empty else ())


def substituted(text: str, variables: Mapping[str, Any]) -> str:
    """A text with its variables replaced by their values; unset variables stay as placeholders."""

    def found(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return str(variables[name]) if name in variables else match[2] if match[2] is not None else unset(name)

    return VARIABLE.sub(found, text)


def _program(words: Sequence[str]) -> tuple[int, int]:
    """Positions of the end of the launcher's arguments and the start of the program's: around its name, a Python file or a module."""
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return place, place + 1
        if word == "-m" and place + 1 < len(words) and not words[place + 1].startswith("torch.distributed"):
            return place, place + 2
    return 0, 0


def _is_switch(key: str) -> bool:
    if key in ARGUMENTS:
        return ARGUMENTS[key].kind is Kind.SWITCH
    return key not in IGNORED and not key.startswith(IGNORED_PREFIXES)  # other arguments are paths and the like, which are not read
