"""The results of a search: rows with their figures, reasons against other layouts, and the certificate."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from time import monotonic
from typing import Any, NamedTuple

from megaplan.budget.peaks import build_budget
from megaplan.cost.model import flops_per_token
from megaplan.cost.replay import BUBBLE, EXPOSED
from megaplan.cost.step.predict import GATHERS, WAITS
from megaplan.exploration.engine import Explored
from megaplan.exploration.evaluate import UNLIMITED, Evaluator
from megaplan.exploration.space import HOST_KEYS
from megaplan.exploration.values import Exact, LayoutChoice, Outcome, without_manual_cuts
from megaplan.layout.build import build_layout
from megaplan.layout.step_time import planned_time
from megaplan.partition.memory import Memory
from megaplan.results import Result, Row, verdict_text
from megaplan.spec.models import Spec
from megaplan.spec.pools import parts_of, peak_flops
from megaplan.units import format_bytes, format_figure, format_ns
from megaplan.wording import argument

AXES = ("pp", "tp", "cp", "ep", "etp", "dp_shard", "micro_batch", "kind")
NAMES = {"micro_batch": "batch.micro_batch_size", "kind": "schedule.kind"}
MAX_CLASSES = 24
COLUMNS_SECONDS = 0.4
"""Time for budgets that only name the largest column of layouts that do not fit: models of thousands of layers need more for all."""


class PoolPeak(NamedTuple):
    """The fullest rank on one type of device.

    Attributes:
        device: Name of the device.
        peak_bytes: Bytes at its peak.
        headroom_bytes: Usable bytes less the peak.
    """

    device: str
    peak_bytes: int
    headroom_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class LayoutRow(Result):
    """A layout of the result.

    Attributes:
        exact: The layout with its policy, cuts, time and memory.
        spec: Spec of the row; the cuts are manual, with the search as their reason.
        asked: The spec that was searched.
        step_seconds: Modelled time of an optimizer step.
        tokens_per_second_per_device: Tokens of the step over seconds and devices.
        mfu: Model FLOPs over the peak of the dtype.
        peak_bytes: The largest peak of any rank.
        headroom_bytes: Usable bytes less the peak.
        bubble_seconds: The term `bubble`.
        exposed_seconds: Communication that a rank waits for.
        terms: Seconds of the step by term.
        pareto: True if no other row is at least as fast with more headroom.
        pools: Peak and headroom on each type of device, in the order of the pipeline; empty if all ranks have one type.
    """

    exact: Exact
    spec: Spec
    asked: Spec
    step_seconds: float
    tokens_per_second_per_device: float
    mfu: float
    peak_bytes: int
    headroom_bytes: int
    bubble_seconds: float
    exposed_seconds: float
    terms: dict[str, float]
    pareto: bool
    pools: tuple[PoolPeak, ...] = ()

    def _summary(self) -> Sequence[str]:
        fits = self.headroom_bytes >= 0
        rate = f"{self.tokens_per_second_per_device:,.0f} tokens/s per device, MFU {100 * self.mfu:.1f} %"
        return (
            f"{self.spec.mesh.degrees_text or 'one device'}, micro-batch {self.exact.layout.micro_batch}",
            verdict_text(fits, self.peak_bytes, self.headroom_bytes),
            f"step {format_figure(self.step_seconds)} s, {rate}",
        )

    def _rows(self) -> Sequence[Row]:
        return [{"term": name, "time_seconds": seconds} for name, seconds in self.terms.items()]

    def to_dict(self) -> dict[str, Any]:
        """The row as the document of a search has it, without its plan and command."""
        layout, policy = self.exact.layout, self.exact.policy
        return {
            "step_seconds": round(self.step_seconds, 9),
            "tokens_per_second_per_device": round(self.tokens_per_second_per_device, 1),
            "mfu": round(self.mfu, 4),
            "peak_bytes": self.peak_bytes,
            "headroom_bytes": self.headroom_bytes,
            "bubble_seconds": round(self.bubble_seconds, 6),
            "exposed_communication_seconds": round(self.exposed_seconds, 6),
            "terms": {name.replace(" ", "_"): round(seconds, 6) for name, seconds in self.terms.items()},
            "pareto": self.pareto,
            **({"pools": [pool._asdict() for pool in self.pools]} if self.pools else {}),
            "mesh": {name: getattr(layout, name) for name in ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")},
            "schedule": {"kind": layout.kind, "num_microbatches": layout.num_microbatches, "micro_batch_size": layout.micro_batch},
            "recompute": dict(policy.recompute),
            "spans": [list(span) for span in self.exact.spans],
            "set": list(self.changes),
        }

    @property
    def changes(self) -> tuple[str, ...]:
        """`KEY=VALUE` texts of every decision of the search, except cuts; manual cuts of the spec, which no other layout can have, end."""
        ended = _differing(self.asked, without_manual_cuts(self.spec, ""), MANUAL) if self.asked.split.mode == "manual" else ()
        return (*self.decisions, *ended)

    @property
    def decisions(self) -> tuple[str, ...]:
        """The same, without the cuts."""
        return (*changes_of(self.spec), *_differing(self.asked, self.spec, FURTHER))


@dataclass(frozen=True, slots=True)
class Lost:
    """A class of layouts without a place among the rows.

    Attributes:
        name: Text such as `mesh.tp=8`.
        count: Number of layouts or combinations.
        reason: illegal, out of memory, slower, or, where headroom is the objective, less headroom.
        detail: The equation with its diagnostic's code; the column and by how much it exceeds;
            by how much slower and the term; or both headrooms.
        example: A layout of the class.
    """

    name: str
    count: int
    reason: str
    detail: str
    example: dict[str, Any]


def rows_of(found: Explored, evaluator: Evaluator) -> tuple[LayoutRow, ...]:
    """The rows with their figures."""
    exact = found.rows
    rows = []
    for one in exact:
        faster = [other for other in exact if other.step_ns <= one.step_ns and other is not one]
        rows.append(row_of(one, evaluator, pareto=all(other.headroom_bytes < one.headroom_bytes for other in faster)))
    return tuple(rows)


def row_of(one: Exact, evaluator: Evaluator, *, pareto: bool = True) -> LayoutRow:
    """A row with its figures."""
    spec = evaluator.space.spec_of(one.layout, one.policy)
    terms = {name: value / 1e9 for name, value in evaluator.side(spec).clock.terms(spec, one.spans).items()}
    seconds, time = one.step_ns / 1e9, planned_time(spec, one.spans, evaluator.side(spec).inventory)
    tokens = spec.global_batch_tokens / spec.mesh.world_size
    ranked = flops_per_token(spec) * spec.global_batch_tokens / seconds / peak_flops(spec)  # the step is longer than the estimated one
    return LayoutRow(
        exact=one,
        spec=with_cuts(spec, one),
        asked=evaluator.space.asked,
        step_seconds=seconds,
        tokens_per_second_per_device=tokens / seconds,
        mfu=ranked if isinstance(time, str) else time.mfu,
        peak_bytes=one.peak_bytes,
        headroom_bytes=one.headroom_bytes,
        bubble_seconds=terms.get(BUBBLE, 0.0),
        exposed_seconds=sum(value for name, value in terms.items() if name.startswith(EXPOSED) or name in (*WAITS, GATHERS)),
        terms=terms,
        pareto=pareto,
        pools=_pool_peaks(spec, evaluator, one) if spec.pools else (),
    )


def _pool_peaks(spec: Spec, evaluator: Evaluator, one: Exact) -> tuple[PoolPeak, ...]:
    peaks = Memory(spec, evaluator.side(spec).inventory).peaks(one.spans)
    fullest = [min([peaks[rank] for rank in part.ranks], key=lambda each: each[1]) for part in parts_of(spec)]
    return tuple(PoolPeak(part.spec.device.name, *each) for part, each in zip(parts_of(spec), fullest, strict=True))


def with_cuts(spec: Spec, one: Exact) -> Spec:
    """The spec with the row's cuts as manual ones; `megaplan estimate` of this spec gives the numbers of the search."""
    if len(one.spans) == 1:
        return spec.model_copy(update={"split": spec.split.model_copy(update={"objective": "bottleneck"})})
    objective = _objective(spec)
    reason = "shortest modelled step of the cuts that fit, found by megaplan search"
    split = spec.split.model_copy(update={"mode": "manual", "spans": one.spans, "reason": reason, "objective": objective})
    return spec.model_copy(update={"split": split})


def changes_of(spec: Spec) -> tuple[str, ...]:
    """`KEY=VALUE` texts of the decisions of a search."""
    mesh, schedule = spec.mesh, spec.schedule
    names = ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "vocab_parallel")
    found = [f"mesh.{name}={str(getattr(mesh, name)).lower()}" for name in names]
    found += [f"schedule.kind={schedule.kind}", f"schedule.num_microbatches={schedule.num_microbatches}"]
    found += [f"batch.micro_batch_size={spec.batch.micro_batch_size}"]
    found += [f"sharding.reshard_after_forward={str(spec.sharding.reshard_after_forward).lower()}"]
    blocks = ", ".join(f"{letter}: {policy}" for letter, policy in sorted(spec.recompute.blocks.items()))
    found += [f"recompute.default={spec.recompute.default}", f"recompute.blocks={{{blocks}}}"]
    found += [f"host.{key}={argument(getattr(spec.host, key))}" for key in HOST_KEYS if key in spec.host.kind.keys]
    return tuple(found)


FURTHER = (
    *("schedule.steps_per_update", "sharding.reshard_size", "precision.grads", "precision.reduce"),
    *("model.pattern", "model.num_layers"),
)
"""Keys that a row has from the spec unless its layout cannot: one schedule an update, no parts of a group, no boundaries in the pattern."""


MANUAL = ("split.mode", "split.spans", "split.reason", "split.protects")
"""Keys of manual cuts, which a row without a pipeline lacks."""


def _differing(asked: Spec, found: Spec, keys: Sequence[str]) -> tuple[str, ...]:
    """`KEY=VALUE` texts of the keys that a row has otherwise than the spec."""
    pairs = {key: [attrgetter(key)(spec) for spec in (asked, found)] for key in keys}
    return tuple(f"{key}={argument(value)}" for key, (before, value) in pairs.items() if before != value)


def cuts_of_row(row: LayoutRow) -> tuple[str, ...]:
    """`KEY=VALUE` texts of a row's cuts; without a pipeline none, or that manual cuts end."""
    if len(row.exact.spans) == 1:
        return _differing(row.asked, row.spec, MANUAL) if row.asked.split.mode == "manual" else ()
    spans = "[" + ", ".join(f"[{start}, {stop}]" for start, stop in row.exact.spans) + "]"
    return "split.mode=manual", "split.reason=search", f"split.spans={spans}", f"split.objective={_objective(row.spec)}"


def _objective(spec: Spec) -> str:
    """The objective of a row's cuts: layers have no one cost on several devices."""
    return "step_time" if spec.pools else "bottleneck"


def why_not(found: Explored, evaluator: Evaluator, rows: tuple[LayoutRow, ...]) -> tuple[Lost, ...]:
    """The reason that no layout with an axis value is better, for every value that the best row does not have."""
    lost = [
        Lost(item.key, item.count, "illegal", f"{item.code}: {item.detail.splitlines()[0]}", {})
        for item in sorted(evaluator.space.illegal.values(), key=lambda item: (item.key, item.code))
    ]
    winner, left, until = rows[0] if rows else None, found.left, monotonic() + COLUMNS_SECONDS
    for axis in AXES:
        of, seen, nearest = attrgetter(axis), defaultdict[object, list[Outcome]](list), dict[object, tuple[int, LayoutChoice]]()
        for layout, outcome in found.outcomes.items():
            seen[of(layout)].append(outcome)
        for item in left if axis != "kind" else ():  # a mesh has a bound, its schedules have no separate ones
            nearest.setdefault(of(item[1]), item)
        counts = Counter(map(of, found.outcomes if axis == "kind" else [mesh for _, mesh in found.bounds]))
        for value in sorted(counts):
            if winner is None or value != of(winner.exact.layout):
                name = f"{NAMES.get(axis, f'mesh.{axis}')}={value}"
                one = _Class(name, counts[value], seen[value], nearest.get(value))
                lost.append(_lost(found, evaluator, winner, one, until))
    return tuple(lost)


class _Class(NamedTuple):
    """The layouts with one value of an axis.

    Attributes:
        name: The value with its key.
        number: Number of meshes; of a schedule, of evaluated layouts.
        seen: Outcomes of the evaluated layouts.
        nearest: The unexplored mesh with the smallest bound.
    """

    name: str
    number: int
    seen: list[Outcome]
    nearest: tuple[int, LayoutChoice] | None


def _lost(found: Explored, evaluator: Evaluator, winner: LayoutRow | None, one: _Class, until: float) -> Lost:
    """The reason against a value; its largest column is named until a time."""
    if winner is not None and (behind := _behind(found, evaluator, winner, one)) is not None:
        reason, detail, layout = behind
        return Lost(one.name, one.number, reason, detail, layout._asdict())
    closest = min((each for each in one.seen if each.over_bytes > 0), key=lambda each: (each.over_bytes, each.layout), default=None)
    if closest is not None:
        column = _column(evaluator, closest.layout) if monotonic() < until else ""
        detail = f"{column}over by {format_bytes(closest.over_bytes)} at least"
        return Lost(one.name, one.number, "out of memory", detail, closest.layout._asdict())
    least = min((outcome.bound_ns for outcome in one.seen), default=UNLIMITED)
    detail = f"at least {format_ns(least)}" if least < UNLIMITED else "not explored"
    return Lost(one.name, one.number, "slower", detail, one.seen[0].layout._asdict() if one.seen else {})


def _behind(found: Explored, evaluator: Evaluator, winner: LayoutRow, one: _Class) -> tuple[str, str, LayoutChoice] | None:
    """Reason, text and layout of the best layout that fits, or of the unexplored layout with the best bound; None if there is neither."""
    fitting = [outcome.best for outcome in one.seen if outcome.best is not None]
    if fitting:
        best = min(fitting, key=lambda each: each.order(found.task.objective))
        free, wanted = best.headroom_bytes, winner.exact.headroom_bytes
        if found.task.objective == "headroom" and free < wanted:
            return "less headroom", f"{format_bytes(free)} against {format_bytes(wanted)}", best.layout
        return "slower", _slower(evaluator, winner, best), best.layout
    if one.nearest is None:
        return None
    bound, mesh = one.nearest
    if bound < winner.exact.step_ns:  # only when the search was interrupted
        return "slower", f"not explored, at least {format_ns(bound)}", mesh
    return "slower", f"at least {format_ns(bound)}, {100 * (bound / winner.exact.step_ns - 1):.1f} % slower than the best", mesh


def _slower(evaluator: Evaluator, winner: LayoutRow, best: Exact) -> str:
    spec = evaluator.space.spec_of(best.layout, best.policy)
    terms = evaluator.side(spec).clock.terms(spec, best.spans)
    name = max(terms, key=lambda term: terms[term] - winner.terms.get(term, 0.0) * 1e9)
    more = best.step_ns / winner.exact.step_ns - 1
    before = format_ns(round(winner.terms.get(name, 0.0) * 1e9))
    return f"{format_ns(best.step_ns)}, {100 * more:+.1f} %: {name} {format_ns(terms[name])} against {before}"


def _column(evaluator: Evaluator, layout: LayoutChoice) -> str:
    """The largest column of the layout's policy with the least memory, with equal cuts, as a text that others follow."""
    from megaplan.layout.build import spans_of  # noqa: PLC0415
    from megaplan.partition.values import equal_cuts  # noqa: PLC0415

    spec = evaluator.space.spec_of(layout, evaluator.thriftiest(layout))
    inventory = evaluator.side(spec).inventory
    num_layers = len(inventory.layers)
    spans = spans_of(equal_cuts(num_layers, layout.pp * layout.vpp), num_layers)
    worst = build_budget(spec, inventory, build_layout(spec, inventory, spans)).worst
    column, size = max(worst.columns.items(), key=lambda item: item[1])
    return f"{column.key} = {format_bytes(size)}; "


def lines_of(lost: tuple[Lost, ...]) -> Iterator[str]:
    """Reasons against classes, one per line."""
    for one in lost[:MAX_CLASSES]:
        yield f"{one.name} ({one.count}): {one.reason}: {one.detail}"
    if len(lost) > MAX_CLASSES:
        yield f"and {len(lost) - MAX_CLASSES} more, with --json"
