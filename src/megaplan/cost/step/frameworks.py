"""Frameworks: which kernels they run, and what of their communication overlaps (`frameworks.json`)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).with_name("frameworks.json")


class Framework(NamedTuple):
    """A framework's facts, as its scripts have them.

    Attributes:
        kernels: te for Transformer Engine's norms and activations, own for others.
        library: Its products reach another share than Transformer Engine's.
        attention: cudnn, flash1 or flash2: the generation of its attention kernels.
        grad_bytes: Of an element of the reduced gradients.
        data_overlap: Gradients are reduced and parameters gathered beside computation.
        accumulate_bytes: Of a parameter and microbatch, moved to accumulate gradients apart from the product.
        releases: Releases whose MoE layers have a constant of their own, rising.
        source: Where this was read.
    """

    kernels: str
    library: bool
    attention: str
    grad_bytes: int
    data_overlap: bool
    accumulate_bytes: int
    releases: tuple[str, ...]
    source: str


@cache
def frameworks() -> dict[str, Framework]:
    """Every framework by name."""
    found = json.loads(DATA.read_text(encoding="utf-8"))["frameworks"]
    return {name: Framework(**(record | {"releases": tuple(record["releases"])})) for name, record in found.items()}


def framework(name: str) -> Framework:
    """The facts of a framework.

    Raises:
        KeyError: It is not in the data file.
    """
    return frameworks()[name]


def known_release(name: str, release: str | None) -> str | None:
    """The newest release with a constant that is not newer than `release`, else the oldest.

    None for a framework without such constants, and where no release is given.
    """
    releases = framework(name).releases
    if not releases or release is None:
        return None
    return max((known for known in releases if known <= release), default=releases[0])
