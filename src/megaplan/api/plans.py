"""`megaplan.diff` and `megaplan.check`: two plans compared, and a plan against what would be decided today."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from megaplan.api.load import MAPPING_NAME, PLAN_NAME, FilePath, as_plan, read_costs_of
from megaplan.errors import Diagnostic
from megaplan.plan.causes import diff_with_causes
from megaplan.plan.check import Check, check_plan
from megaplan.plan.diff import PlanDiff
from megaplan.plan.read import LoadedPlan, inspect_plan, parse_plan

if TYPE_CHECKING:
    from megaplan.layout.step_time import PlannedTime
    from megaplan.plan.document import PlanDocument

PlanSource: TypeAlias = "FilePath | Mapping[str, Any] | PlanDocument"
"""A plan: a file (`-` is standard input), its document as plain values, or the plan itself."""


@dataclass(frozen=True)
class Diff:
    """Changes from one plan to another.

    Attributes:
        before: The current plan.
        after: The proposed plan.
        changes: Cuts that moved, owners, decisions, inputs, every rank's bytes by column, and the causes of each column's change.
        diagnostics: Warnings of reading both.
    """

    before: PlanDocument
    after: PlanDocument
    changes: PlanDiff
    diagnostics: tuple[Diagnostic, ...]

    @property
    def same(self) -> bool:
        """True if nothing differs."""
        return self.changes.same

    @property
    def fits(self) -> tuple[bool, bool]:
        """True if every rank fits, before and after."""
        return self.changes.fits

    @cached_property
    def step_times(self) -> tuple[PlannedTime | str, PlannedTime | str]:
        """The time of a step in seconds, before and after; the reason (text) where none is stated."""
        from megaplan.layout.step_time import planned_time  # noqa: PLC0415

        before, after = self.before, self.after
        return planned_time(before.spec, before.spans, before.inventory), planned_time(after.spec, after.spans, after.inventory)


def diff(before: PlanSource, after: PlanSource, /) -> Diff:
    """Compare two plans.

    Args:
        before: The current plan: a path, a mapping, or a `PlanDocument`.
        after: The proposed plan.

    Raises:
        MegaplanError: One is no plan, of another version, or its keys or types are wrong. A plan whose digest does not hold is compared;
            `changes.tampered` says so.
        TypeError: One is of another type.

    Examples:
        >>> import megaplan
        >>> found = megaplan.diff("plans/nam56r-8xh200-equal.json", "plans/nam56r-8xh200.json")
        >>> found.same, found.fits, sum(move.num_layers for move in found.changes.moves) > 0
        (False, (True, True), True)
    """
    (old_name, old), (new_name, new) = _inspected(before), _inspected(after)
    tampered = tuple((file, found) for file, loaded in ((old_name, old), (new_name, new)) for found in loaded.tampered)
    return Diff(old.plan, new.plan, diff_with_causes(old.plan, new.plan, tampered), (*old.warnings, *new.warnings))


def check(plan: PlanSource, /, *, costs: FilePath | None = None) -> Check:
    """Plan a plan's inputs again and compare: changed decisions, digest, stale reasons, and whether it still fits.

    Args:
        plan: A path, a mapping, or a `PlanDocument`.
        costs: The costs file that decides the cuts (times in ns); without it a plan that was cut by a costs file keeps its cuts (MP415).

    Returns:
        What was found; `passes(strict=...)` says whether it is good enough.

    Raises:
        MegaplanError: It is no plan, its inputs cannot be planned any more, or the costs file is wrong.
        TypeError: `plan` is of another type.

    Examples:
        >>> import megaplan
        >>> found = megaplan.check("plans/tiny-hybrid.json")
        >>> found.passes(strict=True), found.findings
        (True, ())
    """
    name, loaded = _inspected(plan)
    measured = read_costs_of(costs, name, loaded.plan.spec, loaded.plan.inventory) if costs is not None else None
    return check_plan(loaded, name, measured)


def _inspected(source: PlanSource) -> tuple[str, LoadedPlan]:
    """The plan, what reading it found, and its name in diagnostics."""
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        return path, inspect_plan(path)
    if isinstance(source, Mapping):
        return MAPPING_NAME, parse_plan(json.dumps(source), MAPPING_NAME)
    return PLAN_NAME, LoadedPlan(as_plan(source), (), ())
