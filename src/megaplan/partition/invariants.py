"""The facts that a manual split was decided against, as digests by topic; a changed digest shows that the split is stale (R-25)."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megaplan.inventory.tensors import Inventory
from megaplan.partition.values import StackCosts, stack_costs
from megaplan.spec.models import Spec


def invariant_digests(spec: Spec, inventory: Inventory, costs: StackCosts | None = None) -> dict[str, str]:
    """Digest of each topic a manual split may rest on.

    Args:
        spec: The spec.
        inventory: Parameter tensors of the spec.
        costs: Costs of the layers; FLOPs per token by default.

    Returns:
        Topic to `sha256:` and hex digest. `side_embeddings`: n-gram, structure, platform, relation bias. `recurrent_handling`: the R
        blocks, their positions and recompute policies. `auxiliary_losses`: MTP, routing, and positions of E blocks. `schedule`: kind,
        degrees, microbatches. `costs_X` for each family X of the pattern: position and cost of each of its layers; `costs_head`: cost
        added to the last slot.
    """
    model, features = spec.model, spec.model.features
    weights = costs or stack_costs(spec, inventory)
    positions: dict[str, list[int]] = {}
    for index, block in enumerate(inventory.layers):
        positions.setdefault(block.family, []).append(index)
    topics: dict[str, Any] = {
        "side_embeddings": [_plain(part) for part in (features.ngram, features.structure, features.platform, features.relation_bias)],
        "recurrent_handling": [_plain(model.recurrent), positions.get("R"), spec.recompute.of("R")],
        "auxiliary_losses": [_plain(features.mtp), _plain(model.moe), positions.get("E")],
        "schedule": [_plain(spec.schedule), spec.mesh.pp, spec.mesh.vpp],
        "costs_head": [weights.unit, weights.last],
    }
    for family, layers in positions.items():
        topics[f"costs_{family}"] = [weights.unit, [[index, weights.layers[index]] for index in layers]]
    return {topic: _digest(value) for topic, value in sorted(topics.items())}


def stale_reasons(decided_against: Mapping[str, str], spec: Spec, inventory: Inventory, costs: StackCosts | None = None) -> tuple[str, ...]:
    """The topics that changed since the split was decided, including added and removed ones, sorted.

    Args:
        decided_against: `invariant_digests` at the time of the decision.
        spec: The current spec.
        inventory: Parameter tensors of the spec.
        costs: Current costs of the layers.
    """
    now = invariant_digests(spec, inventory, costs)
    return tuple(sorted(topic for topic in now.keys() | decided_against.keys() if now.get(topic) != decided_against.get(topic)))


def _plain(section: Any) -> Any:
    return None if section is None else section.model_dump(mode="json")


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
