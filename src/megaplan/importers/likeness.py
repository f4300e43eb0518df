"""Classes that have the fields of a config whose model type no import reads, for the reader of the error to judge by their totals."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from megaplan.errors import MegaplanError
from megaplan.importers.defaults import class_facts
from megaplan.importers.imported import Imported
from megaplan.importers.registry import IMPORTS
from megaplan.importers.structure import names_a_tensor, names_an_encoder
from megaplan.importers.tables import IGNORED, NOT_CARRIED
from megaplan.inventory.build import build_inventory

MOST = 3
"""Largest number of totals, of unread numbers and lists, and of fields, that a message names."""
MOST_OWN = 6
"""Largest number of fields that no class has and that a message names."""
_USUAL = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "deepseek_v3")
"""Classes that are named before others with the same number of matching fields."""
_ROTARY = ("rope_scaling", "rope_theta", "partial_rotary_factor")
"""Names before transformers 5 of what `rope_parameters` holds."""
_UNTOLD = {"architectures", "auto_map", "model_type"}


def candidates(config: Mapping[str, Any], read: Callable[[str], Imported]) -> tuple[str, ...]:
    """Hints with the classes that leave fewest fields of a config unread, and then lack fewest, each with its parameters.

    A class is not among them if one of these fields decides a tensor.

    Args:
        config: The config.
        read: The import of a config's text.
    """
    fields = {key: value for key, value in config.items() if key not in _UNTOLD and not names_an_encoder(key)}
    encoders = [key for key in config if names_an_encoder(key)]
    families = dict.fromkeys((*_USUAL, *IMPORTS))
    ranked = sorted(((rank, family) for family in families if (rank := _rank(family, fields)) is not None), key=lambda pair: pair[0])
    found: dict[int, tuple[str, list[str]]] = {}
    best: tuple[int, int] | None = None
    for rank, family in ranked:
        if best is not None and (rank > best or len(found) == MOST):
            break
        try:
            imported = read(json.dumps({**fields, "model_type": family}))
        except MegaplanError:
            continue
        best, total = rank, build_inventory(imported.loaded.spec).parameters
        found.setdefault(total, (family, [*_unread(family, fields), *encoders]))
    return tuple(_hint(family, total, unread) for total, (family, unread) in found.items())


def of_no_class(config: Mapping[str, Any]) -> str:
    """The fields of a config that no class has that is read, to be added to its model type; empty if there are none."""
    known: set[str] = set()
    for family in IMPORTS:
        facts = class_facts(family)
        known |= {*facts.fields, *facts.renamed, *facts.common}
    known |= {*IGNORED, *NOT_CARRIED, *_ROTARY, *_UNTOLD, "text_config"}
    own = [key for key in config if key not in known and (isinstance(config[key], dict | list) or names_a_tensor(key, config[key]))]
    more = f" and {len(own) - MOST_OWN} others" if len(own) > MOST_OWN else ""
    return f"; no class that is read has {', '.join(own[:MOST_OWN])}{more}" if own else ""


def other_task(config: Mapping[str, Any]) -> str:
    """The reason that a config is of no decoder with a head over the vocabulary; empty if nothing says so."""
    if config.get("is_encoder_decoder") is True:
        return ": an encoder and a decoder (is_encoder_decoder), and a spec is one stack"
    code, named = config.get("auto_map"), config.get("architectures")
    if (isinstance(code, dict) and "AutoModelForCausalLM" in code) or not isinstance(named, list):
        return ""
    name = next((each for each in named if isinstance(each, str) and each.endswith(_OTHER_TASKS)), "")
    return f": {name} (architectures) predicts no next token, and a spec ends in a head over the vocabulary" if name else ""


_OTHER_TASKS = ("Model", "ForMaskedLM", "ForPreTraining", "Classification", "ForQuestionAnswering", "Scoring", "ForSpeechSeq2Seq", "ForCTC")
"""Ends of names of classes that do not predict the next token."""


def _hint(family: str, total: int, unread: list[str]) -> str:
    more = f" and {len(unread) - MOST} others" if len(unread) > MOST else ""
    left = f"without {', '.join(unread[:MOST])}{more}" if unread else "every field is read"
    write = f'write "model_type": "{family}" in a copy of the config without "architectures"'
    return f"if the layers are like {family}'s, {write}: {total:,} parameters, {left}"


def _rank(family: str, fields: Mapping[str, Any]) -> tuple[int, int] | None:
    """Numbers of unread and of absent fields; None if one of them decides a tensor."""
    facts, unread = class_facts(family), _unread(family, fields)
    numbers = [key for key in unread if isinstance(fields[key], int | list) and not isinstance(fields[key], bool)]
    names = {facts.renamed.get(key, key) for key in fields}
    absent = [key for key, value in facts.fields.items() if key not in names and value and key not in IGNORED]
    decides = [
        *(isinstance(fields[key], dict) or names_a_tensor(key, fields[key]) for key in unread),
        *(names_a_tensor(key, facts.fields[key]) for key in absent),
    ]
    return None if any(decides) or not facts.fields or len(numbers) > MOST else (len(unread), len(absent))


def _unread(family: str, fields: Mapping[str, Any]) -> list[str]:
    """Fields of a config that a class does not have."""
    facts = class_facts(family)
    known = {*facts.fields, *facts.renamed, *facts.common, *IGNORED, *NOT_CARRIED, *(_ROTARY if "rope_parameters" in facts.fields else ())}
    return [key for key in fields if key not in known]
