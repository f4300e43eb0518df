"""Display of values in diagnostics: short, on one line, safe for a terminal."""

import re
from collections.abc import Sequence
from math import isfinite
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
    """A plain value in the notation of a spec; long ones are truncated."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list | tuple):
        items = [_inside(item) for item in value[:4]]
        return f"[{', '.join(items)}{', …' if len(value) > 4 else ''}]"
    if isinstance(value, dict):
        keys = [f"{quoted(str(key))[1:-1]}: …" for key in list(value)[:3]]
        return f"{{{', '.join(keys)}{', …' if len(value) > 3 else ''}}}"
    return _scalar(value)


def argument(value: Any) -> str:
    """A complete value of the spec as `--set KEY=VALUE` takes it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {argument(each)}' for key, each in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(argument, value))}]"
    return str(value) if isinstance(value, str) else _scalar(value)


def is_newer(written: str, ours: str) -> bool | None:
    """True if `megaplan.plan/2` is written and `megaplan.plan/1` is read, False for an older one; None for another kind of document."""
    kind, _, number = written.partition("/")
    known, _, ours_number = ours.partition("/")
    return int(number) > int(ours_number) if kind == known and re.fullmatch("[0-9]{1,9}", number) else None


def _inside(item: Any) -> str:
    """An item of a list: a short list of scalars is shown, deeper values are not."""
    if isinstance(item, list | tuple):
        flat = len(item) <= 4 and not any(isinstance(part, list | tuple | dict) for part in item)
        return f"[{', '.join(show(part) for part in item)}]" if flat else "[…]"
    return "{…}" if isinstance(item, dict) else show(item)


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not isfinite(value):
        return ".nan" if value != value else "-.inf" if value < 0 else ".inf"  # noqa: PLR0124 (nan is what differs from itself)
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:
        return f"a number of {value.bit_length()} bits"
    return repr(value)
