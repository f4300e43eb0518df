"""What the kinds of kernels count for reference specs: the identity of an operation beside its measured constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def kind_counts(references: Sequence[Mapping[str, Any]], device: str) -> dict[str, tuple[int, int, int]]:
    return {}
