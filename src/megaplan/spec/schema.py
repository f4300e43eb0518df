"""The JSON Schema of specs, for editors: types and bounds from the models, a description of every key from their docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

from pydantic import BaseModel

from megaplan.spec import models

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE = re.compile(r"^    (\w+): (.+)$", re.MULTILINE)


def spec_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a spec file; rules across keys are not part of it."""
    schema = models.Spec.model_json_schema(mode="validation")
    _describe(schema, models.Spec)
    for name, definition in schema["$defs"].items():
        section = getattr(models, name, None)
        if isinstance(section, type) and issubclass(section, BaseModel):
            _describe(definition, section)
    return {"$schema": DIALECT, **schema, "title": "megaplan spec"}


def section_help(section: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """A section's own description, and one for each of its keys."""
    text = inspect.cleandoc(section.__doc__ or "")
    about, _, attributes = text.partition("\nAttributes:\n")
    return about.strip(), dict(_ATTRIBUTE.findall(attributes))


def _describe(definition: dict[str, Any], section: type[BaseModel]) -> None:
    definition["description"], keys = section_help(section)
    for name, prop in definition["properties"].items():
        prop["description"] = keys[name]
        prop.pop("title", None)
