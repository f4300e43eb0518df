"""`megaplan.diff` and `megaplan.check`: `diff` compares two plans, and `check` compares a plan with today's decisions."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from megaplan.api.load import MAPPING_NAME, PLAN_NAME, FilePath, as_plan, load_to_split, read_costs_of
from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity
from megaplan.layout.step_time import planned_time, time_text
from megaplan.plan.causes import diff_with_causes
from megaplan.plan.check import Check, check_plan
from megaplan.plan.diff import PlanDiff, changed_inputs
from megaplan.plan.inputs import inputs_record
from megaplan.plan.read import LoadedPlan, inspect_plan, parse_plan
from megaplan.plan.text import MAX_PLAN_BYTES
from megaplan.results import Result, Row
from megaplan.spec.read import STDIN, read_text

if TYPE_CHECKING:
    from megaplan.api.parts import JobParts
    from megaplan.layout.step_time import PlannedTime
    from megaplan.plan.document import PlanDocument

MOST_CHANGES = 6
"""Edited keys that are named."""
PlanSource: TypeAlias = "FilePath | Mapping[str, Any] | PlanDocument"
"""A plan: a file (`-` is standard input), its document as plain values, or the plan itself."""


@dataclass(frozen=True, repr=False)
class Diff(Result):
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

    def _summary(self) -> Sequence[str]:
        return (" → ".join(dict.fromkeys(self.changes.names)), self.changes.verdict, " → ".join(map(time_text, self.step_times)))

    def _rows(self) -> Sequence[Row]:
        return [
            {"column": str(each.column), "before_bytes": each.before, "after_bytes": each.after, "change_bytes": each.after - each.before}
            for each in self.changes.growth
        ]

    def to_dict(self) -> dict[str, Any]:
        """The document that `megaplan diff --json` prints."""
        from megaplan.plan.diff_document import diff_document  # noqa: PLC0415

        before, after = (part.as_document() for part in self.parts)
        pairs = {name: {"before": before[name], "after": after[name]} for name in before}
        return {**diff_document(self.changes, self.step_times), **pairs}

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
        before, after = self.before, self.after
        return planned_time(before.spec, before.spans, before.inventory), planned_time(after.spec, after.spans, after.inventory)

    @cached_property
    def parts(self) -> tuple[JobParts, JobParts]:
        """Traffic between ranks, whole run and post-training plan, before and after."""
        from megaplan.api.parts import parts_of  # noqa: PLC0415

        old, new = self.step_times
        return (
            parts_of(self.before.spec, self.before.inventory, self.before.layout(), old),
            parts_of(self.after.spec, self.after.inventory, self.after.layout(), new),
        )


def diff(before: PlanSource, after: PlanSource, /) -> Diff:
    """Compare two plans.

    Args:
        before: The current plan: a path, a mapping, or a `PlanDocument`.
        after: The proposed plan.

    Raises:
        MegaplanError: One is not a plan, of another version, or its keys or types are wrong. A plan whose digest does not hold is compared;
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


def check(plan: PlanSource, /, *, costs: FilePath | None = None, spec: FilePath | None = None, signer: FilePath | None = None) -> Check:
    """Plan a plan's inputs again and compare: changed decisions, digest, stale reasons, whether it fits and whether its spec has changed.

    Args:
        plan: A path, a mapping, or a `PlanDocument`.
        costs: The costs file that decides the cuts (times in ns); without it a plan that was cut by a costs file keeps its cuts (MP415).
        spec: The spec that the plan was made of; if None, a file of the plan's name that ends in `.yaml` or `.yml` and holds a spec of its
            name. A key that was edited since is found (MP416).
        signer: A public key in PEM (Ed25519): the plan, a file, must have its signature in the file PLAN.sig (MP417).

    Returns:
        What was found; `passes(strict=...)` says whether it is good enough.

    Raises:
        MegaplanError: It is not a plan, its inputs cannot be planned any more, or the costs file or the public key is wrong.
        TypeError: `plan` is of another type, or no file although it must be signed.

    Examples:
        >>> import megaplan
        >>> found = megaplan.check("plans/tiny-hybrid.json")
        >>> found.passes(strict=True), found.findings
        (True, ())
    """
    name, loaded, forged = (*_inspected(plan), ()) if signer is None else _verified(plan, signer)
    measured = read_costs_of(costs, name, loaded.plan.spec, loaded.plan.inventory) if costs is not None else None
    found = check_plan(loaded, name, measured)
    edited = _edited(loaded.plan, name, spec)
    return replace(found, findings=(*forged, *found.findings, *edited)) if forged or edited else found


def _edited(plan: PlanDocument, name: str, path: FilePath | None) -> tuple[Diagnostic, ...]:
    """MP416 if the spec file has other values than the plan's spec; a warning if the digest covers none of them."""
    given = path is not None
    if path is None:
        path = next((each for ending in (".yaml", ".yml") if os.path.isfile(each := Path(name).with_suffix(ending))), None)
        if path is None:
            return ()
    spec = load_to_split(path, plan.overrides, None).spec
    if not given and spec.name != plan.spec.name:
        return ()
    changes = changed_inputs(plan, inputs_record(spec))
    if not changes:
        return ()
    shown = [f"{change.key}: {change.before} → {change.after}" for change in changes[:MOST_CHANGES]]
    if len(changes) > MOST_CHANGES:
        shown.append(f"and {len(changes) - MOST_CHANGES} more")
    only_training = all(change.key.startswith("training.") for change in changes)
    severity = Severity.WARNING if only_training else Severity.ERROR
    again = shlex.join(["megaplan", "split", os.fspath(path), *(word for text in plan.overrides for word in ("--set", text)), "-o", name])
    return (
        diagnostic(
            "MP416",
            "\n".join([f"{os.fspath(path)} differs; the plan's value → the spec's:", *shown]),
            Location(file=name),
            (again,),
            severity,
        ),
    )


def _verified(source: PlanSource, signer: FilePath) -> tuple[str, LoadedPlan, tuple[Diagnostic, ...]]:
    """The plan of a file, its name, and MP417 if the text that was parsed has no signature of the signer."""
    from megaplan.plan.signature import signature_problem  # noqa: PLC0415  (needs an optional package)

    if not isinstance(source, (str, os.PathLike)) or os.fspath(source) == STDIN:
        raise TypeError("a signature belongs to a plan file: give its path")
    path = os.fspath(source)
    text = read_text(path, MAX_PLAN_BYTES)
    problem = signature_problem(text, path, os.fspath(signer))
    return path, parse_plan(text, path), (problem,) if problem is not None else ()


def _inspected(source: PlanSource) -> tuple[str, LoadedPlan]:
    """The plan, the diagnostics of reading it, and its name in diagnostics."""
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        return path, inspect_plan(path)
    if isinstance(source, Mapping):
        return MAPPING_NAME, parse_plan(json.dumps(source), MAPPING_NAME)
    return PLAN_NAME, LoadedPlan(as_plan(source), (), ())
