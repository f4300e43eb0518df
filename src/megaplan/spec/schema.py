"""The JSON Schema of specs, for editors: types and bounds from the models, a description of every key from their docstrings."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from megaplan.spec import models, post_training
from megaplan.spec.validate import EDITOR_KEY, FORMAT

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_FILE = "megaplan.spec.1.schema.json"
"""File name of the schema, which `megaplan new` refers to."""
ABOUT_EDITOR_KEY = "Where an editor finds this schema; megaplan does not read it."
_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)$", re.MULTILINE)


def spec_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a spec file; rules across keys are not part of it."""
    schema = models.Spec.model_json_schema(mode="validation")
    _describe(schema, models.Spec)
    later = post_training.PostTraining.model_json_schema(mode="validation")
    schema["$defs"] |= later.pop("$defs") | {"PostTraining": later}
    schema["properties"]["post_training"]["anyOf"][0] = {"$ref": "#/$defs/PostTraining"}
    sections = {section.__name__: section for section in _sections(BaseModel)}
    for name, definition in schema["$defs"].items():
        if name in sections:
            _describe(definition, sections[name])
    schema["properties"] = {EDITOR_KEY: {"type": "string", "description": ABOUT_EDITOR_KEY}, **schema["properties"]}
    return {"$schema": DIALECT, "$id": schema_id(FORMAT), **schema, "title": "megaplan spec"}


def _sections(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Every section of a spec, found by type instead of listed."""
    for section in base.__subclasses__():
        if section.__module__.startswith("megaplan."):
            yield section
        yield from _sections(section)


def schema_id(document_format: str) -> str:
    """The identifier of a document's schema, one per version of the format: `urn:megaplan:spec:1` for `megaplan.spec/1`."""
    return "urn:" + document_format.replace(".", ":").replace("/", ":")


def editor_line(schema_file: str) -> str:
    """The comment by which yaml-language-server, in VS Code and other editors, finds the schema of a YAML file."""
    return f"# yaml-language-server: $schema={schema_file}\n"


def attribute_help(docstring: str) -> tuple[str, dict[str, str]]:
    """The summary of a class's docstring, and the texts of its attributes."""
    text = inspect.cleandoc(docstring)
    about, _, attributes = text.partition("\nAttributes:\n")
    return about.strip(), {name: re.sub(r"\n +", " ", text) for name, text in _ATTRIBUTE.findall(attributes)}


def _describe(definition: dict[str, Any], section: type[BaseModel]) -> None:
    definition["description"], keys = attribute_help(section.__doc__ or "")
    for name, prop in definition["properties"].items():
        prop["description"] = keys[name]
        prop.pop("title", None)
