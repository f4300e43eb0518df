"""`build_budget`: from a spec, its inventory and a layout to the cells of every distinct rank."""

from __future__ import annotations

from megaplan.budget.values import Budget
from megaplan.inventory.tensors import Inventory
from megaplan.layout.values import Layout
from megaplan.spec.models import Spec


def build_budget(spec: Spec, inventory: Inventory, layout: Layout) -> Budget:
    """Bytes of every rank by phase and column, of the tensors of the spec's host.

    Args:
        spec: A checked spec.
        inventory: Its parameter tensors.
        layout: Its slots.

    Returns:
        The budget; ranks with equal cells are listed together, largest peak first.

    Raises:
        MegaplanError: MP311 … MP313 if the schedule cannot run on these degrees; MP504 if the device is unknown.
    """
    if spec.host.name == "megatron":
        from megaplan.budget.megatron import megatron_budget  # noqa: PLC0415 (a job has one host)

        return megatron_budget(spec, inventory, layout)
    if spec.host.name == "torchtitan":
        from megaplan.budget.torchtitan import torchtitan_budget  # noqa: PLC0415

        return torchtitan_budget(spec, inventory, layout)
    from megaplan.budget.megarun import megarun_budget  # noqa: PLC0415

    return megarun_budget(spec, inventory, layout)
