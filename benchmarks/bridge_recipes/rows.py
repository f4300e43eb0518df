"""`judge`: whether one published recipe fits by the estimate."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import megaplan
from bridge_recipes.document import DEVICES, PER_NODE, NotExpressedError, bridge_document, parts_of
from megaplan.errors import MegaplanError, Severity
from megaplan.importers.megatron.spec import import_megatron

INVALID = "MP914 --world-size "
"""Beginning of the reason at which Megatron itself raises: degrees that do not divide the GPUs, in `initialize_model_parallel`."""


@dataclass(frozen=True)
class Row:
    """One recipe.

    Attributes:
        recipe: Name of the recipe.
        peak: Bytes of its largest rank, reserve of the allocator included; None where no spec says the recipe.
        usable: Bytes that the device has for it; None in the same case.
        reason: The largest column of that rank, or why no spec says the recipe.
        narrow: True if it fits narrowly, as `megaplan estimate` says it.
    """

    recipe: str
    peak: int | None
    usable: int | None
    reason: str
    narrow: bool = False

    @property
    def verdict(self) -> str:
        """`fit`, `not_fit`, `not_expressed`, or `invalid` where no run can have these values."""
        if self.peak is None or self.usable is None:
            return "invalid" if self.reason.startswith(INVALID) else "not_expressed"
        return "fit" if self.peak <= self.usable else "not_fit"


def judge(name: str, recipe: Mapping[str, Any]) -> Row:
    """Estimate one recipe on the device and GPUs of its name."""
    try:
        found = estimate_of(name, recipe)
    except NotExpressedError as error:
        return Row(name, None, None, str(error))
    except MegaplanError as error:
        errors = [item for item in error.diagnostics if item.severity is Severity.ERROR]
        return Row(name, None, None, "; ".join(f"{item.code} {item.detail}" for item in errors).replace("\n", "; "))
    largest = max(found.columns, key=lambda column: found.columns[column])
    return Row(name, found.peak_bytes, found.worst.usable_bytes, str(largest), found.narrow is not None)


def estimate_of(name: str, recipe: Mapping[str, Any]) -> megaplan.Estimate:
    """The estimate of a recipe's spec.

    Raises:
        NotExpressedError: The architecture is not known.
        MegaplanError: No spec says the recipe, or Megatron-Core itself would refuse it.
    """
    parts = parts_of(name)
    device = DEVICES.get(parts["device"], parts["device"])
    changes = [f"device.name={device}", f"device.per_node={PER_NODE.get(parts['device'], 8)}"]
    imported = import_megatron(json.dumps(bridge_document(name, recipe)), f"{name}.json", changes, int(parts["gpus"]))
    return megaplan.estimate(imported.document)


def result(rows: Sequence[Row]) -> dict[str, Any]:
    """Number of recipes that fit, and the others with their reasons."""
    found: dict[str, Any] = {"fit": 0, "not_fit": [], "not_expressed": [], "invalid": []}
    for row in rows:
        if row.verdict == "fit":
            found["fit"] += 1
        else:
            found[row.verdict].append(asdict(row))
    return found
