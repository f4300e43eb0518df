"""`read_job`: a job file of torchtitan with the arguments of its launch, which replace the file's values.

A launch script is followed without running anything, as one of Megatron-LM is. Arguments are those of `torchtitan/config/manager.py`:
`--section.key value`, `--section.key=value`, `--section.switch`, `--section.no-switch`, `--job.config_file`, `--module` and `--config`.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.importers.megatron.arguments import Given
from megaplan.importers.megatron.followed import read_script
from megaplan.importers.megatron.script import OF_LAUNCHER, Field, read_words
from megaplan.importers.megatron.unset import readable, unset_names
from megaplan.importers.torchtitan.config import Launch
from megaplan.importers.torchtitan.keys import DEFAULTS, MOVED
from megaplan.spec.read import STDIN_NAME, display_name, file_of, folders_above, read_text

_STARTS = re.compile(r"^#!\S*(?:/env +)?\S*\b(?:ba|z|da)?sh\b|^[^#\n]*(?:--job[._-]config[._-]file\b|\btitan\w*\.train\b)", re.MULTILINE)
FILE, MODULE, FUNCTION = "job.config_file", "module", "config"
_COUNTS = {*OF_LAUNCHER.values(), "world_size"}
REGISTRY = "config_registry.py"


class Job(NamedTuple):
    """A job file and what its launch states.

    Attributes:
        text: Text of the file.
        name: Name of the file in diagnostics.
        function: Configuration of a Python file; None if the launch names none.
        launch: Settings of the launch.
        gpus: GPUs that the launch starts; None if it does not say.
    """

    text: str
    name: str
    function: str | None
    launch: Launch
    gpus: int | None = None


def read_job(path: str, argv: Sequence[str] = ()) -> Job:
    """The job of a file, or of the launch that a script starts.

    Args:
        path: A job file, or a launch script; `-` for stdin.
        argv: Arguments of the script, or of torchtitan after a job file.

    Raises:
        MegaplanError: MP916: the script's job file is not here, or an argument is set nowhere. Also errors of reading a file, or of
            following a script.
    """
    text, name = read_text(path), display_name(path)
    if name.endswith((".py", ".toml", ".json", ".yaml", ".yml")) or not _STARTS.search(text):
        values = _typed(read_words([Field(word, 0) for word in argv]).values, name)
        return Job(text, name, _text(values.pop(FUNCTION, None)), Launch(values))
    launch = _followed(text, name, argv)
    values = _typed(launch.values, name)
    counts = [value for key in ("nnodes", "nproc_per_node") if isinstance(value := values.get(key), int)]
    whole = values.get("world_size")
    gpus = whole if isinstance(whole, int) else prod(counts) if "nproc_per_node" in values and counts else None
    values = {key: value for key, value in values.items() if key not in _COUNTS}
    file, function = _job_file(values, name), _text(values.get(FUNCTION))
    own = {key: value for key, value in values.items() if key not in (FILE, MODULE, FUNCTION)}
    return Job(read_text(file), display_name(file), function, Launch(own, [said for _, said in launch.left_out]), gpus)


def _followed(text: str, name: str, argv: Sequence[str]) -> Given:
    """The launch that a script starts.

    Raises:
        MegaplanError: The errors of `read_script`; the hint has the command for a job file instead of Megatron's.
    """
    try:
        return read_script(text, name, {}, argv)
    except MegaplanError as error:
        hint = "megaplan import torchtitan JOB.toml -- --section.key value   # the job file of the launch, with the launch's own arguments"
        again = (_ours(each.hints) for each in error.diagnostics)
        found = [
            diagnostic(each.code, each.detail, each.location, own or (hint,)) for each, own in zip(error.diagnostics, again, strict=True)
        ]
        raise MegaplanError(found) from None


def _ours(hints: Sequence[str]) -> tuple[str, ...]:
    """Commands that give a script the arguments that it lacks, for torchtitan."""
    megatron = "megaplan import megatron "
    return tuple(
        f"megaplan import torchtitan {each.removeprefix(megatron)}" for each in hints if each.startswith(megatron) and " -- ARG" in each
    )


def _job_file(values: Mapping[str, Any], name: str) -> str:
    """The file that a launch reads.

    Raises:
        MegaplanError: MP916.
    """
    stated, module = values.get(FILE), values.get(MODULE)
    here = name if name != STDIN_NAME else ""
    found = None
    if isinstance(stated, str):
        found = file_of(stated, here)
    elif isinstance(module, str):
        inside = f"{module.replace('.', '/')}/{REGISTRY}"
        stated = inside
        packages = [
            package / kind for folder in folders_above(here) for package in folder.glob("*titan*") for kind in ("models", "experiments")
        ]
        found = next((str(file) for each in packages if os.path.isfile(file := each / inside)), None) or file_of(inside, here)
    if found is not None:
        return found
    detail = f"{name} starts no job" if stated is None else f"{name} reads {stated}, which is not here"
    own = [f"--{key} {shlex.quote(str(value))}" for key, value in values.items() if key not in (FILE, MODULE)]
    named = Path(str(stated or "JOB.toml")).name
    hint = shlex.join(["megaplan", "import", "torchtitan", named]) + (f" -- {' '.join(own)}" if own else "")
    raise MegaplanError([diagnostic("MP916", detail, Location(name), (f"{hint}   # with the path of that file here",))])


def _typed(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Values by torchtitan's keys.

    Raises:
        MegaplanError: MP916 for an argument without a value, or whose variable is set nowhere.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        section, dot, switch = key.rpartition(".")
        if isinstance(value, str) and (names := unset_names(value)) and (key in (FILE, MODULE, FUNCTION) or _is_key(key)):
            detail = f"--{key} {readable(value)}: {', '.join(names)} is set nowhere"
            hint = f"{names[0]}=… in the script, or megaplan import torchtitan JOB.toml -- --{key} …"
            raise MegaplanError([diagnostic("MP916", detail, Location(name, key=key), (hint,))])
        if value is True and key in (FILE, MODULE, FUNCTION):
            hint = f"megaplan import torchtitan JOB.toml   # with the file of --{key}"
            raise MegaplanError(
                [diagnostic("MP916", f"--{key} has no value: its variable is set nowhere", Location(name, key=key), (hint,))]
            )
        off = f"{section}{dot}{switch.removeprefix('no_')}"
        if value is True and off != key and _is_key(off):
            found[off] = False
        else:
            found[FILE if key == "job_config_file" else key] = value
    return found


def _is_key(key: str) -> bool:
    return key in DEFAULTS or key in MOVED


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
