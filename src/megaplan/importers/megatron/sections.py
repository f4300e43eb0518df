"""Launch arguments from YAML with sections: FlagScale's, and Primus's, which builds on files of its own tree.

Source: `flagscale/runner/utils.py` of FlagOpen/FlagScale.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import MegaplanError
from megaplan.importers.megatron.arguments import Given, name_of
from megaplan.importers.megatron.log import from_attributes
from megaplan.importers.primus import filled, read_module
from megaplan.spec.document import Document, parse_document
from megaplan.spec.read import read_text

_SIZES = frozenset({"num_layers", "hidden_size"})
_PROGRAMS = {"gpt": "pretrain_gpt.py", "mamba": "pretrain_mamba.py"}
"""Programs of Megatron-LM by Primus's type of a model."""
_MOST_FILES = 32


def in_sections(document: Mapping[str, Any]) -> bool:
    """True if a mapping has the sizes of a model in a section, and not at its top."""
    return not _SIZES & document.keys() and {key for key, _, _ in _leaves(document)} >= _SIZES


def read_sections(document: Document, environment: Mapping[str, str], name: str = "") -> Given:
    """The arguments in all sections; `${name}` of another file is a variable that is set nowhere.

    A name is the argument's or, as in a `--yaml-cfg` file, the parser attribute's. The program is taken from FlagScale's experiments in the
    parent folder that train with this file.
    """
    leaves = {name_of(key): (filled(value, environment), path) for key, value, path in _leaves(document.value)}
    values, origin = from_attributes({key: value for key, (value, _) in leaves.items()})
    places = {argument: document.source.locate(leaves[key][1]).line for argument, key in origin.items()}
    lines = {argument: line for argument, line in places.items() if line is not None}
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
    if task.get("type", "train") != "train" or not os.path.isfile(path):
        trains = f"its sizes are in train/{sizes}.yaml, which is not next to {name}"
        detail = trains if task.get("type", "train") == "train" else f"experiment.task.type = {task['type']}, and a spec is of training"
        hint = "megaplan import megatron TRAINING.log   # with Megatron's table of arguments"
        raise MegaplanError([diagnostic("MP926", detail, document.source.locate("experiment.task"), (hint,))])
    inner = parse_document(read_text(str(path)), str(path))
    found = read_sections(inner, environment)
    own = {name_of(key): filled(value, environment) for key, value, _ in _leaves(whole.get("train") or {})}
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
    """The program of FlagScale's experiments that train with a file, else of the experiments in its folder, if it is unique."""
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


def read_primus(document: Document, name: str, environment: Mapping[str, str]) -> Given:
    """The arguments of the training module: from the files that it names, with its overrides.

    Raises:
        MegaplanError: MP926, it runs another framework than Megatron-LM, or names a file that is not in a folder above.
    """
    module = read_module(document, name, "megatron", environment)
    known, origin = from_attributes(module.values)
    places = {arg: document.source.locate(f"{module.section}.{key}").line for arg, key in origin.items() if key in module.own}
    lines = {arg: line for arg, line in places.items() if line is not None}
    program = _PROGRAMS.get(known.pop("model_type", None), "")
    if not program:
        detail = f"model_type = {module.values.get('model_type')} in {module.model}, and {', '.join(_PROGRAMS)} are Megatron-LM's"
        at = document.source.locate(f"modules.{module.name}.model")
        raise MegaplanError([diagnostic("MP926", detail, at, ("megaplan import hf CONFIG.json",))])
    return Given(known, lines, dict(environment), parsed=True, program=program, forked=True)


def _leaves(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Keys, values and dotted paths of everything that is not a section."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield str(key), value, f"{path}{key}"
