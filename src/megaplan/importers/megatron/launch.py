"""A launch in any of its common forms: a script, arguments, YAML, a log's table of arguments, Megatron-Bridge's configuration."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.importers.megatron.arguments import Given, name_of, typed
from megaplan.importers.megatron.bridge import is_bridge, read_bridge, refuse_override
from megaplan.importers.megatron.followed import read_script
from megaplan.importers.megatron.log import from_attributes, has_table, read_table
from megaplan.importers.megatron.other_yaml import is_nemo, is_neox, read_nemo, read_neox
from megaplan.importers.megatron.script import OF_LAUNCHER, Field, read_words, substituted
from megaplan.importers.megatron.sections import in_sections, is_flagscale, read_flagscale, read_primus, read_sections
from megaplan.importers.megatron.unset import unset_names
from megaplan.importers.primus import modules_of
from megaplan.spec.document import Document, parse_document
from megaplan.spec.read import display_name, file_of, read_text

_YAML_KEY = re.compile(r"^\s*(?:-{0,2})[A-Za-z_][\w.-]*:(\s|$)|^\s*\{")
_FENCE = re.compile(r"^\s*```\w*[ \t]*$", re.MULTILINE)
TWICE = "MP110"
"""Error for a key that occurs twice; YAML readers of launches take the last."""
_SECTIONS = ("MODEL_ARGS", "ENV_VARS")


def read_given(
    text: str, name: str, environment: Mapping[str, str] | None = None, argv: Sequence[str] = (), number: int | None = None
) -> Given:
    """The arguments of a launch.

    Args:
        text: A script or words of one, YAML or JSON of arguments or of Megatron-Bridge's sections, or a log.
        name: Name of the file in diagnostics.
        environment: Environment variables of the launch.
        argv: Arguments of the script; with other forms they replace the text's own.
        number: Number of a script's launch among several, from 1.

    Raises:
        MegaplanError: MP916: the text has another format.
    """
    environment = environment or {}
    text = _FENCE.sub("", text)  # of a pasted issue
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if has_table(text):
        return _with(read_table(text), argv)
    if lines and (_YAML_KEY.match(lines[0]) or lines[0].strip() == "---"):
        return _with(_yaml(text, name, environment), argv)
    return read_script(text, name, environment, argv, number)


def with_yaml_cfg(given: Given, name: str) -> Given:
    """The launch with the arguments in the file of `--yaml-cfg`, which Megatron-LM takes in the place of all others, if the file is here.

    Source: `megatron/training/initialize.py` of NVIDIA/Megatron-LM.
    """
    path = given.values.get("yaml_cfg")
    found = file_of(path, name) if isinstance(path, str) and not unset_names(path) else None
    if found is None:
        return given
    inner = _yaml(read_text(found), found, given.environment)
    of_job = {key: value for key, value in given.values.items() if key in (*OF_LAUNCHER.values(), "world_size")}
    said = (0, f"the arguments are those of {display_name(found)}, which --yaml-cfg puts in the place of all others")
    return replace(given, values={**of_job, **inner.values}, lines={}, left_out=(*given.left_out, *inner.left_out, said))


def _with(given: Given, argv: Sequence[str]) -> Given:
    """The launch, with some arguments of the text replaced."""
    if not argv:
        return given
    more = read_words([Field(word, 0) for word in argv])
    return Given({**given.values, **more.values}, given.lines, given.environment, given.left_out, given.parsed)


def _yaml(text: str, name: str, environment: Mapping[str, str]) -> Given:
    document = parse_document(text, name)
    twice = tuple((fault.location.line or 1, f"{fault.detail}; the last is taken") for fault in document.faults if fault.code == TWICE)
    if len(twice) < len(document.faults) or not isinstance(document.value, dict):
        faults = document.faults or (diagnostic("MP916", f"{name} is not a mapping of arguments", Location(name)),)
        raise MegaplanError(faults)
    whole = document.value
    other = _of_other_form(document, name, environment)
    if other is not None:
        return other
    nested = isinstance(whole.get("MODEL_ARGS"), dict)
    values = whole["MODEL_ARGS"] if nested else {key: value for key, value in whole.items() if key not in _SECTIONS}
    found = whole.get("ENV_VARS")
    variables = dict(found) if isinstance(found, dict) else {}
    prefix = "MODEL_ARGS." if nested else ""
    given = {name_of(key): _value(value, {**variables, **environment}) for key, value in values.items()}
    places = {name_of(key): document.source.locate(f"{prefix}{key}").line for key in values}
    arguments, origin = from_attributes(given)
    lines = {argument: line for argument, key in origin.items() if (line := places[key]) is not None}
    return Given(arguments, lines, {**variables, **environment}, twice)


def _of_other_form(document: Document, name: str, environment: Mapping[str, str]) -> Given | None:
    """The launch of YAML that is more than arguments; None for arguments alone.

    Raises:
        MegaplanError: MP926, it is a spec, or overrides a recipe.
    """
    whole = document.value
    if str(whole.get("format")).startswith("megaplan."):
        raise MegaplanError([diagnostic("MP926", f"{name} is a spec of megaplan", Location(name), (f"megaplan estimate {name}",))])
    readers: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[[], Given]], ...] = (
        (is_neox, lambda: read_neox(document, name)),
        (is_nemo, lambda: read_nemo(document, name)),
        (is_flagscale, lambda: read_flagscale(document, name, environment)),
        (is_bridge, lambda: _bridge(document, name)),
        (lambda whole: bool(modules_of(whole)), lambda: read_primus(document, name, environment)),
        (_in_sections_alone, lambda: read_sections(document, environment, name)),
    )
    return next((read() for of_form, read in readers if of_form(whole)), None)


def _in_sections_alone(whole: Mapping[str, Any]) -> bool:
    return in_sections(whole) and not isinstance(whole.get("MODEL_ARGS"), dict)


def _bridge(document: Document, name: str) -> Given:
    refuse_override(document.value, name, document.source.locate)
    return read_bridge(document.value, document.source.locate)


def _value(value: Any, variables: Mapping[str, Any]) -> Any:
    """A value with the launch's variables substituted."""
    return typed(substituted(value, variables) if isinstance(value, str) else value)
