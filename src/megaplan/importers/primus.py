"""Configurations of Primus: modules, each of a framework, that build on files of its own tree.

Sources: `primus/core/launcher/parser.py` and `primus/configs` of AMD-AGI/Primus.
"""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.importers.megatron.arguments import typed
from megaplan.importers.megatron.unset import unset
from megaplan.spec.document import Document, parse_document
from megaplan.spec.read import read_text

MARK = re.compile(r"^modules:\s*(?:#.*)?\n(?:.*\n)*?\s+framework:", re.MULTILINE)
"""Unparsed text of a configuration."""
_INTERPOLATED = re.compile(r"\$\{([\w.]+)(?::([^}]*))?\}")
_TREE = Path("primus/configs")
"""Folder of the files that Primus's own files name, in its repository."""
_MOST_FILES = 32
_LOGGING = ("sink_level", "file_sink_level", "stderr_sink_level", "trainable", "framework")
_READ = ("megatron", "torchtitan", "maxtext")
"""Frameworks whose files an import of their name reads."""


class Module(NamedTuple):
    """The module that trains.

    Attributes:
        name: Key of `modules`.
        model: The file of its model.
        values: Values of the files that it names, with its overrides.
        own: Keys that it overrides.
        section: Dotted key of those.
    """

    name: str
    model: Any
    values: dict[str, Any]
    own: frozenset[str]
    section: str


def modules_of(document: Any) -> dict[str, Mapping[str, Any]]:
    """Modules with a framework, by name; empty for a file that is not Primus's."""
    held = document.get("modules") if isinstance(document, dict) else None
    parts = held.items() if isinstance(held, dict) else ()
    return {str(key): part for key, part in parts if isinstance(part, dict) and "framework" in part}


def read_module(document: Document, name: str, framework: str, environment: Mapping[str, str] | None = None) -> Module:
    """The module that trains, with the values of the files that it names.

    Args:
        document: The configuration.
        name: Name of the file, whose folders have Primus's tree above them.
        framework: The framework whose files are read.
        environment: Environment variables of the launch.

    Raises:
        MegaplanError: MP926, it runs another framework, or names a file that is not in a folder above.
    """
    (module, part), *_ = modules_of(document.value).items()
    stated = str(part.get("framework"))
    if stated != framework:
        detail = f"modules.{module}.framework = {stated}, and Primus's files of {framework} are read"
        raise MegaplanError([diagnostic("MP926", detail, document.source.locate(f"modules.{module}.framework"), (_hint(stated, name),))])
    values: dict[str, Any] = {}
    for kind, key in (("modules", "config"), ("models", "model")):
        file, at = filled(part.get(key), environment or {}), document.source.locate(f"modules.{module}.{key}")
        values = _over(values, _of_file(_found(Path(kind, framework, str(file)), name, at, str(part.get("model")))))
    prefix = next((key for key in ("overrides", "params") if isinstance(part.get(key), dict)), "overrides")
    own = part.get(prefix) or {}
    values = {key: value for key, value in _over(values, own).items() if key not in _LOGGING}
    return Module(module, part.get("model"), filled(values, environment or {}), frozenset(own), f"modules.{module}.{prefix}")


def filled(value: Any, environment: Mapping[str, str]) -> Any:
    """A value with variables replaced: by the environment's, by its default, or by the mark of one that is set nowhere."""
    if isinstance(value, dict):
        return {key: filled(each, environment) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, environment) for each in value]
    if not isinstance(value, str):
        return value

    def given(found: re.Match[str]) -> str:
        return environment.get(found[1], unset(found[1]) if found[2] in (None, "??") else found[2])

    return typed(_INTERPOLATED.sub(given, value))


def _hint(framework: str, name: str) -> str:
    if framework in _READ:
        return f"megaplan import {framework} {shlex.quote(name)}"
    if framework == "megatron_bridge":
        return "megaplan import megatron run_config.yaml   # the configuration that a run of Megatron-Bridge writes"
    return "megaplan estimate MODEL --gpus 8"


def _found(file: Path, name: str, at: Location, model: str) -> Path:
    """A file of Primus's tree above the configuration."""
    paths = [folder / _TREE / file for folder in Path(os.path.abspath(name)).parents]
    path = next((path for path in paths if os.path.isfile(path)), None)
    if path is None:
        detail = f"{at.key} = {file.name}, and no folder above {name} has {_TREE / file}"
        copy = f"megaplan import {file.parts[1]} Primus/examples/{Path(name).name}   # the file inside Primus's tree, which has {model}"
        raise MegaplanError([diagnostic("MP926", detail, at, (copy,))])
    return path


def _over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with values overridden by another, section by section."""
    both = {key: _over(below[key], value) for key, value in above.items() if isinstance(value, dict) and isinstance(below.get(key), dict)}
    return {**below, **above, **both}


def _of_file(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Values of a file, overriding those of the files that it extends."""
    if path in above or len(above) > _MOST_FILES or not os.path.isfile(path):
        return {}
    held = parse_document(read_text(str(path)), str(path)).value
    if not isinstance(held, dict):
        return {}
    values: dict[str, Any] = {}
    for base in held.get("extends") or held.get("includes") or held.get("bases") or ():
        values = _over(values, _of_file((path.parent / str(base)).resolve(), (*above, path)))
    return _over(values, {key: value for key, value in held.items() if key not in ("extends", "includes", "bases")})
