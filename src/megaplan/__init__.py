"""megaplan: the memory of each GPU in a training run, and the best cuts of a model into pipeline stages.

    import megaplan

    megaplan.estimate("plans/nam56r-8xh200.yaml").peak_bytes
    megaplan.split("spec.yaml", mesh__pp=4).write("plan.json")

Each name is imported on first use; none of them needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaplan.api.estimate import Estimate, estimate
    from megaplan.api.load import LoadedJob, load
    from megaplan.api.plans import Diff, check, diff
    from megaplan.api.project import Projection, project
    from megaplan.api.rl import rl
    from megaplan.api.rl_search import RlSearch, rl_search
    from megaplan.api.run import run
    from megaplan.api.schedule import Schedule, schedule
    from megaplan.api.search import Search, search
    from megaplan.api.split import InfeasibleError, Split, split
    from megaplan.budget.values import Budget, RankBudget
    from megaplan.columns import Column, Phase
    from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
    from megaplan.goodput.values import RunEstimate
    from megaplan.layout.step_time import PlannedTime
    from megaplan.plan.check import Check
    from megaplan.plan.diff import PlanDiff
    from megaplan.plan.document import PlanDocument
    from megaplan.post_training.values import RlEstimate

__version__ = "0.1.0"

_HOMES = {
    "api.estimate": ("Estimate", "estimate"),
    "api.load": ("LoadedJob", "load"),
    "api.plans": ("Diff", "check", "diff"),
    "api.project": ("Projection", "project"),
    "api.rl": ("rl",),
    "api.rl_search": ("RlSearch", "rl_search"),
    "api.run": ("run",),
    "api.schedule": ("Schedule", "schedule"),
    "api.search": ("Search", "search"),
    "api.split": ("InfeasibleError", "Split", "split"),
    "budget.values": ("Budget", "RankBudget"),
    "columns": ("Column", "Phase"),
    "errors": ("Diagnostic", "Location", "MegaplanError", "Severity"),
    "goodput.values": ("RunEstimate",),
    "layout.step_time": ("PlannedTime",),
    "plan.check": ("Check",),
    "plan.diff": ("PlanDiff",),
    "plan.document": ("PlanDocument",),
    "post_training.values": ("RlEstimate",),
}

__all__ = [
    "Budget",
    "Check",
    "Column",
    "Diagnostic",
    "Diff",
    "Estimate",
    "InfeasibleError",
    "LoadedJob",
    "Location",
    "MegaplanError",
    "Phase",
    "PlanDiff",
    "PlanDocument",
    "PlannedTime",
    "Projection",
    "RankBudget",
    "RlEstimate",
    "RlSearch",
    "RunEstimate",
    "Schedule",
    "Search",
    "Severity",
    "Split",
    "check",
    "diff",
    "estimate",
    "load",
    "project",
    "rl",
    "rl_search",
    "run",
    "schedule",
    "search",
    "split",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"megaplan.{module}"), name)
    raise AttributeError(f"module 'megaplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
