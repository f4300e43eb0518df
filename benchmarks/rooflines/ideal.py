"""Operations that move more bytes than one fused kernel would, against a list of exceptions with reasons."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from rooflines.step import Row

FOLDER = Path(__file__).parent
LIST = FOLDER / "beyond_ideal.yaml"
SPECS = tuple(FOLDER / f"gate-{name}.yaml" for name in ("hybrid", "experts", "delta", "convolved", "scaled"))
LIMIT = 1.3
"""Largest ratio of moved to ideal bytes of an operation that is not listed."""
OWN = "megakernels."


class Listed(NamedTuple):
    """A listed operation: above the limit, or plain torch on CUDA.

    Attributes:
        ratio: Largest ratio of moved to ideal bytes in the counted specs.
        runs_as: `triton`, `library` or `torch`.
        reason: Reason.
    """

    ratio: float
    runs_as: str
    reason: str


def listed() -> dict[str, Listed]:
    """The list by operation."""
    found: dict[str, dict[str, object]] = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return {op: Listed(float(str(entry["ratio"])), str(entry["runs_as"]), str(entry["reason"])) for op, entry in found.items()}


def moved(rows: Iterable[Row]) -> dict[str, tuple[float, str]]:
    """Largest ratio of moved to ideal bytes for each operation, rounded to 0.01, with the implementation that has it."""
    found: dict[str, tuple[float, str]] = {}
    for row in rows:
        if row.ideal_bytes > 0 and row.inside in ("triton", "library", "torch"):
            ratio = round(row.num_bytes / row.ideal_bytes, 2)
            found[row.op] = max(found.get(row.op, (0.0, "")), (ratio, row.inside))
    return found


def problems(found: dict[str, tuple[float, str]], allowed: dict[str, Listed]) -> Iterator[str]:
    """Differences between the counts and the list, one line each."""
    for op, (ratio, runs_as) in sorted(found.items()):
        entry, plain = allowed.get(op.removeprefix(OWN)), op.startswith(OWN) and runs_as == "torch"
        if entry is None:
            if ratio > LIMIT:
                yield f"{op} moves {ratio} times its ideal bytes, above {LIMIT}, and {LIST.name} does not list it"
            if plain:
                yield f"{op} is plain torch on CUDA, and {LIST.name} does not list it"
        elif ratio > entry.ratio:
            yield f"{op} moves {ratio} times its ideal bytes, and {LIST.name} allows {entry.ratio}"
        elif runs_as != entry.runs_as:
            yield f"{op} runs as {runs_as}, and {LIST.name} says {entry.runs_as}"
        elif ratio <= LIMIT and not plain:
            yield f"{op} moves {ratio} times its ideal bytes, so remove it from {LIST.name}"
    for op in sorted(allowed.keys() - {op.removeprefix(OWN) for op in found}):
        yield f"{op} is listed in {LIST.name}, but no counted spec runs it"
