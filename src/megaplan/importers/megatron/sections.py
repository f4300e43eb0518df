"""Launch arguments from YAML that parts them into sections: FlagScale's, and Primus's, which builds on files of its own tree.

Sources: `flagscale/runner/utils.py` of FlagOpen/FlagScale; `primus/core/launcher/parser.py` and `primus/configs` of AMD-AGI/Primus.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.importers.megatron.arguments import Given, name_of, typed
from megaplan.importers.megatron.log import from_attributes
from megaplan.importers.megatron.unset import unset
from megaplan.spec.document import Document, parse_document
from megaplan.spec.read import read_text

_SIZES = frozenset({"num_layers", "hidden_size"})
_INTERPOLATED = re.compile(r"\$\{([\w.]+)(?::([^}]*))?\}")
_TREE = Path("primus/configs")
"""Folder of the files that Primus's own files name, in its repository."""
_MEGATRON = "megatron"
_PROGRAMS = {"gpt": "pretrain_gpt.py", "mamba": "pretrain_mamba.py"}
"""Programs of Megatron-LM by Primus's type of a model."""
_MOST_FILES = 32
_LOGGING = ("sink_level", "file_sink_level", "stderr_sink_level", "trainable", "framework")


def in_sections(document: Mapping[str, Any]) -> bool:
    """True if a mapping has the sizes of a model in a section, and not at its top."""
    return not _SIZES & document.keys() and {key for key, _, _ in _leaves(document)} >= _SIZES


def read_sections(document: Document, environment: Mapping[str, str], name: str = "") -> Given:
    """The arguments in all sections; `${name}` of another file is a variable that is set nowhere.

    The program is that of FlagScale's experiments in the folder above which train with this file.
    """
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, value, path in _leaves(document.value):
        argument = name_of(key)
        values[argument] = _filled(value, environment)
        at = document.source.locate(path).line
        lines |= {} if at is None else {argument: at}
    return Given(values, lines, dict(environment), program=_program_of(name))


def is_flagscale(document: Mapping[str, Any]) -> bool:
    """True for an experiment of FlagScale: a task, and the file of its sizes."""
    held = document.get("experiment")
    return isinstance(held, dict) and isinstance(held.get("task"), dict) and _sizes_of(document) is not None


def read_flagscale(document: Document, name: str, environment: Mapping[str, str]) -> Given:
    """The arguments in the file that an experiment trains with, with its program, nodes and processes.

    Raises:
        MegaplanError: MP926, it does not train, or the file is not in the folder `train` next to it.
    """
    whole, sizes = document.value, str(_sizes_of(document.value))
    task, runner = whole["experiment"]["task"], whole["experiment"].get("runner")
    path = Path(name).parent / "train" / f"{sizes}.yaml"
    if task.get("type", "train") != "train" or not path.is_file():
        trains = f"its sizes are in train/{sizes}.yaml, which is not next to {name}"
        detail = trains if task.get("type", "train") == "train" else f"experiment.task.type = {task['type']}, and a spec is of training"
        hint = "megaplan import megatron TRAINING.log   # with Megatron's table of arguments"
        raise MegaplanError([diagnostic("MP926", detail, document.source.locate("experiment.task"), (hint,))])
    inner = parse_document(read_text(str(path)), str(path))
    found = read_sections(inner, environment)
    own = {name_of(key): _filled(value, environment) for key, value, _ in _leaves(whole.get("train") or {})}
    counts = {key: runner[key] for key in ("nnodes", "nproc_per_node") if isinstance(runner, dict) and isinstance(runner.get(key), int)}
    variables = whole["experiment"].get("envs")
    variables = {str(key): str(value) for key, value in variables.items()} if isinstance(variables, dict) else {}
    return Given({**counts, **found.values, **own}, {}, {**variables, **environment}, program=str(task.get("entrypoint") or ""))


def _sizes_of(document: Mapping[str, Any]) -> str | None:
    """The name of the file that an experiment of FlagScale trains with."""
    listed = document.get("defaults")
    named = [one.get("train") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return next((one for one in named if isinstance(one, str) and "/" not in one), None)


def _program_of(name: str) -> str:
    """The program of the experiments of FlagScale that train with a file, else of those in its folder, if there is one alone."""
    path = Path(name)
    if not name or path.parent.name != "train":
        return ""
    programs: dict[bool, set[str]] = {True: set(), False: set()}
    for each in sorted(path.parent.parent.glob("*.yaml"))[:_MOST_FILES]:
        held = parse_document(read_text(str(each)), str(each)).value
        if isinstance(held, dict) and is_flagscale(held):
            programs[_sizes_of(held) == path.stem].add(str(held["experiment"]["task"].get("entrypoint") or ""))
    found = programs[True] or programs[False]
    return found.pop() if len(found) == 1 else ""


def is_primus(document: Mapping[str, Any]) -> bool:
    """True for a configuration of Primus: modules, each of a framework."""
    return bool(_modules(document))


def read_primus(document: Document, name: str, environment: Mapping[str, str]) -> Given:
    """The arguments of the module that trains: the files that it names, and what it overrides.

    Raises:
        MegaplanError: MP926, it runs another framework than Megatron-LM, or names a file that is not in a folder above.
    """
    (module, part), *_ = _modules(document.value).items()
    framework = str(part.get("framework"))
    if framework != _MEGATRON:
        detail = f"modules.{module}.framework = {framework}, and Primus's files of Megatron-LM are read"
        at = document.source.locate(f"modules.{module}.framework")
        raise MegaplanError([diagnostic("MP926", detail, at, ("megaplan estimate MODEL --gpus 8",))])
    values: dict[str, Any] = {}
    for kind, key in (("modules", "config"), ("models", "model")):
        file = _filled(part.get(key), environment)
        values |= _of_file(_found(file, kind, name, document.source.locate(f"modules.{module}.{key}")))
    prefix = next((key for key in ("overrides", "params") if isinstance(part.get(key), dict)), "overrides")
    more = part.get(prefix) or {}
    filled = {key: _filled(value, environment) for key, value in {**values, **more}.items() if key not in _LOGGING}
    known, origin = from_attributes(filled)
    places = {arg: document.source.locate(f"modules.{module}.{prefix}.{key}").line for arg, key in origin.items() if key in more}
    lines = {arg: line for arg, line in places.items() if line is not None}
    program = _PROGRAMS.get(known.pop("model_type", None), "")
    if not program:
        detail = f"model_type = {filled.get('model_type')} in {part.get('model')}, and {', '.join(_PROGRAMS)} are Megatron-LM's"
        at = document.source.locate(f"modules.{module}.model")
        raise MegaplanError([diagnostic("MP926", detail, at, ("megaplan import hf CONFIG.json",))])
    return Given(known, lines, dict(environment), parsed=True, program=program, forked=True)


def _modules(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    held = document.get("modules")
    parts = held.items() if isinstance(held, dict) else ()
    return {str(key): part for key, part in parts if isinstance(part, dict) and "framework" in part}


def _leaves(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Keys, values and dotted paths of everything that is not a section."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield str(key), value, f"{path}{key}"


def _filled(value: Any, environment: Mapping[str, str]) -> Any:
    """A value with variables replaced: by the environment's, by its default, or by the mark of one that is set nowhere."""
    if isinstance(value, list):
        return [_filled(each, environment) for each in value]
    if not isinstance(value, str):
        return value

    def filled(found: re.Match[str]) -> str:
        return environment.get(found[1], unset(found[1]) if found[2] in (None, "??") else found[2])

    return typed(_INTERPOLATED.sub(filled, value))


def _found(file: Any, kind: str, name: str, at: Location) -> Path:
    """The file that a module names, in the tree of Primus above the configuration."""
    folders = [folder / _TREE / kind / _MEGATRON for folder in Path(os.path.abspath(name)).parents]
    path = next((folder / str(file) for folder in folders if (folder / str(file)).is_file()), None)
    if path is None:
        detail = f"{at.key} = {file}, and no folder above {name} has {_TREE / kind / _MEGATRON / str(file)}"
        raise MegaplanError(
            [diagnostic("MP926", detail, at, ("megaplan import megatron TRAINING.log   # with Megatron's table of arguments",))]
        )
    return path


def _of_file(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Values of a file over those of the files that it extends."""
    if path in above or len(above) > _MOST_FILES or not path.is_file():
        return {}
    held = parse_document(read_text(str(path)), str(path)).value
    if not isinstance(held, dict):
        return {}
    values: dict[str, Any] = {}
    for base in held.get("extends") or held.get("includes") or held.get("bases") or ():
        values |= _of_file((path.parent / str(base)).resolve(), (*above, path))
    return values | {key: value for key, value in held.items() if key not in ("extends", "includes", "bases")}
