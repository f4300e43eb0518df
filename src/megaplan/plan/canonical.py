"""Canonical JSON: one text per value, so that equal plans are equal files and a review shows only the changes.

Rules:

- Keys are sorted. Numbers are integers: a float of the spec is written as an integer when it is one exactly, else as a string holding
  its shortest decimal form (`"1e-05"`), which reads back to the same float. NaN and infinities have no form.
- An object is opened, one key a line; but an object inside an array that holds no object itself (a stage) stays on one line.
- An array of scalars, or of arrays of scalars, is one line; any other array has one element a line.
- Two spaces of indent, UTF-8 without escapes beyond those of JSON and of other control characters, one newline at the end.
"""

import hashlib
import json
from math import isfinite
from typing import Any, TypeAlias

from megaplan.foreign import escaped

Json: TypeAlias = "bool | int | str | list[Json] | dict[str, Json] | None"
"""Values of a canonical document: JSON without floats."""

MAX_EXACT_INT = 2**53
"""Largest integer that survives readers that keep numbers as doubles (RFC 8785 section 3.2.2.3); byte counts stay below it."""


def normalise(value: object) -> Json:
    """Plain Python values as canonical JSON: floats become integers or decimal strings, tuples become lists.

    Raises:
        ValueError: A NaN or infinite float.
        TypeError: The value has no JSON form.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str(value)  # a StrEnum is written as its value
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, (list, tuple)):
        return [normalise(item) for item in value]
    if isinstance(value, dict):
        return {str(key): normalise(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not JSON")


def normalise_object(value: dict[str, Any]) -> dict[str, Json]:
    """`normalise` of an object."""
    return {key: normalise(item) for key, item in value.items()}


def _number(value: float) -> int | str:
    if not isfinite(value):
        raise ValueError(f"{value} has no canonical form")
    if value == int(value) and abs(value) <= MAX_EXACT_INT:
        return int(value)
    return repr(value)


def compact(value: Json) -> str:
    """The form that is digested: sorted keys, no spaces (RFC 8785 for documents without floats and with BMP keys)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Json) -> str:
    """`sha256:` and the hex digest of the compact form."""
    return "sha256:" + hashlib.sha256(compact(value).encode("utf-8", "surrogatepass")).hexdigest()


def dumps(value: Json) -> str:
    """The form that is written to files; control characters in strings are escaped, because a file with raw ones is refused."""
    return escaped(_opened(value, "", in_array=False)) + "\n"


def _opened(value: Json, indent: str, *, in_array: bool) -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value and not (in_array and not any(isinstance(item, dict) for item in value.values())):
        lines = [f"{inner}{_line(key)}: {_opened(value[key], inner, in_array=False)}" for key in sorted(value)]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and value and not _is_flat(value):
        lines = [inner + _opened(item, inner, in_array=True) for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return _line(value)


def _is_flat(array: list[Json]) -> bool:
    return all(not isinstance(item, dict) and not (isinstance(item, list) and not _is_flat(item)) for item in array)


def _line(value: Json) -> str:
    return json.dumps(value, sort_keys=True, separators=(", ", ": "), ensure_ascii=False)
