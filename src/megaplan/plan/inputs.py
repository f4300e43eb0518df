"""A spec as a plan's `inputs`, and the inverse: every default written out, floats as exact text (see `canonical`)."""

from __future__ import annotations

from typing import Any, get_args

from megaplan.partition.values import asked_objective
from megaplan.plan.canonical import Json, normalise, normalise_object
from megaplan.spec.fields import legal_keys
from megaplan.spec.models import Spec


def inputs_record(spec: Spec) -> dict[str, Json]:
    """The spec's document in canonical values; an objective that is not stated is written as its default."""
    document = spec.as_document()
    document["split"]["objective"] = asked_objective(spec)
    return normalise_object(document)


def spec_values(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inverse: decimal text as floats where the spec has floats. Other text stays, so that the spec's own check refuses it."""
    values = _revived(inputs, (), inputs)
    assert isinstance(values, dict)
    return values


def _revived(value: Any, path: tuple[str, ...], inputs: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    legal = legal_keys(path, inputs)
    revived = {}
    for key, item in value.items():
        if isinstance(item, str | list) and _admits_float(legal.get(key)):
            revived[key] = _number(item) if isinstance(item, str) else [_number(each) if isinstance(each, str) else each for each in item]
        else:
            revived[key] = _revived(item, (*path, key), inputs)
    return revived


def _admits_float(annotation: Any) -> bool:
    return annotation is float or any(map(_admits_float, get_args(annotation)))


def _number(text: str) -> float | str:
    """The float that has this canonical text; any other text unchanged."""
    try:
        value = float(text)
        return value if normalise(value) == text else text
    except ValueError:
        return text
