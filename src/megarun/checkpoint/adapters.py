"""Adapters of `lora` in checkpoints: which plan may continue which checkpoint; needs no torch."""

import json
from collections.abc import Collection
from typing import Any

from megaplan.inventory.adapters import A_SUFFIX, B_SUFFIX
from megaplan.plan.inputs import inputs_record
from megaplan.plan.text import MAX_PLAN_BYTES
from megaplan.spec.models import Spec
from megarun.checkpoint.manifest import PLAN, Manifest, read_listed
from megarun.errors import refusal
from megarun.remote import AnyPath

DECIDING = ("rank", "alpha", "families", "base")
"""Keys of `lora` that decide the function; `dtype` is only how frozen parameters are stored."""
OF_BASE = ("base_block", "double_quant")
"""Further ones with a `base`."""


def is_adapter(name: str) -> bool:
    """True if a tensor of this name is A or B of an adapter."""
    return name.endswith((f".{A_SUFFIX}", f".{B_SUFFIX}"))


def check_adapters(path: AnyPath, manifest: Manifest, spec: Spec, saved: Collection[str]) -> None:
    """Refuse a checkpoint whose adapters the plan would drop, or would read as others.

    A checkpoint without adapters fits every plan of its model: it has the base's parameters.

    Args:
        path: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        spec: The plan's.
        saved: Names of the checkpoint's tensors.

    Raises:
        MegaplanError: MP641; MP644 if its plan cannot be read.
    """
    if not any(is_adapter(name) for name in saved):
        return
    found, ours = _saved_lora(path, manifest), inputs_record(spec).get("lora") or {}
    assert isinstance(ours, dict)
    lines = [
        f"lora.{key} = {_shown(ours.get(key))}, the checkpoint's = {_shown(found.get(key))}"
        for key in (*DECIDING, *(OF_BASE if found.get("base") and ours.get("base") else ()))
        if ours.get(key) != found.get(key)
    ]
    if lines:
        hints = ("megarun checkpoint export DIR --format hf --config FILE -o OUT    # merges the adapters",) if spec.lora is None else ()
        raise refusal("MP641", "\n".join(lines), "lora", hints, file=str(path))


def _saved_lora(path: AnyPath, manifest: Manifest) -> dict[str, Any]:
    try:
        found = json.loads(read_listed(path, manifest, PLAN, MAX_PLAN_BYTES))["inputs"].get("lora")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _shown(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value
