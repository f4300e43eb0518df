"""Launch arguments from a text: arguments alone, or a script, which is followed without running anything."""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.hosts.megatron.argument import flag
from megaplan.hosts.megatron.vocabulary import ARGUMENTS
from megaplan.importers.megatron.arguments import Given, changes_nothing
from megaplan.importers.megatron.meant import RENAMED, decides_a_tensor
from megaplan.importers.megatron.recorded import read_recording
from megaplan.importers.megatron.script import OF_LAUNCHER, Field, read_words
from megaplan.importers.megatron.shell.builtins import OF_NODES
from megaplan.importers.megatron.shell.follow import Shell
from megaplan.importers.megatron.shell.scan import NeedsBashError
from megaplan.importers.megatron.unset import UNSET, required, unset
from megaplan.scalars import MAX_INT
from megaplan.spec.host import NODE
from megaplan.spec.read import STDIN_NAME

PROCESSES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "SLURM_NPROCS")
"""Variables in which a cluster's launcher puts the number of processes."""
NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", OF_NODES, "PET_NNODES")
"""Variables with the number of nodes."""
MOST_CONDITIONS = 12
"""Most conditions whose other outcome is followed too."""
_BLANK = re.compile(r"(?<![<\w])<([A-Za-z][\w./ -]*)>(?=[\s\"'/]|$)")
"""A place that a template leaves for a path, `<PATH TO DATA>`; a variable that nothing sets, and to a shell redirections."""
_TAKES_ALL = re.compile(r"\$[@*#]|\$\{[@*#]|\bshift\b|\bgetopts\b")


def read_script(text: str, name: str, environment: Mapping[str, str], argv: Sequence[str], number: int | None = None) -> Given:
    """The arguments of a text.

    Args:
        text: A script, or arguments alone.
        name: Name of the text in diagnostics.
        environment: Environment variables of the script.
        argv: The script's arguments; those that the script does not use are added to its launch.
        number: Number of the launch among several, from 1; None for the one with most arguments.

    Raises:
        MegaplanError: MP922 if only bash can read it; MP923 if it launches nothing; MP916 if arguments are truncated.
    """
    if _first(text).startswith("--") or not text:
        alone = read_words([*_alone(text, name), *(Field(word, 0) for word in argv)])
        return Given(alone.values, alone.lines, dict(environment), alone.left_out)
    text = _BLANK.sub(lambda found: f"${{{re.sub(r'[^A-Za-z0-9]', '_', found[1])}}}", text)
    own, added = _own(text, argv)
    folder = Path(name).parent if name != STDIN_NAME else None
    script = _Script(text, name, environment, own, folder)
    file = "launch.sh" if name == STDIN_NAME else name
    given = [word for pair in environment.items() for word in ("--env", "=".join(pair))]
    again = shlex.join(["megaplan", "import", "megatron", "--record", *given, "--", "bash", file, *argv])
    try:
        found, errors = script.read(number)
    except NeedsBashError as error:
        detail = f"{name} has {error.what}, which only bash can evaluate"
        raise MegaplanError([diagnostic("MP922", detail, Location(name, error.line), (again,))]) from None
    except MegaplanError as error:
        raise MegaplanError([replace(each, hints=(*each.hints, again)) for each in error.diagnostics]) from None
    if errors:
        raise MegaplanError([replace(each, hints=(again,)) for each in errors])
    more = read_words([Field(word, 0) for word in added])
    return replace(found, values={**found.values, **more.values})


_FILE_TEST = re.compile(r"!? *-[defrsx] ")
_OF_TOKENIZER = frozenset({"vocab_size", "padded_vocab_size", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"})
"""Arguments that a script chooses by a tokenizer's file: without the file here, the way without it is taken."""


class _Script:
    """A script with its arguments and variables."""

    def __init__(self, text: str, name: str, environment: Mapping[str, str], argv: Sequence[str], folder: Path | None) -> None:
        self._text, self._name, self._environment, self._argv, self._folder = text, name, environment, argv, folder

    def _follow(self, decisions: Mapping[int, bool]) -> Shell:
        shell = Shell(self._name, self._environment, self._argv, self._folder, decisions)
        shell.follow(self._text)
        return shell

    def read(self, number: int | None) -> tuple[Given, list[Diagnostic]]:
        """The launch, with notes on conditions of unknown outcome, and errors if they decide a tensor."""
        decisions: dict[int, bool] = {}
        shell = self._follow(decisions)
        lacking: dict[str, None] = {}
        while not shell.launches and shell.ended and (found := self._required(shell, lacking)):
            lacking |= dict.fromkeys(found)
            shell = self._follow(decisions)
        for place in reversed(range(min(len(shell.undecided), MOST_CONDITIONS)) if not shell.launches else ()):
            if (other := self._follow({place: True})).launches:
                shell, decisions = other, {place: True}
                break
        given = read_recording(shell.recording(), self._name, number)
        if counts := self._of_cluster(given.values):
            self._environment = {**self._environment, **counts}
            again, wrong = self.read(number)
            notes = [(0, f"only the cluster sets {name}; it is read as {size}; --env {name}=… sets it") for name, size in counts.items()]
            return replace(again, left_out=(*again.left_out, *notes)), wrong
        notes, errors = _assumed(shell, lacking), list[Diagnostic]()
        for place, condition in enumerate(shell.undecided[:MOST_CONDITIONS]):
            keys = self._changed({**decisions, place: not decisions.get(place, False)}, given, number)
            outcome = "holds" if decisions.get(place, False) else "does not hold"
            of_a_file = _FILE_TEST.match(condition.text) is not None
            if keys and all(_changes_no_tensor(key, value) or (of_a_file and key in _OF_TOKENIZER) for key, value in keys.items()):
                said = f"{condition.text} is not known; the reading assumes that it {outcome}; it decides {', '.join(map(flag, keys))}"
                notes.append((condition.line, said))
            elif keys:
                said = (
                    f"{self._name} decides {', '.join(map(flag, list(keys)[:8]))} by {condition.text!r}, which is known only when "
                    "the script runs"
                )
                errors.append(diagnostic("MP922", said, Location(self._name, condition.line)))
        return replace(given, left_out=(*given.left_out, *notes)), errors

    def _of_cluster(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Counts of processes and nodes that are set nowhere and decide other arguments: the least that the degrees need.

        A variable that alone is `--nnodes` is the number of nodes, whatever its name.
        """
        others = _texts({key: value for key, value in values.items() if key != "nnodes"})
        given = str(values.get("nnodes"))
        nodes = [*NODES, *(UNSET.findall(given) if UNSET.fullmatch(given) else ())]
        sizes = {**dict.fromkeys(PROCESSES, _least_ranks(values)), **dict.fromkeys(nodes, _least_nodes(values))}
        return {name: str(size) for name, size in sizes.items() if name not in self._environment and unset(name) in others}

    def _required(self, shell: Shell, known: Collection[str]) -> list[str]:
        """Variables and arguments that the script requires: those of its last condition, set from now on."""
        asked = re.search(r"\$\{?#\}?\W{0,3}-(?:(ne|lt|eq)|le) +(\d)", self._text)
        if asked is not None and not self._argv:
            count = int(asked[2]) + (asked[1] is None or asked[2] == "0")
            self._argv = [required(str(place)) for place in range(1, count + 1)]
            return [f"${place}" for place in range(1, count + 1)]
        found = [name for name in shell.demanded if name not in known and len(known) < MOST_CONDITIONS]
        self._environment = {**self._environment, **{name: required(name) for name in found if not name.isdecimal()}}
        return [name for name in found if not name.isdecimal()]

    def _changed(self, decisions: Mapping[int, bool], given: Given, number: int | None) -> dict[str, Any]:
        """Arguments that have another value with other decisions, and one of the values; none if nothing is launched then."""
        try:
            shell = self._follow(decisions)
            other = read_recording(shell.recording(), self._name, number).values if shell.launches else given.values
        except (MegaplanError, NeedsBashError):
            return {}
        values = {**other, **given.values}
        return {key: value for key, value in values.items() if given.values.get(key) != other.get(key) and not changes_nothing(key)}


def _assumed(shell: Shell, lacking: Collection[str]) -> list[tuple[int, str]]:
    """Notes on the machine and on assumed variables and arguments."""
    gpus = f"the script asks for the GPUs of its machine, taken to be {NODE}, one node; --gpus N states those of the job"
    given = f"the script ends without {', '.join(lacking)}; the reading assumes that they are given"
    elsewhere = [(0, f"{name} is a path on another machine; {path} is read instead") for name, path in shell.elsewhere.items()]
    return [*((0, said) for said, holds in ((gpus, shell.lists_gpus), (given, lacking)) if holds), *elsewhere]


def _texts(values: Mapping[str, Any]) -> str:
    return " ".join(str(each) for value in values.values() for each in (value if isinstance(value, list) else [value]))


def _least_ranks(values: Mapping[str, Any]) -> int:
    """The smallest number of processes, in whole nodes, that the degrees of a launch need."""
    return -(-_ranks(values) // NODE) * NODE


def _least_nodes(values: Mapping[str, Any]) -> int:
    """The fewest nodes that the degrees of a launch need."""
    each = values.get("nproc_per_node")
    return -(-_ranks(values) // (each if isinstance(each, int) and each > 0 else NODE))


def _ranks(values: Mapping[str, Any]) -> int:
    """The fewest processes that the degrees of a launch need."""

    def ranks(*axes: str) -> int:
        degrees = [values.get(f"{axis}_parallel_size", 1) for axis in ("pipeline_model", *axes)]
        return prod(degree for degree in degrees if isinstance(degree, int) and 0 < degree <= MAX_INT)

    return max(ranks("tensor_model", "context"), ranks("expert_model", "expert_tensor"))


def _changes_no_tensor(key: str, value: Any) -> bool:
    """True for an argument that only affects training, for counts of processes, which `--gpus` states, and for one that is not read."""
    if key in OF_LAUNCHER.values() or key == "world_size":
        return True
    key = RENAMED.get(key, key)
    return ARGUMENTS[key].key.startswith("training.") if key in ARGUMENTS else not decides_a_tensor(key, value)


def _own(text: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of the script, and those that are added to its launch."""
    if _TAKES_ALL.search(text):
        return list(argv), []
    first = next((place for place, word in enumerate(argv) if word.startswith("--")), len(argv))
    return list(argv[:first]), list(argv[first:])


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
