"""Runtime errors as megaplan diagnostics (MP6xx), and rank names with mesh coordinates (R-59)."""

from collections.abc import Iterable

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.layout.ranks import rank_coordinate
from megaplan.spec.models import Mesh


def refusal(code: str, detail: str, key: str | None = None, hints: Iterable[str] = (), file: str | None = None) -> MegaplanError:
    """An exception with one diagnostic of the catalogue, for the caller to raise."""
    return MegaplanError([diagnostic(code, detail, Location(file=file, key=key), hints)])


def place(rank: int, mesh: Mesh | None) -> str:
    """`rank 3 (pp 1, dp_shard 1)`: the rank and its index on every axis of more than one rank."""
    if mesh is None:
        return f"rank {rank}"
    shared = [f"{axis} {index}" for axis, index in rank_coordinate(mesh, rank).items() if getattr(mesh, axis) > 1]
    return f"rank {rank} ({', '.join(shared)})" if shared else f"rank {rank}"
