"""Bytes, counts, FLOPs and times: parsed exactly, formatted for display. Internal values are integers; GiB is display only."""

from __future__ import annotations

import re
from fractions import Fraction

_BYTE_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power for power, prefix in enumerate("KMGTP", start=1) for suffix, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_MAX_SIZE_TEXT = 40


def parse_bytes(text: str) -> int:
    """Bytes of a size with its unit: `4GiB`, `512 MiB`, `80GB`, `1.5KiB`.

    Raises:
        ValueError: The text is no size, has no or an unknown unit, or is no whole number of bytes.
    """
    match = _SIZE.fullmatch(text) if len(text) <= _MAX_SIZE_TEXT else None
    if match is None:
        raise ValueError(f"{text[:_MAX_SIZE_TEXT]!r} is no size; write one like 4GiB")
    number, unit = match.groups()
    by_lower_case = {name.lower(): factor for name, factor in _BYTE_UNITS.items()}
    if unit.lower() not in by_lower_case:
        raise ValueError(f"{text!r} has {'the unknown unit ' + repr(unit) if unit else 'no unit'}; use one of {', '.join(_BYTE_UNITS)}")
    size = Fraction(number) * by_lower_case[unit.lower()]
    if size.denominator != 1:
        raise ValueError(f"{text!r} is {float(size)} bytes, which is no whole number")
    return int(size)


def format_bytes(num_bytes: int, digits: int = 2) -> str:
    """Binary display of a byte count: `1.50 GiB`, `-3.00 MiB`, `17 B`."""
    size, unit = abs(num_bytes), "B"
    for power, name in enumerate(("KiB", "MiB", "GiB", "TiB", "PiB"), start=1):
        if size >= 1024**power:
            unit = name
    sign = "-" if num_bytes < 0 else ""
    if unit == "B":
        return f"{sign}{size} B"
    return f"{sign}{size / _BYTE_UNITS[unit]:.{digits}f} {unit}"


def format_gib(num_bytes: int, digits: int = 2) -> str:
    """Gibibytes for any size, for columns of a table: `0.03`."""
    return f"{num_bytes / 2**30:.{digits}f}"


def short_count(count: int, digits: int = 2) -> str:
    """Decimal display of a count: `4.73 B`, `131.07 K`, `512`."""
    return _decimal(count, (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)), digits)


def format_ns(ns: int, digits: int = 2) -> str:
    """Display of a time given in nanoseconds: `1.50 ms`."""
    for unit, factor in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if abs(ns) >= factor:
            return f"{ns / factor:.{digits}f} {unit}"
    return f"{ns} ns"


def _decimal(count: int, prefixes: tuple[tuple[str, int], ...], digits: int, unit: str = "") -> str:
    for prefix, factor in prefixes:
        if abs(count) >= factor:
            return f"{count / factor:.{digits}f} {prefix}{unit}"
    return f"{count} {unit}".rstrip()
