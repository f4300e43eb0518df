"""Plan files: the document, its canonical text, reading with every check, making one, and comparing two.

The public names are loaded on first use: a command that only reads a plan builds no model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaplan.plan.check import Check, check_plan
    from megaplan.plan.diff import PlanDiff, diff_plans
    from megaplan.plan.document import PlanDocument
    from megaplan.plan.make import make_plan, plan_text, replan, write_plan
    from megaplan.plan.read import LoadedPlan, inspect_plan, read_plan

__all__ = [
    "Check",
    "LoadedPlan",
    "PlanDiff",
    "PlanDocument",
    "check_plan",
    "diff_plans",
    "inspect_plan",
    "make_plan",
    "plan_text",
    "read_plan",
    "replan",
    "write_plan",
]

_HOMES = {
    "check": ("Check", "check_plan"),
    "diff": ("PlanDiff", "diff_plans"),
    "document": ("PlanDocument",),
    "make": ("make_plan", "plan_text", "replan", "write_plan"),
    "read": ("LoadedPlan", "inspect_plan", "read_plan"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"megaplan.plan.{module}"), name)
    raise AttributeError(f"module 'megaplan.plan' has no attribute {name!r}")
