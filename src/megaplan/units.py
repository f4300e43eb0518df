"""Bytes, counts, times, powers and rates: parsed exactly, formatted for display. Bytes are integers; GiB is display only."""

import re
from collections.abc import Mapping
from fractions import Fraction

_BYTE_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power for power, prefix in enumerate("KMGTP", start=1) for suffix, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_MAX_SIZE_TEXT = 40


def parse_bytes(text: str) -> int:
    """Bytes of a size with its unit: `4GiB`, `512 MiB`, `80GB`, `1.5KiB`.

    Raises:
        ValueError: The text is not a size, has no or an unknown unit, or is not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text) if len(text) <= _MAX_SIZE_TEXT else None
    if match is None:
        raise ValueError(f"{text[:_MAX_SIZE_TEXT]!r} is not a size; write one like 4GiB")
    number, unit = match.groups()
    by_lower_case = {name.lower(): factor for name, factor in _BYTE_UNITS.items()}
    if unit.lower() not in by_lower_case:
        raise ValueError(f"{text!r} has {'the unknown unit ' + repr(unit) if unit else 'no unit'}; use one of {', '.join(_BYTE_UNITS)}")
    size = Fraction(number) * by_lower_case[unit.lower()]
    if size.denominator != 1:
        raise ValueError(f"{text!r} is {float(size)} bytes, which is not a whole number")
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


def format_figure(value: float) -> str:
    """Display of a figure with three digits at least: `0.0123`, `6.06`, `2,684`."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


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


_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_SECONDS = {
    "ms": 0.001,
    "s": 1,
    "min": 60,
    "h": 3600,
    "d": 86400,
    "day": 86400,
    "days": 86400,
    "week": 604800,
    "weeks": 604800,
    "y": 31557600,
}
_KILOWATTS = {"W": 0.001, "kW": 1.0, "MW": 1000.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


def parse_count(text: str) -> int:
    """A count with its decimal prefix: `2T`, `15.6T`, `300B`, `4e9`.

    Raises:
        ValueError: The text is not a count, or is not a whole number.
    """
    number, unit = _quantity(text, _COUNTS, "2T")
    count = Fraction(number) * int(_COUNTS[unit])
    if count.denominator != 1:
        raise ValueError(f"{text!r} is {float(count)}, which is not a whole number")
    return int(count)


def parse_seconds(text: str, without_unit: float = 1.0) -> float:
    """Seconds of a duration with its unit: `30000h`, `30min`, `90s`, `1.5d`.

    Args:
        text: The duration.
        without_unit: Seconds of the unit of a text that names none.

    Raises:
        ValueError: The text is not a duration, or its unit is unknown.
    """
    number, unit = _quantity(text, {"": without_unit, **_SECONDS}, "30min")
    return float(number) * (without_unit if not unit else _SECONDS[unit])


def parse_kilowatts(text: str) -> float:
    """Kilowatts of a power with its unit: `0.7kW`, `700W`; without a unit kilowatts.

    Raises:
        ValueError: The text is no power, or its unit is unknown.
    """
    number, unit = _quantity(text, {"": 1.0, **_KILOWATTS}, "0.7kW")
    return float(number) * _KILOWATTS.get(unit, 1.0)


def parse_bandwidth(text: str) -> int:
    """Bytes per second of a rate: `10GB/s`, `400Gb/s`, `2.5e9`.

    Raises:
        ValueError: The text is not a rate, or is not a whole number of bytes.
    """
    compact = text.strip().removesuffix("/s")
    bits = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)b", compact)
    if bits is not None:
        return int(Fraction(bits[1]) * int(_COUNTS[bits[2]]) / 8)
    return int(float(compact)) if re.fullmatch(r"\d+(\.\d+)?([eE]\d+)?", compact) else parse_bytes(compact)


def _quantity(text: str, units: Mapping[str, float], example: str) -> tuple[str, str]:
    """Number and unit of a text; units are case-insensitive if that is unambiguous."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_SIZE_TEXT else None
    if match is None:
        raise ValueError(f"{text[:_MAX_SIZE_TEXT]!r} is not a quantity; write one like {example}")
    number, unit = match.groups()
    if unit in units:
        return number, unit
    near = [name for name in units if name.lower() == unit.lower()]
    if len(near) != 1:
        raise ValueError(f"{text!r} has the unknown unit {unit!r}; use one of {', '.join(name for name in units if name)}")
    return number, near[0]
