"""Defaults of classes for fields that a config does not have: a generated table of transformers' (`scripts/transformers_defaults.py`).

Classes of repositories of weights are in `repository_classes`.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

from megaplan.importers.repository_classes import REPOSITORY_CLASSES


class PartFacts(NamedTuple):
    """A nested config of a multimodal class.

    Attributes:
        type: Model type, if the config does not say.
        fixed: The class has this model type, whatever the config says.
        optional: The part is absent if the config lacks it.
        init: Fields of the part, if the config lacks it.
    """

    type: str
    fixed: bool
    optional: bool
    init: Mapping[str, Any]


class ClassFacts(NamedTuple):
    """Defaults and names of one model type.

    Attributes:
        version: Version of transformers; empty for a class of a repository of weights.
        model_class: Class with a head over the vocabulary.
        renamed: Other names of fields, each with the name that the class has.
        fields: The class's own fields with their defaults.
        common: Fields that every class has.
        parts: Nested configs, by key.
        forwards_tie: True if the text model's `tie_word_embeddings` counts when the outer config has none.
    """

    version: str
    model_class: str
    renamed: Mapping[str, str]
    fields: Mapping[str, Any]
    common: frozenset[str]
    parts: Mapping[str, PartFacts] = MappingProxyType({})
    forwards_tie: bool = False

    @property
    def origin(self) -> str:
        """The program that has the class; empty for a model type without a class."""
        return f"transformers {self.version}" if self.version else "the repository's class" if self.fields else ""


NO_FACTS = ClassFacts("", "", {}, {}, frozenset())


def class_facts(model_type: str) -> ClassFacts:
    """The facts of a model type; `NO_FACTS` for one that is not in the table."""
    table = _table()
    found = table["types"].get(model_type)
    if found is None:
        return _of_repository(model_type)
    parts = {key: PartFacts(*part) for key, part in found.get("parts", {}).items()}
    common = frozenset(table["common"])
    return ClassFacts(
        table["transformers"], found["class"], found["renamed"], found["fields"], common, parts, found.get("forwards_tie", False)
    )


def _of_repository(model_type: str) -> ClassFacts:
    """The facts of a class of a repository of weights."""
    found = REPOSITORY_CLASSES.get(model_type)
    if found is None:
        return NO_FACTS
    base = class_facts(found.extends) if found.extends else NO_FACTS
    renamed = {**base.renamed, **found.renamed}
    return ClassFacts("", found.name, renamed, {**base.fields, **found.fields}, frozenset(_table()["common"]))


@cache
def _table() -> dict[str, Any]:
    text = files("megaplan.importers").joinpath("transformers_defaults.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
