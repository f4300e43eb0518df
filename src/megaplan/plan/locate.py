"""Line and column of a key in a JSON text, for diagnostics: computed only after an error."""

import json
from collections.abc import Sequence

_DECODER = json.JSONDecoder()


def locate(text: str, path: Sequence[str | int]) -> tuple[int, int]:
    """1-based line and column of the value at `path` (of its key, inside an object), or of the deepest part that exists.

    Args:
        text: Valid JSON.
        path: Keys and array indices from the root.
    """
    start = _skip(text, 0)
    found = start
    for step in path:
        children = dict(_children(text, start))
        if step not in children:
            break
        found, start = children[step]
    return text.count("\n", 0, found) + 1, found - (text.rfind("\n", 0, found) + 1) + 1


def _children(text: str, start: int) -> list[tuple[str | int, tuple[int, int]]]:
    """Keys or indices of the container at `start`: key or index → (position of its name, position of its value)."""
    if text[start] not in "{[":
        return []
    found: list[tuple[str | int, tuple[int, int]]] = []
    position = _skip(text, start + 1)
    while text[position] not in "}]":
        name: str | int = len(found)
        named = position
        if text[start] == "{":
            name, position = _DECODER.raw_decode(text, position)
            position = _skip(text, _skip(text, position) + 1)
        found.append((name, (named, position)))
        _, position = _DECODER.raw_decode(text, position)
        position = _skip(text, position)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return found


def _skip(text: str, position: int) -> int:
    while text[position] in " \t\r\n":
        position += 1
    return position
