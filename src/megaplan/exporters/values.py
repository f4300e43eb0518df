"""Inputs and results of an exporter; every key of the plan is written, or reported as lost."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from megaplan.errors import MegaplanError
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout, Slot
from megaplan.schedules.registry import SCHEDULES
from megaplan.spec.models import Spec

PLANNING_ONLY = frozenset(
    {
        "format",
        "name",
        "serving",
        "device",
        "pools",
        "split",
        "model.pattern",
        "model.num_layers",
        "model.moe.routing_skew",
        "host.fragmentation_percent",
    }
)
"""Keys that affect only estimates or cuts; each exporter writes the layers and cuts itself."""


class InexpressibleError(MegaplanError):
    """Raised for a valid plan to which no run of the host is similar, so that nothing is written (MP920)."""


class Loss(NamedTuple):
    """A setting of the plan that the host cannot express.

    Attributes:
        key: Dotted key of the spec.
        detail: The values, and the host's behaviour instead.
        fix: A change after which nothing is lost, or empty.
        strict: True if a strict export refuses it; false if the host reads no model, so that its own code must match this plan.
    """

    key: str
    detail: str
    fix: str = ""
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Source:
    """A plan to export.

    Attributes:
        spec: Spec of the plan.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec.
    """

    spec: Spec
    inventory: Inventory
    layout: Layout

    def is_of(self, host: str) -> bool:
        """True if the plan is for this host; the exporter then writes the host's own keys."""
        return self.spec.host.name == host

    @property
    def letters(self) -> str:
        """One letter per layer."""
        return "".join(block.family for block in self.inventory.layers)

    @property
    def stages(self) -> tuple[str, ...]:
        """Letters of each slot, in model order."""
        return tuple(self.letters[slot.start : slot.stop] for slot in self.slots())

    def slots(self) -> tuple[Slot, ...]:
        """Slots in model order, of one copy of the model."""
        return self.layout.slots[: self.layout.num_parts]

    @property
    def torch_schedule(self) -> tuple[str, list[Loss]]:
        """The name of the schedule in torch, or of the nearest one that it has."""
        kind = self.spec.schedule.kind
        name = SCHEDULES[kind].torch_name
        if name is not None:
            return name, []
        return "1F1B", [
            Loss("schedule.kind", f"schedule.kind = {kind}: torch's schedules hold one copy of the model", "schedule: {kind: 1f1b}")
        ]


def nodes_of(num_gpus: int, per_node: int) -> tuple[int, int]:
    """Nodes and GPUs of a node, the most that every node has equally many of.

    Args:
        num_gpus: GPUs of a job.
        per_node: GPUs of a node of the device.
    """
    used = max(count for count in range(1, min(per_node, num_gpus) + 1) if num_gpus % count == 0)
    return num_gpus // used, used


@dataclass(frozen=True, slots=True)
class Exported:
    """A launch file.

    Attributes:
        text: The file.
        losses: Settings that the file does not express.
    """

    text: str
    losses: tuple[Loss, ...]


def complete(source: Source, text: str, carried: Collection[str], losses: Collection[Loss]) -> Exported:
    """An export whose losses name every key that is not written and not at its default.

    Args:
        source: The plan.
        text: The file.
        carried: Dotted keys that the file expresses; a section's key covers all its keys.
        losses: Losses that the exporter reported itself.
    """
    reported = [loss.key for loss in losses]
    found = list(losses)
    for key, value in _leaves(source.spec, "", carried):
        if not any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in reported):
            found.append(Loss(key, f"{key} = {_shown(value)}: the host has no counterpart"))
    return Exported(text, tuple(dict.fromkeys(found)))


def _leaves(section: BaseModel, prefix: str, carried: Collection[str]) -> Iterator[tuple[str, Any]]:
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{name}", getattr(section, name)
        if key in carried or key in PLANNING_ONLY:
            continue
        default = field.get_default(call_default_factory=True)
        within = any(other.startswith(f"{key}.") for other in (*carried, *PLANNING_ONLY))
        if isinstance(value, BaseModel) and (within or isinstance(default, BaseModel) or field.is_required()):
            yield from _leaves(value, f"{key}.", carried)
        elif field.is_required() or value != default:
            yield key, value


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "{…}"
    return str(value).lower() if isinstance(value, bool) else str(value)
