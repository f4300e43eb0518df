"""`diff_plans`: the differences between two plans as a value; `cli` renders it.

Decisions and estimates are compared exactly, since both are integers. A layer's place is its (pp rank, chunk), never a list index, and
a rank's is its number in the job, so a diff of two meshes of one size lines up GPU by GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from megaplan.budget.fit import Verdict
from megaplan.columns import Column
from megaplan.errors import Diagnostic
from megaplan.inventory.towers import by_part
from megaplan.layout.ranks import joined, num_ranks, runs_of
from megaplan.plan.digests import OUTSIDE_DIGEST
from megaplan.plan.document import Estimates, PlanDocument, RankEstimate, SpanField, Stage
from megaplan.wording import plural

if TYPE_CHECKING:
    from megaplan.partition.values import StackCosts

Place = tuple[int, int]
"""(pp rank, chunk)."""

# Decisions that are compared by value; stages are compared as moves, and the split's certificate and bases separately.
_COMPARED = ("pattern", "mesh", "schedule", "precision", "optimizer", "recompute", "ownership_order", "code_order", "wrap_order", "host")


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value at a dotted key, before and after; None if the key is absent."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class CutMove:
    """Consecutive layers [start, stop) that moved from one slot to another, with their letters."""

    start: int
    stop: int
    letters: str
    before: Place
    after: Place

    @property
    def num_layers(self) -> int:
        """Layers that moved."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class OwnerMove:
    """A block outside the layers, and the slots that hold it."""

    block: str
    before: tuple[Place, ...]
    after: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class RankChange:
    """Ranks that share both budgets, with these budgets; None if the rank is in one plan only.

    Attributes:
        ranks: Half-open runs, in the later plan's numbering if the plans number ranks differently.
        before: Budget in the first plan.
        after: Budget in the second plan.
        stages: Half-open runs of pp ranks, in the same plan.
    """

    ranks: tuple[SpanField, ...]
    before: RankEstimate | None
    after: RankEstimate | None
    stages: tuple[SpanField, ...] = ((0, 1),)

    @property
    def num_ranks(self) -> int:
        """Ranks of this group."""
        return num_ranks(self.ranks)

    @property
    def columns(self) -> tuple[ValueChange, ...]:
        """Columns whose bytes at the peak differ, in the budget's order."""
        before = self.before.columns if self.before else {}
        after = self.after.columns if self.after else {}
        pairs = ((column.key, before.get(column.key, 0), after.get(column.key, 0)) for column in Column)
        return tuple(ValueChange(key, old, new) for key, old, new in pairs if old != new)

    @property
    def changed(self) -> bool:
        """True if anything in the budget differs."""
        if self.before is None or self.after is None:
            return True
        exclude = {"ranks", "coordinate"}
        return self.before.model_dump(exclude=exclude) != self.after.model_dump(exclude=exclude)

    @property
    def flip(self) -> tuple[bool, bool] | None:
        """(fits before, fits after) if they differ."""
        if self.before is None or self.after is None or self.before.fits == self.after.fits:
            return None
        return self.before.fits, self.after.fits


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes of one column over all ranks, before and after, and the changes that cause the difference (R-49).

    `causes`: (changed keys, bytes that this change alone adds over all ranks); empty if not computed.
    """

    column: Column
    before: int
    after: int
    causes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class PlanDiff:
    """All differences, in the order of importance."""

    names: tuple[str, str]
    digests: tuple[str, str]
    tampered: tuple[tuple[str, Diagnostic], ...]
    verdicts: tuple[Verdict, Verdict]
    stale: tuple[str, ...]
    moves: tuple[CutMove, ...]
    owners: tuple[OwnerMove, ...]
    decisions: tuple[ValueChange, ...]
    split: tuple[ValueChange, ...]
    ranks: tuple[RankChange, ...]
    growth: tuple[Growth, ...]
    inputs: tuple[ValueChange, ...]
    training: tuple[ValueChange, ...]
    other: tuple[ValueChange, ...] = field(default=())

    @property
    def fits(self) -> tuple[bool, bool]:
        """True for each of the two plans that fits."""
        before, after = (verdict != "does not fit" for verdict in self.verdicts)
        return before, after

    @property
    def flips(self) -> tuple[RankChange, ...]:
        """Ranks that fitted and no longer do, or the reverse, losses first."""
        return tuple(sorted((rank for rank in self.ranks if rank.flip), key=lambda rank: rank.flip != (True, False)))

    @property
    def same(self) -> bool:
        """True if the two plans are equal in every field."""
        changes = (self.tampered, self.stale, self.moves, self.owners, self.decisions, self.split, self.ranks, self.inputs, self.training)
        return not any(changes) and not self.other

    @property
    def verdict(self) -> str:
        """The result of the comparison in one sentence."""
        if self.same:
            return "no difference"
        lost, won = (sum(rank.num_ranks for rank in self.flips if rank.flip == flip) for flip in ((True, False), (False, True)))
        before, after = self.verdicts
        fits = {
            (True, True): f"{before} before and after" if before == after else f"{before} before, {after} after",
            (False, False): "fits neither before nor after",
            (True, False): f"{before} before, DOES NOT FIT after",
            (False, True): f"did not fit before, {after} after",
        }[self.fits]
        parts = [fits]
        if lost and self.fits != (True, False):
            parts.append(f"{plural(lost, 'rank')} no longer fit")
        if won and self.fits != (False, True):
            parts.append(f"{plural(won, 'rank')} now fit")
        if moved := sum(move.num_layers for move in self.moves):
            parts.append(f"{plural(moved, 'layer')} moved")
        if not self.ranks:
            parts.append("no rank's memory changes")
        if not any((self.moves, self.owners, self.decisions, self.split, self.inputs, self.ranks, self.tampered, self.other)):
            parts = ["only `training` differs: the same plan"]
        return "; ".join(parts)

    def __repr__(self) -> str:
        """The verdict."""
        return f"PlanDiff: {self.names[0]} and {self.names[1]}: {self.verdict}"


def diff_plans(before: PlanDocument, after: PlanDocument, tampered: tuple[tuple[str, Diagnostic], ...] = ()) -> PlanDiff:
    """Differences from `before` to `after`.

    Args:
        before: The current plan.
        after: The proposed plan.
        tampered: Digest problems found while reading the two, with the file's name.
    """
    ranks = tuple(change for change in _rank_changes(_by_stage(before), _by_stage(after)) if change.changed)
    old_inputs, new_inputs = dict(before.inputs), dict(after.inputs)
    old_outside, new_outside = ({key: inputs.pop(key, {}) for key in OUTSIDE_DIGEST} for inputs in (old_inputs, new_inputs))
    return PlanDiff(
        names=(before.spec.name, after.spec.name),
        digests=(before.digests.plan, after.digests.plan),
        tampered=tampered,
        verdicts=(before.verdict, after.verdict),
        stale=stale_topics(after, since=before),
        moves=_moves(before, after),
        owners=_owners(before.decisions.stages, after.decisions.stages),
        decisions=tuple(_decisions(before, after)),
        split=tuple(_changes(_part(before, "split"), _part(after, "split"), ("split",))),
        ranks=ranks,
        growth=_growth(before, after),
        inputs=tuple(_changes(old_inputs, new_inputs)),
        training=tuple(_changes(old_outside, new_outside)),
        other=tuple(_other(before, after)),
    )


def changed_inputs(plan: PlanDocument, inputs: dict[str, Any]) -> tuple[ValueChange, ...]:
    """Keys of a spec's record whose values differ from those of the plan."""
    return tuple(_changes(dict(plan.inputs), inputs))


def stale_topics(plan: PlanDocument, since: PlanDocument | None = None, costs: StackCosts | None = None) -> tuple[str, ...]:
    """Topics whose facts changed since a manual split was decided (R-25); empty in the other modes.

    Args:
        plan: The plan with the current inputs.
        since: An earlier plan; if its split has the same reason, its recorded facts count.
        costs: Costs of the layers; FLOPs by default. Costs of a plan that was cut by a costs file are then no topic.
    """
    split = plan.decisions.split
    if split.mode != "manual":
        return ()
    from megaplan.partition.invariants import stale_reasons  # noqa: PLC0415  (only a manual split needs the model's costs)

    then = split.decided_against
    if since is not None and since.decisions.split.mode == "manual" and since.decisions.split.reason == split.reason:
        then = since.decisions.split.decided_against
    stale = stale_reasons(then, plan.spec, plan.inventory, costs)
    if split.costs is not None and costs is None:
        return tuple(topic for topic in stale if not topic.startswith("costs_"))
    return stale


def _part(plan: PlanDocument, name: str) -> Any:
    return plan.decisions.model_dump(mode="json")[name]


def _changes(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[ValueChange]:
    """Leaves at which two objects differ; arrays count as leaves."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from _changes(before.get(key), after.get(key), (*path, key))
    elif before != after:
        yield ValueChange(".".join(path), before, after)


def _decisions(before: PlanDocument, after: PlanDocument) -> Iterator[ValueChange]:
    for part in _COMPARED:
        yield from _changes(_part(before, part), _part(after, part), (part,))


def _other(before: PlanDocument, after: PlanDocument) -> Iterator[ValueChange]:
    """Differences of format, overrides, and estimates outside the ranks."""
    yield from _changes(before.format_minor, after.format_minor, ("format_minor",))
    yield from _changes(list(before.overrides), list(after.overrides), ("overrides",))
    yield from _changes(before.digests.model, after.digests.model, ("digests", "model"))
    old, new = (_estimates_outside_ranks(plan.estimates) for plan in (before, after))
    yield from _changes(old, new, ("estimates",))


def _estimates_outside_ranks(estimates: Estimates) -> dict[str, Any]:
    parts = estimates.model_dump(mode="json", include={"device", "totals", "serving"})
    return {**parts, "parameters": {f"slot {stage.slot}": stage.parameters for stage in estimates.stages}}


def _moves(before: PlanDocument, after: PlanDocument) -> tuple[CutMove, ...]:
    """Layers whose place changed, as runs; empty if the two models have different layers, because then no layer is the same."""
    letters = after.decisions.pattern.expanded
    if before.decisions.pattern.expanded != letters:
        return ()
    old, new = _places(before.decisions.stages), _places(after.decisions.stages)
    moves: list[CutMove] = []
    for layer, letter in enumerate(letters):
        if layer not in old or layer not in new or old[layer] == new[layer]:  # a plan edited by hand may have lost a layer
            continue
        last = moves[-1] if moves else None
        if last and last.stop == layer and (last.before, last.after) == (old[layer], new[layer]):
            moves[-1] = CutMove(last.start, layer + 1, last.letters + letter, last.before, last.after)
        else:
            moves.append(CutMove(layer, layer + 1, letter, old[layer], new[layer]))
    return tuple(moves)


def _places(stages: tuple[Stage, ...]) -> dict[int, Place]:
    """The places of each layer."""
    return {layer: (stage.pp_rank, stage.chunk) for stage in stages for layer in range(*stage.layers)}


def _owners(before: tuple[Stage, ...], after: tuple[Stage, ...]) -> tuple[OwnerMove, ...]:
    old, new = _holders(before), _holders(after)
    return tuple(
        OwnerMove(block, old.get(block, ()), new.get(block, ()))
        for block in dict.fromkeys((*old, *new))
        if old.get(block) != new.get(block)
    )


def _holders(stages: tuple[Stage, ...]) -> dict[str, tuple[Place, ...]]:
    holders: dict[str, tuple[Place, ...]] = {}
    for stage in stages:
        for block in by_part(stage.owns):
            holders[block] = (*holders.get(block, ()), (stage.pp_rank, stage.chunk))
    return holders


class _Staged(NamedTuple):
    """The budgets of a plan, and the number of ranks of a stage; stages are runs of consecutive ranks."""

    budgets: tuple[RankEstimate, ...]
    pp: int
    num_ranks: int

    def stages_of(self, runs: tuple[SpanField, ...]) -> tuple[SpanField, ...]:
        """The pp ranks of these ranks."""
        width = max(1, self.num_ranks // self.pp)
        return runs_of(sorted({stage for start, stop in runs for stage in range(start // width, (stop - 1) // width + 1)}))

    def worst(self) -> dict[int, RankEstimate]:
        """The worst budget of each stage."""
        return {stage: each for each in reversed(self.budgets) for run in self.stages_of(each.ranks) for stage in range(*run)}

    def within(self, stages: list[int]) -> tuple[SpanField, ...]:
        """The ranks of stages."""
        width = max(1, self.num_ranks // self.pp)
        return joined([(stage * width, (stage + 1) * width) for stage in stages])


def _by_stage(plan: PlanDocument) -> _Staged:
    budgets = plan.estimates.ranks
    return _Staged(budgets, plan.spec.mesh.pp, max((stop for rank in budgets for _, stop in rank.ranks), default=0))


def _rank_changes(before: _Staged, after: _Staged) -> Iterator[RankChange]:
    """Groups of ranks with one budget before and one after, worst after first; of plans that number ranks differently a stage's worst."""
    if before.num_ranks == after.num_ranks:
        yield from _by_number(before, after)
        return
    pairs: dict[tuple[int, int], tuple[RankEstimate | None, RankEstimate | None, list[int]]] = {}
    old, new = before.worst(), after.worst()
    for stage in sorted(old.keys() | new.keys()):
        left, right = old.get(stage), new.get(stage)
        pairs.setdefault((id(left), id(right)), (left, right, []))[2].append(stage)
    for left, right, stages in pairs.values():
        yield RankChange((after if right else before).within(stages), left, right, runs_of(stages))


def _by_number(before: _Staged, after: _Staged) -> Iterator[RankChange]:
    for right in after.budgets:
        for left in before.budgets:
            shared = _intersection(left.ranks, right.ranks)
            if shared:
                yield RankChange(shared, left, right, after.stages_of(shared))


def _intersection(left: tuple[SpanField, ...], right: tuple[SpanField, ...]) -> tuple[SpanField, ...]:
    runs = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return tuple(sorted((start, stop) for start, stop in runs if start < stop))


def _growth(before: PlanDocument, after: PlanDocument) -> tuple[Growth, ...]:
    old, new = column_totals(before.estimates), column_totals(after.estimates)
    changed = (Growth(column, old[column], new[column]) for column in Column if old[column] != new[column])
    return tuple(sorted(changed, key=lambda growth: growth.before - growth.after))


def column_totals(estimates: Estimates) -> dict[Column, int]:
    """Bytes of each column at the ranks' own peaks, summed over all ranks."""
    totals = dict.fromkeys(Column, 0)
    for rank in estimates.ranks:
        for column in Column:
            totals[column] += num_ranks(rank.ranks) * rank.columns[column.key]
    return totals
