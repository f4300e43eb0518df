"""A plan diff for a terminal: the verdict, then changes by importance."""

from collections.abc import Iterator
from typing import Any

from megaplan.api.parts import JobParts
from megaplan.cli.parts_text import part_tables
from megaplan.cli.time_text import change_line
from megaplan.columns import Column
from megaplan.foreign import one_line
from megaplan.layout.ranks import joined, runs_label
from megaplan.layout.step_time import PlannedTime
from megaplan.plan.diff import CutMove, OwnerMove, Place, PlanDiff, RankChange, ValueChange
from megaplan.plan.diff_document import host_lines
from megaplan.plan.document import SpanField
from megaplan.terminal.output import StyledLine
from megaplan.terminal.table import table, wrap
from megaplan.units import format_bytes, format_gib

CAUSES = {"cuts": "moved layers"}
"""Text for the causes that are not keys of a spec."""

MAX_UNLIKE = 4
"""A rank whose table differs from the previous one in at most this many rows is described by those rows."""

_QUIET = {"split.certificate.costs", "split.certificate.optimal", "split.certificate.unit"}  # value and gap imply them; the JSON has them


def diff_lines(
    diff: PlanDiff, times: tuple[PlannedTime | str, PlannedTime | str], parts: tuple[JobParts, JobParts]
) -> Iterator[StyledLine]:
    """Every line as (text, style); `times`: of a step, before and after; `parts`: traffic, run and post-training plan of both."""
    yield diff.verdict, "bold"
    for file, found in diff.tampered:
        yield f"digest: {file}: {found.summary}", "red"
    for text, is_loss in flip_texts(diff):
        yield text, "red" if is_loss else "green"
    if diff.stale:
        yield f"stale reason: changed since the manual split was decided: {', '.join(diff.stale)}", "yellow"
    if not diff.same:
        yield from ((line, "") for line in wrap(change_line(*times), indent="  "))
    for title, lines in change_sections(diff):
        yield "", ""
        yield title, "bold"
        yield from ((f"  {line}", "") for line in lines)
    yield from _memory(diff)
    for title, rows in () if diff.same else part_tables(*parts):
        yield "", ""
        yield title, "bold"
        yield from ((line, "") for line in table(rows, indent="  "))


def change_sections(diff: PlanDiff) -> Iterator[tuple[str, list[str]]]:
    """Titles and lines of the changes, by kind; kinds without a change are omitted."""
    found = {
        "cuts": [move_text(move) for move in diff.moves],
        "owners": [owner_text(move) for move in diff.owners],
        "decisions": change_lines((*diff.decisions, *diff.split)),
        "inputs": change_lines(diff.inputs),
        "training (outside the digest)": change_lines(diff.training),
        "other": change_lines(diff.other),
    }
    return ((title, lines) for title, lines in found.items() if lines)


def flip_texts(diff: PlanDiff) -> list[tuple[str, bool]]:
    """`ranks 0-3 (pp 0): fits → DOES NOT FIT, over by 1.20 GiB` and whether it is a loss; ranks with equal text share a line."""
    groups: dict[tuple[str, str, bool], tuple[SpanField, ...]] = {}
    for rank in diff.flips:
        if rank.after is not None:
            size = format_bytes(abs(rank.after.headroom_bytes))
            text = f"does not fit → fits, headroom {size}" if rank.after.fits else f"fits → DOES NOT FIT, over by {size}"
            key = (_stages_text(rank), text, not rank.after.fits)
            groups[key] = joined((*groups.get(key, ()), *rank.ranks))
    return [(f"{runs_label(runs)} ({stages}): {text}", is_loss) for (stages, text, is_loss), runs in groups.items()]


def move_text(move: CutMove) -> str:
    """`layers 13-14 (EM) move from rank 0 chunk 1 to rank 1 chunk 0`."""
    layers = f"layer {move.start}" if move.num_layers == 1 else f"layers {move.start}-{move.stop - 1}"
    verb = "moves" if move.num_layers == 1 else "move"
    return f"{layers} ({move.letters}) {verb} from {place_text(move.before)} to {place_text(move.after)}"


def owner_text(move: OwnerMove) -> str:
    """`embedding: rank 0 chunk 0 → rank 0 chunk 0, rank 1 chunk 1`."""
    before, after = (", ".join(map(place_text, places)) or "nowhere" for places in (move.before, move.after))
    return f"{move.block}: {before} → {after}"


def place_text(place: Place) -> str:
    """A slot by its identity."""
    return f"pp {place[0]} chunk {place[1]}"


def change_lines(changes: tuple[ValueChange, ...]) -> list[str]:
    """`mesh.tp: 1 → 8`, long values shortened in the middle of the line."""
    return [f"{change.key}: {value_text(change.before)} → {value_text(change.after)}" for change in changes if change.key not in _QUIET]


def value_text(value: Any, length: int = 60) -> str:
    """A JSON value as text of at most `length` characters."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str) and value.startswith("sha256:"):
        return value[:19]
    if isinstance(value, (list, tuple)):
        value = "[" + ", ".join(value_text(item) for item in value) + "]"
    text = one_line(str(value))
    return text if len(text) <= length else f"{text[: length // 2 - 2]}…{text[-(length // 2 - 2) :]}"


def ranks_label(rank: RankChange) -> str:
    """The ranks of a change: `ranks 0-3 (pp 0)`."""
    return f"{runs_label(rank.ranks)} ({_stages_text(rank)})"


def _stages_text(rank: RankChange) -> str:
    """`pp 0`, `pp 1-2`."""
    return f"pp {runs_label(rank.stages).partition(' ')[2]}"


def column_rows(rank: RankChange) -> list[tuple[str, str, str, str]]:
    """Changed columns of a rank with bytes before, after and the difference, then the peak."""
    rows = [(_column(change.key), *_bytes(change.before, change.after)) for change in rank.columns]
    old, new = (side.peak_bytes if side else 0 for side in (rank.before, rank.after))
    return [*rows, ("peak", *_bytes(old, new))]


def rank_blocks(diff: PlanDiff) -> Iterator[tuple[RankChange, str]]:
    """Changed ranks, each with a sentence that compares it with the rank shown before; an empty sentence if it needs a table."""
    shown: RankChange | None = None
    for rank in diff.ranks:
        whole = rank.before is not None and rank.after is not None
        if shown is not None and whole and len(_unlike(rank, shown)) <= MAX_UNLIKE:
            yield rank, _difference_text(rank, shown)
            continue
        shown = rank if whole else None
        yield rank, ""


def _memory(diff: PlanDiff) -> Iterator[StyledLine]:
    for rank, sentence in rank_blocks(diff):
        yield "", ""
        if sentence:
            yield from ((line, "") for line in wrap(sentence, indent="  "))
            continue
        yield f"{ranks_label(rank)}{_presence(rank)}", "bold"
        rows = [("  bytes", "before", "after", "change"), *((f"  {name}", *rest) for name, *rest in column_rows(rank))]
        yield from ((line, "") for line in table(rows))
        if rank.before and rank.after:
            old, new = rank.before, rank.after
            if old.peak_phase != new.peak_phase:
                yield f"  peak phase: {old.peak_phase} → {new.peak_phase}", ""
            yield f"  headroom: {format_bytes(old.headroom_bytes)} → {format_bytes(new.headroom_bytes)}", ""
    if diff.growth:
        yield "", ""
        yield from _growth(diff)


def _unlike(rank: RankChange, shown: RankChange) -> list[tuple[str, str, str, str]]:
    """Rows in which a rank's table differs from the one shown before; uneven shards differ by a few bytes."""
    same = set(column_rows(shown))
    unlike = [row for row in column_rows(rank) if row not in same]
    names = {name for name, *_ in column_rows(rank)} ^ {name for name, *_ in column_rows(shown)}
    return unlike if not names else [*unlike, *([("", "", "", "")] * MAX_UNLIKE)]


def _difference_text(rank: RankChange, shown: RankChange) -> str:
    """`rank 2 (pp 0): as ranks 0-1, but peak 72,317,352,108 → 84,890,922,568`."""
    rows = ", ".join(f"{name} {old} → {new}" for name, old, new, _ in _unlike(rank, shown))
    return f"{ranks_label(rank)}: as {runs_label(shown.ranks)}" + (f", but {rows}" if rows else "")


def _growth(diff: PlanDiff) -> Iterator[StyledLine]:
    """Columns that grow, over all ranks, with the change that causes it."""
    causes = {key for growth in diff.growth for key, _ in growth.causes}
    yield "columns over all ranks" + (f", caused by {CAUSES.get(cause := next(iter(causes)), cause)}" if len(causes) == 1 else ""), "bold"
    rows = [("  column", "before GiB", "after GiB", "change GiB")]
    rows += [
        (f"  {growth.column}", format_gib(growth.before), format_gib(growth.after), _signed_gib(growth.after - growth.before))
        for growth in diff.growth
    ]
    yield from ((line, "") for line in table(rows))
    if len(causes) > 1:
        yield "", ""
        yield "each change alone, GiB over all ranks (changes can interact)", "bold"
        lines = [(f"  {growth.column}", key, _signed_gib(num_bytes)) for growth in diff.growth for key, num_bytes in growth.causes]
        yield from ((line, "") for line in table([("  column", "change", "effect"), *lines], left=(0, 1)))
    reasons = host_lines(diff)
    if reasons:
        yield "", ""
        yield "why two hosts differ", "bold"
    for column, *sides in reasons:
        yield f"  {column}", ""
        for side in sides:
            yield from ((line, "") for line in wrap(f"    {side}", indent="      "))


def _signed_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:+.2f}"


def _presence(rank: RankChange) -> str:
    if rank.before is None:
        return ": new"
    return ": removed" if rank.after is None else ""


def _column(key: str) -> str:
    return str(Column(key.removesuffix("_bytes")))


def _bytes(before: int, after: int) -> tuple[str, str, str]:
    return f"{before:,}", f"{after:,}", f"{after - before:+,}"
