"""Keys of a spec as topics of `explain`: meaning, legal values and default, read from the spec's schema."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from megaplan.spec.schema import spec_schema
from megaplan.terminal.table import wrap

_DEEPEST = 6
"""Sections inside of one another; every key of a spec is above this depth."""


@cache
def spec_keys() -> dict[str, tuple[dict[str, Any], ...]]:
    """Schemas by key, such as `mesh.tp`; a key of several kinds of a section has one for each different description."""
    schema = spec_schema()
    found: dict[str, list[dict[str, Any]]] = {}
    pending = [("", schema)]
    while pending:
        path, section = pending.pop()
        for name, node in section.get("properties", {}).items():
            if name.startswith("$"):
                continue
            key = f"{path}{name}"
            known = found.setdefault(key, [])
            if node.get("description") not in [each.get("description") for each in known]:
                known.append(node)
            if key.count(".") < _DEEPEST:
                pending += ((f"{key}.", each) for each in _sections(node, schema))
    return {key: tuple(nodes) for key, nodes in sorted(found.items())}


def keys_named(name: str) -> list[str]:
    """The keys equal to `name`; if there is none, the keys that end in it."""
    keys = spec_keys()
    return [name] if name in keys else [key for key in keys if key.endswith(f".{name}")]


def key_lines(key: str) -> Iterator[str]:
    """Lines on a key; on a section, a line for each of its keys."""
    yield key
    for node in spec_keys()[key]:
        yield from (f"  {line}" for line in wrap(node.get("description", ""), width=76))
        if (values := _values(node)) not in ("", "null"):
            yield from (f"  {line}" for line in wrap(f"values: {values}", indent="  ", width=76))
        if "default" in node and not isinstance(node["default"], dict):
            yield f"  default: {_word(node['default'])}"
    inside = [each for each in spec_keys() if each.startswith(f"{key}.") and "." not in each[len(key) + 1 :]]
    if inside:
        yield from wrap(f"  keys: {', '.join(each[len(key) + 1 :] for each in inside)}", indent="  ")


def _sections(node: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Sections that a value of the node can be, or that it lists."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    if "properties" in node:
        yield node
    for part in (*node.get("anyOf", ()), *node.get("oneOf", ()), *([node["items"]] if isinstance(node.get("items"), dict) else ())):
        yield from _sections(part, schema)


def _values(node: dict[str, Any]) -> str:
    """Legal values in words: `fsdp, ddp`; `1 to 64, or null`; empty for a section."""
    options = node.get("anyOf") or node.get("oneOf")
    if options:
        texts = dict.fromkeys(filter(None, map(_values, options)))
        return ", or ".join(texts)
    if "enum" in node:
        return ", ".join(map(_word, node["enum"]))
    if "const" in node:
        return _word(node["const"])
    kind = node.get("type")
    if kind not in ("integer", "number"):
        return {"boolean": "true, false", "null": "null", "string": "text", "array": "a list"}.get(kind or "", "")
    low, high = node.get("minimum", node.get("exclusiveMinimum")), node.get("maximum", node.get("exclusiveMaximum"))
    above = "above " if "exclusiveMinimum" in node else "at least " if high is None else ""
    if kind == "integer" and "exclusiveMinimum" in node:
        low, above = node["exclusiveMinimum"] + 1, "at least " if high is None else ""
    if low is None:
        return kind if high is None else f"at most {high:,}"
    return f"{above}{low:,}" if high is None else f"{above}{low:,} to {high:,}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
