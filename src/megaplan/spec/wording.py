"""How diagnostics show values: short, on one line, safe for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_SHOWN = 60


def plural(count: int, noun: str) -> str:
    """`1 layer`, `2 layers`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def series(words: Sequence[str], joint: str = "or") -> str:
    """`1, 2, 4 or 8`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {joint} {words[-1]}" if words else "none"


def quoted(text: str, limit: int = MAX_SHOWN) -> str:
    """The text in single quotes, control characters escaped, cut to `limit` characters."""
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:limit])
    return f"'{shown}…'" if len(text) > limit else f"'{shown}'"


def show(value: Any) -> str:
    """A plain value as a spec would write it; long ones are cut."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list | tuple):
        items = ["…" if isinstance(item, list | tuple | dict) else show(item) for item in value[:4]]
        return f"[{', '.join(items)}{', …' if len(value) > 4 else ''}]"
    if isinstance(value, dict):
        keys = [f"{str(key)[:MAX_SHOWN]}: …" for key in list(value)[:3]]
        return f"{{{', '.join(keys)}{', …' if len(value) > 3 else ''}}}"
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:
        return f"a number of {value.bit_length()} bits"
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
