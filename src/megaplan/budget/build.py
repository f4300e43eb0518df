"""`build_budget`: from a spec, its inventory and a layout to the cells of every distinct rank."""

from __future__ import annotations

from megaplan.budget.values import Budget
from megaplan.inventory.tensors import Inventory
from megaplan.layout.values import Layout
from megaplan.spec.models import Spec


def build_budget(spec: Spec, inventory: Inventory, layout: Layout) -> Budget:
    """Bytes of every rank by phase and column, for the tensors of the spec's host.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec.

    Returns:
        The budget; ranks with equal cells are listed together, largest peak first.

    Raises:
        MegaplanError: MP311 … MP313 if the schedule cannot run on these degrees; MP504 if the device is unknown.
    """
    budget: Budget = spec.host.kind.budget(spec, inventory, layout)
    return budget
