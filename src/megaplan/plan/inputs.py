"""A spec as a plan's `inputs`, and the inverse: every default written out, floats as exact text (see `canonical`)."""

from typing import Any, get_args

from megaplan.partition.values import asked_objective
from megaplan.plan.canonical import Json, normalise, normalise_object
from megaplan.spec.fields import element_of, keys_of
from megaplan.spec.models import Spec


def inputs_record(spec: Spec) -> dict[str, Json]:
    """The spec's document in canonical values; an objective that is not stated is written as its default."""
    document = spec.as_document()
    document["split"]["objective"] = asked_objective(spec)
    return normalise_object(document)


def spec_values(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inverse: decimal text becomes floats at the keys where the spec has floats.

    Other text is unchanged, so that the spec's own check refuses it.
    """
    values = _revived(inputs, Spec)
    assert isinstance(values, dict)
    return values


def _revived(value: Any, annotation: Any) -> Any:
    """A value of a type with its floats."""
    if isinstance(value, dict):
        legal = keys_of(annotation, value)
        return {key: _revived(item, legal.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        element = element_of(annotation)
        return [_number(each) if isinstance(each, str) and _admits_float(annotation) else _revived(each, element) for each in value]
    return _number(value) if isinstance(value, str) and _admits_float(annotation) else value


def _admits_float(annotation: Any) -> bool:
    return annotation is float or any(map(_admits_float, get_args(annotation)))


def _number(text: str) -> float | str:
    """The float that has this canonical text; any other text unchanged."""
    try:
        value = float(text)
        return value if normalise(value) == text else text
    except ValueError:
        return text
