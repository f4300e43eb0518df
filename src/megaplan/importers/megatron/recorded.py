"""Launch arguments from a recording: of the launch with the most arguments, and notes about everything else that the script did."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.hosts.megatron.argument import Kind, flag
from megaplan.hosts.megatron.vocabulary import ARGUMENTS
from megaplan.importers.megatron.arguments import Given
from megaplan.importers.megatron.deepspeed import with_config
from megaplan.importers.megatron.recording.names import SHELLS
from megaplan.importers.megatron.script import Field, read_command, read_words
from megaplan.importers.megatron.unset import remedies, unset

if TYPE_CHECKING:
    from megaplan.importers.megatron.recording.rows import Recording, RecordLine

_OF_RECORDER = re.compile(r"__megaplan_|megaplan-stub|^\++ return\b")
"""Lines of a script's trace that are of its recorder."""
_OF_A_LINE = re.compile(r"-[a-z]*c")
"""Options of a shell with which its next word is a command line."""
LAUNCH_ARGUMENTS = 8
"""Number of arguments from which a command counts as one of several launches."""


def read_recording(recording: Recording, name: str, number: int | None = None) -> Given:
    """The arguments of a recorded launch.

    Args:
        recording: The recorded commands.
        name: Name of the script in diagnostics.
        number: Number of the launch, from 1; None for the one with most arguments.

    Raises:
        MegaplanError: MP923 if there is no launch, or none with that number.
    """
    launches = _launches(recording)
    if number is not None and not 1 <= number <= len(launches):
        raise _nothing(recording, name, f"--launch {number}, and launches recorded: {len(launches)}")
    if not launches:
        return _of_variables(recording, name)
    row = launches[number - 1] if number else max(launches, key=lambda each: (_count(each), launches.index(each)))
    line = row.line or 0
    places = row.lines or (line,) * len(row.words)
    given = read_command([Field(word, at) for word, at in zip(row.words, places, strict=True)], row.environment)
    values = {
        key: value for key, value in given.values.items() if value is not True or key not in ("nnodes", "nproc_per_node", "world_size")
    }
    values |= _processes(row.environment, values)
    lines = {key: at for key, at in given.lines.items() if at} if row.file == name else {}
    left_out = (*_several(launches, row), *given.left_out, *_notes(recording))
    values = with_config(_with_unset(values, row, recording), name, row.files)
    return Given(values, lines, dict(row.environment), left_out, program=given.program)


def unset_names(recording: Recording) -> list[str]:
    """Variables that the scripts read and that were never set."""
    return sorted({name for row in recording.of_kind("unset") for name in row.words})


def _launches(recording: Recording) -> list[RecordLine]:
    """Distinct launches, the first of each; a command with few arguments does not count if another has more."""
    rows = {row.words: (at, row) for at, row in reversed(list(enumerate(map(_in_words, recording.of_kind("launch"))))) if _count(row)}
    found = [row for _, row in sorted(rows.values(), key=lambda pair: pair[0])]
    most = max(map(_count, found), default=0)
    return [row for row in found if _count(row) >= min(most, LAUNCH_ARGUMENTS)]


def _in_words(row: RecordLine) -> RecordLine:
    """The launch with the words of the command that it gives to a shell, `deepspeed --no_python bash -c "python pretrain_gpt.py …"`."""
    place = next(
        (at for at, word in enumerate(row.words[:-2]) if word.rpartition("/")[2] in SHELLS and _OF_A_LINE.fullmatch(row.words[at + 1])),
        None,
    )
    if place is None:
        return row
    read = shlex.shlex(row.words[place + 2], posix=True, punctuation_chars=";&|")
    read.whitespace_split, read.commenters = True, ""
    try:
        words = list(read)
    except ValueError:  # an open quote
        return row
    ends = [-1, *(at for at, word in enumerate(words) if set(word) <= set(";&|")), len(words)]
    inner = max(
        (words[start + 1 : end] for start, end in pairwise(ends)), key=lambda command: sum(word.startswith("--") for word in command)
    )
    lines = (*row.lines[:place], *[row.lines[place + 2]] * len(inner)) if row.lines else ()
    return replace(row, words=(*row.words[:place], *inner), lines=lines)


def _count(row: RecordLine) -> int:
    return sum(word.startswith("--") for word in row.words)


def _of_variables(recording: Recording, name: str) -> Given:
    """Arguments in the variables of a file that another script sources.

    Raises:
        MegaplanError: MP923 if there are no arguments.
    """
    found = {row.words[0]: row.words[1:] for row in recording.of_kind("variable")}
    if recording.status != 0 or sum(map(_count, recording.of_kind("variable"))) < LAUNCH_ARGUMENTS:
        raise _nothing(recording, name, "no launch was recorded")
    given = read_words([Field(word, 0) for words in found.values() for word in words])
    note = f"no command is launched: the arguments are those of {', '.join(found)}"
    return Given(given.values, environment={}, left_out=((0, note), *_notes(recording)))


def _nothing(recording: Recording, name: str, why: str) -> MegaplanError:
    last = [line for line in recording.said.splitlines() if line.strip() and not _OF_RECORDER.search(line)][-3:]
    ended = recording.ended or f"it ended with status {recording.status}"
    said = "\n".join([f"{name}: {why}; {ended}", *last, *(note for _, note in _notes(recording, ended=False))])
    hints = remedies(unset_names(recording)[:6], name)
    return MegaplanError([diagnostic("MP923", said, Location(name), hints)])


def _processes(environment: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, int]:
    """Nodes and processes from MPI's launcher or Slurm's variables, if no launcher of torch states them."""
    if values.get("nproc_per_node") is not None or "world_size" in values:
        return {}
    tasks, nodes, each = (environment.get(key, "") for key in ("MEGAPLAN_TASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"))
    if tasks.isdigit():
        return {"world_size": int(tasks)}
    if nodes.isdigit() and each.isdigit():
        return {"nnodes": int(nodes), "nproc_per_node": int(each)}
    total = environment.get("SLURM_NTASKS", "")
    return {"world_size": int(total)} if total.isdigit() else {}


def _with_unset(values: Mapping[str, Any], row: RecordLine, recording: Recording) -> dict[str, Any]:
    """The values; an argument whose variable is set nowhere has the variable's name as its value."""
    found, missing = dict(values), unset_names(recording)
    try:
        text = Path(row.file).read_text(encoding="utf-8", errors="replace") if missing and row.file else ""
    except OSError:
        text = ""
    for key, value in values.items():
        if value is True and key in ARGUMENTS and ARGUMENTS[key].kind is not Kind.SWITCH:
            match = re.search(rf"{re.escape(flag(key))}[= ]+\"?\$\{{?(\w+)", text)
            if match is not None and match[1] in missing:
                found[key] = unset(match[1])
    return found


def _several(launches: Sequence[RecordLine], row: RecordLine) -> Iterator[tuple[int, str]]:
    if len(launches) > 1:
        at = launches.index(row) + 1
        listed = "\n".join(f"--launch {number}: {shlex.join(each.words)[:100]}" for number, each in enumerate(launches[:8], 1))
        yield row.line or 0, f"{len(launches)} launches were recorded, and number {at} is read\n{listed}"


def _notes(recording: Recording, *, ended: bool = True) -> Iterator[tuple[int, str]]:
    """Notes about what the script did in addition to its launch."""
    for row in recording.of_kind("absent"):
        yield row.line or 0, f"{row.words[0]} does not exist"
    for row in recording.of_kind("failed"):
        yield row.line or 0, f"{shlex.join(row.words)[:80]} failed: {row.said}"
    for row in recording.of_kind("answered")[:1]:
        yield row.line or 0, f"{row.words[0]} was answered with {row.said}"
    tried = Counter(row.words[0].rpartition("/")[2] for row in recording.of_kind("other") if row.words)
    if tried:
        yield 0, "not run: " + ", ".join(f"{word} ({times} times)" if times > 1 else word for word, times in sorted(tried.items()))
    if names := unset_names(recording):
        yield 0, f"set nowhere, and empty: {', '.join(names)}"
    if ended and (recording.ended or recording.status):
        said = recording.said.strip().rpartition("\n")[2][:200]
        yield 0, f"after the launch {recording.ended or f'the script ended with status {recording.status}'}" + (f": {said}" if said else "")
