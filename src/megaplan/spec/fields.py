"""The keys that a spec may have in each section, read from the models, for hints and for `--set`."""

from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megaplan.spec.document import KeyPath
from megaplan.spec.later import LaterSection
from megaplan.spec.models import Spec


def legal_keys(path: KeyPath, document: Any) -> dict[str, Any]:
    """The keys of the section at `path`, with their types; empty if there is no section at that path.

    Args:
        path: Steps from the top of a spec.
        document: The spec's plain values; a section of several kinds is narrowed by its `kind`.
    """
    keys, value = keys_of(Spec, document), document
    for step in path:
        if not isinstance(step, str) or step not in keys:
            return {}
        value = value.get(step) if isinstance(value, Mapping) else None
        keys = keys_of(keys[step], value)
    return keys


@cache
def all_keys() -> tuple[KeyPath, ...]:
    """Every key of every section, kinds merged."""
    found: list[KeyPath] = []
    pending: list[tuple[KeyPath, dict[str, Any]]] = [((), keys_of(Spec, None))]
    while pending:
        path, keys = pending.pop()
        for name, annotation in keys.items():
            found.append((*path, name))
            pending.append(((*path, name), keys_of(annotation, None)))
    return tuple(found)


def kinds_of(path: KeyPath) -> tuple[str, ...]:
    """The legal `kind`s of the section at `path`; empty if it has none."""
    kind = legal_keys(path, None).get("kind")
    return tuple(str(word) for word in _literals(kind)) if kind is not None else ()


def keys_of(annotation: Any, value: Any) -> dict[str, Any]:
    """The keys of a type's sections, with their types; if there are several kinds, of the kind that a value states."""
    keys: dict[str, Any] = {}
    for model in _models(annotation, value):
        for name, info in model.model_fields.items():
            field = _annotated(info)
            keys[name] = field if name not in keys else Union[keys[name], field]  # noqa: UP007 (annotations are values here)
    for option in _options(annotation):
        if get_origin(option) is dict:
            letters, field = get_args(option)
            keys |= dict.fromkeys(_literals(letters), field)
    return keys


def defaults_of(path: KeyPath, document: Any) -> list[Any]:
    """The default of the key at `path`, in a list; empty for a key without one. A section of several kinds is narrowed by its `kind`."""
    section, value = path[:-1], document
    for step in section:
        value = value.get(step) if isinstance(value, Mapping) else None
    annotation = legal_keys(section[:-1], document).get(str(section[-1])) if section else Spec
    fields = [model.model_fields[str(path[-1])] for model in _models(annotation, value) if path[-1] in model.model_fields]
    return [field.get_default(call_default_factory=True, validated_data={}) for field in fields[:1] if not field.is_required()]


def accepts(path: KeyPath, value: Any, document: Any) -> bool:
    """True if a key accepts a value by its type; contents of a section are not checked."""
    annotation = legal_keys(path[:-1], document).get(str(path[-1]))
    if annotation is None or isinstance(value, Mapping):  # a key of another kind of document
        return annotation is None or bool(legal_keys(path, document))
    try:
        TypeAdapter(annotation).validate_python(value, strict=not isinstance(value, list))  # a list is meant as a tuple
    except ValidationError:
        return False
    return True


def _models(annotation: Any, value: Any) -> list[type[BaseModel]]:
    """The sections of a type; the one of the kind that a value states, if there are several kinds."""
    models = [option for option in _options(annotation) if isinstance(option, type) and issubclass(option, BaseModel)]
    kind = value.get("kind") if isinstance(value, Mapping) else None
    same = [model for model in models if "kind" in model.model_fields and kind in _literals(model.model_fields["kind"].annotation)]
    return same or models


def _annotated(field: FieldInfo) -> Any:
    """The type of a field, bounds and converters included."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def element_of(annotation: Any) -> Any:
    """The type of the elements of a sequence's type; None for no sequence."""
    return next((get_args(option)[0] for option in _options(annotation) if get_origin(option) in (tuple, list)), None)


def _options(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _options(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for option in get_args(annotation):
            yield from _options(option)
    else:
        later = isinstance(annotation, type) and issubclass(annotation, LaterSection)
        yield annotation.model() if later else annotation


def _literals(annotation: Any) -> tuple[Any, ...]:
    return tuple(word for option in _options(annotation) if get_origin(option) is Literal for word in get_args(option))
