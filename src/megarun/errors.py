"""Refusals of the runtime as megaplan diagnostics (MP6xx), and places named as axis and coordinate (R-59)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError


def refusal(code: str, detail: str, key: str | None = None, hints: Iterable[str] = (), file: str | None = None) -> MegaplanError:
    """One error of the catalogue, ready to raise."""
    return MegaplanError([diagnostic(code, detail, Location(file=file, key=key), hints)])


def place(rank: int, coordinate: Mapping[str, int]) -> str:
    """`rank 3 (pp 1, dp_shard 1)`: the axes on which the rank is not alone at 0 are for the caller to choose."""
    return f"rank {rank} ({', '.join(f'{axis} {index}' for axis, index in coordinate.items())})"
