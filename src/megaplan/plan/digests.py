"""Digests of a plan: which architecture, which plan, and what a manual split was decided against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaplan.plan.canonical import Json, digest, normalise
from megaplan.spec.models import Spec

# Settings of the model sections that change how it runs or what it is expected to cost, not the function or its parameters.
_EXECUTION = {("moe", "routing_skew"), ("mamba", "chunk_size"), ("recurrent", "save_every")}


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


def split_basis(spec: Spec, costs: Mapping[str, int]) -> dict[str, str]:
    """A digest of each thing that a manual split may rest on (R-25).

    Args:
        spec: The spec.
        costs: Cost of one layer of each family of the pattern, and of `head`, in FLOPs per token.

    Returns:
        Topic to digest: `side_embeddings`, `recurrent_handling`, `auxiliary_losses`, `schedule`, and `costs_X` of each family X.
    """
    model = spec.model.model_dump(mode="json")
    features = model["features"]
    topics: dict[str, object] = {
        "side_embeddings": [features[key] for key in ("ngram", "structure", "platform", "relation_bias")],
        "recurrent_handling": [model["recurrent"], model["mamba"], spec.recompute.blocks.get("R"), spec.recompute.blocks.get("M")],
        "auxiliary_losses": [features["mtp"], model["moe"] and [model["moe"]["num_experts"], model["moe"]["top_k"]]],
        "schedule": [spec.schedule.model_dump(mode="json"), spec.mesh.pp, spec.mesh.vpp],
    }
    topics |= {f"costs_{family}": cost for family, cost in costs.items()}
    return {topic: digest(normalise(value)) for topic, value in topics.items()}
