"""Digests of a plan: which architecture, and which plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaplan.plan.canonical import Json, digest, normalise
from megaplan.spec.models import Spec

# Settings of the model sections that change how it runs or what it is expected to cost, not the function or its parameters.
_EXECUTION = {("moe", "routing_skew"), ("mamba", "chunk_size"), ("mamba", "save_every"), ("recurrent", "save_every")}


def model_digest(spec: Spec, letters: str) -> str:
    """Digest of the architecture: equal for every spelling of the pattern and every way to cut, shard and run it.

    Args:
        spec: The spec.
        letters: The expanded pattern, one letter a layer.
    """
    document = spec.model.model_dump(mode="json")
    document["pattern"] = letters
    for section, key in _EXECUTION:
        if document[section] is not None:
            document[section].pop(key, None)
    return digest(normalise(document))


def plan_digest(inputs: Mapping[str, Any], decisions: Mapping[str, Any]) -> str:
    """Digest of the inputs, `training` left out, and the decisions, both as they stand in the file."""
    kept: dict[str, Json] = {key: value for key, value in inputs.items() if key != "training"}
    return digest({"inputs": kept, "decisions": dict(decisions)})
