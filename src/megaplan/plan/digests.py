"""Digests of a plan: of the architecture, and of the plan."""

from collections.abc import Mapping
from typing import Any

from megaplan.families.registry import families_of
from megaplan.plan.canonical import Json, digest, normalise
from megaplan.spec.models import Spec

OUTSIDE_DIGEST = frozenset({"training", "run", "post_training"})
"""Sections of a spec about the length, method, price and loop of training."""


def model_digest(spec: Spec, letters: str) -> str:
    """Digest of the architecture: equal for every spelling of the pattern and every choice of cuts, mesh and runtime.

    Args:
        spec: The spec.
        letters: The expanded pattern, one letter per layer.
    """
    document = spec.model.model_dump(mode="json")
    document["pattern"] = letters
    for family, _ in families_of(spec.model):
        for key in family.execution_keys:
            document[family.section].pop(key, None)
    return digest(normalise(document))


def plan_digest(inputs: Mapping[str, Any], decisions: Mapping[str, Any]) -> str:
    """Digest of the inputs, without `OUTSIDE_DIGEST`, and of the decisions, both as written in the file."""
    kept: dict[str, Json] = {key: value for key, value in inputs.items() if key not in OUTSIDE_DIGEST}
    return digest({"inputs": kept, "decisions": dict(decisions)})
