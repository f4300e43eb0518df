"""Refuses plans that the runtime cannot build, before the first process group is created."""

from megaplan.errors import MegaplanError, Severity
from megaplan.plan.document import Decisions
from megaplan.spec.models import Spec
from megaplan.spec.not_built_yet import megarun_refuses
from megarun.errors import refusal

ORDERS = {
    # the order in which a parameter is sharded: by `parallel.groups` first, then the rest by FSDP2
    "ownership_order": ("tp", "pp", "fsdp2", "ep"),
    # `engine.trainer`: stages with their part of each tensor, then the wrappers applied to them
    "code_order": ("pipeline_split", "tensor_parallel", "recompute", "fsdp2_bottom_up", "ddp", "expert_parallel", "optimizer"),
    # `parallel.apply.fsdp`
    "wrap_order": ("experts", "blocks", "units", "stage"),
}
"""This runtime's orders of the steps that a plan's decisions list."""


def refuse_other_orders(decisions: Decisions) -> None:
    """Refuse a plan that decides on a step that this runtime does not have, or on another order of its steps.

    Raises:
        MegaplanError: MP790.
    """
    for name, ours in ORDERS.items():
        planned: tuple[str, ...] = getattr(decisions, name)
        if planned != tuple(step for step in ours if step in planned):
            raise refusal("MP790", f"decisions.{name} = {', '.join(planned)}; megarun's order is {', '.join(ours)}", f"decisions.{name}")


def refuse_unbuilt(spec: Spec) -> None:
    """Refuse a spec that megaplan can estimate and megarun cannot build, or cannot run as planned.

    Raises:
        MegaplanError: MP790 for unsupported settings; MP602 and MP603 for dtypes that torch does not support.
    """
    found = megarun_refuses(spec, severity=Severity.ERROR)
    if found:
        raise MegaplanError(list(found))
