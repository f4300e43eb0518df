"""The data of a page about the result of a search, from the output of `megaplan search --json`."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from megaplan.diagnostics import refuse
from megaplan.report.document import FORMAT

MAX_BYTES = 1 << 24
"""Size limit of a result."""


class _Mesh(BaseModel):
    pp: int
    vpp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int


class _Schedule(BaseModel):
    kind: str
    num_microbatches: int
    micro_batch_size: int


class _Row(BaseModel):
    step_seconds: float
    tokens_per_second_per_device: float
    mfu: float
    peak_bytes: int
    headroom_bytes: int
    bubble_seconds: float
    exposed_communication_seconds: float
    terms: dict[str, float]
    pareto: bool
    mesh: _Mesh
    schedule: _Schedule
    set: list[str]
    plan: str | None = None


class _Lost(BaseModel):
    name: str
    count: int
    reason: str
    detail: str


class _Case(BaseModel):
    case: str
    best: int
    loss: float


class _Robustness(BaseModel):
    cases: int
    not_timed: int = 0
    first_is_best: int
    lost: list[_Case]


class _Candidates(BaseModel):
    meshes: int
    evaluated: int


class _Result(BaseModel):
    format: Literal["megaplan.search/1"]
    spec: str
    devices: int
    objective: str
    complete: bool
    basis: str
    candidates: _Candidates
    bound_seconds: float
    gap: float | None
    gap_reason: str | None = None
    best: list[_Row]
    why_not: list[_Lost]
    robustness: _Robustness | None = None


def is_search(text: str) -> bool:
    """True if a file is the result of a search, valid or not: its first key is the format."""
    return text[:200].lstrip().startswith("{") and '"megaplan.search/' in text[:200]


def search_report(text: str, source: str) -> dict[str, Any]:
    """The data of the page of a search's result.

    Args:
        text: Output of `megaplan search --json`.
        source: Name of the file on the page.

    Raises:
        MegaplanError: MP492: a part of the result is missing or has another type, or the version differs.
    """
    try:
        document = json.loads(text, parse_constant=_refused)
        for lost in document["why_not"]:
            lost.setdefault("name", lost.pop("class", None))
        result = _Result.model_validate(document, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise refuse("MP492", f"{place}: {first['msg']}", file=source) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise refuse("MP492", f"{type(error).__name__}: {error}", file=source) from None
    return {"format": FORMAT, "kind": "search", "name": result.spec, "source": source, "search": result.model_dump()}


def _refused(name: str) -> float:
    raise ValueError(f"{name} is not a number of a result")
