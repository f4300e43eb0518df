"""Differences between the model of a config and that of a plan, limited to settings that decide its function or its tensors."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megaplan.importers.hf import ImportedConfig, text_fields
from megaplan.spec.models import Spec
from megarun.huggingface.names import NAMES, Names

_OWN = (
    *("_loss_coefficient", "routing_skew", "capacity_factor", "capacity_drop", "loss_weight", "chunk_size", "save_every", "pattern"),
    "expert_bias_rate",
)
"""Keys that a config does not decide, or that change no weight."""


def model_differences(imported: ImportedConfig, config: Mapping[str, Any], spec: Spec) -> list[str]:
    """The settings of a config's model that differ from those of a plan's, one per line; the type has names for its tensors."""
    theirs, ours = (each.model.model_dump(mode="json") for each in (imported.loaded.spec, spec))
    found = list(_depths_different(NAMES[imported.family], text_fields(config), ours["features"].pop("mtp", None)))
    theirs["features"].pop("mtp", None)
    theirs.pop("towers", None)  # an encoder's weights are not converted
    return [*found, *_different("model", theirs, ours)]


def _depths_different(names: Names, config: Mapping[str, Any], mtp: Mapping[str, Any] | None) -> Iterator[str]:
    """Prediction depths of the plan that the model lacks; a plan may omit the model's."""
    if mtp is None:
        return
    if names.depths is None:
        yield "features.mtp is given in the plan, and no names of prediction modules of this model type are public"
        return
    has = config.get(names.depths.count, 1)
    if mtp["depth"] != has:
        yield f"{names.depths.count} = {has} in the config, features.mtp.depth = {mtp['depth']} in the plan"
    elif names.depths.most is not None and has > names.depths.most:
        yield f"features.mtp.depth = {has}, but this model type has names for {names.depths.most} at most"
    if not mtp.get("normed_input"):
        yield "features.mtp.normed_input = false in the plan, but the published modules read the final norm's output: set it to true"


def _different(key: str, theirs: Any, ours: Any) -> Iterable[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted(theirs.keys() | ours.keys()):
            yield from _different(f"{key}.{name}", theirs.get(name), ours.get(name))
    elif theirs != ours and not key.endswith(_OWN):
        yield f"{key} = {json.dumps(theirs)} in the config, {json.dumps(ours)} in the plan"
