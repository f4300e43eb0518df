"""Frameworks: their kernels and the communication that they overlap (`frameworks.json`)."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).with_name("frameworks.json")


class Framework(NamedTuple):
    """Facts of a framework, from its scripts.

    Attributes:
        kernels: te for Transformer Engine's norms and activations, own for others.
        library: True if products reach another share of the peak than Transformer Engine's.
        attention: cudnn, flash1 or flash2: the generation of the attention kernels.
        grad_bytes: Bytes of an element of the reduced gradients.
        data_overlap: True if reductions of gradients and gathers of parameters overlap with computation.
        accumulate_bytes: Bytes per parameter and microbatch that a separate accumulation of gradients moves; 0 without one.
        releases: Releases with a constant for their MoE layers, in ascending order.
        source: Source of these facts.
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
    """All frameworks by name."""
    found = json.loads(DATA.read_text(encoding="utf-8"))["frameworks"]
    return {name: Framework(**(record | {"releases": tuple(record["releases"])})) for name, record in found.items()}


def framework(name: str) -> Framework:
    """The facts of a framework.

    Raises:
        KeyError: The framework is not in the data file.
    """
    return frameworks()[name]


def known_release(name: str, release: str | None) -> str | None:
    """The newest release with a constant that is not newer than `release`, or the oldest if all are newer.

    None for a framework without such constants, or if no release is given.
    """
    releases = framework(name).releases
    if not releases or release is None:
        return None
    return max((known for known in releases if known <= release), default=releases[0])
