"""A plan's timeline with memory over time, as one self-contained SVG picture: no script, no font, no other file."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megaplan.budget.peaks import build_budget
from megaplan.budget.slots import Level, memory_over_time
from megaplan.diagnostics import refuse
from megaplan.foreign import xml
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import Spans, build_layout
from megaplan.layout.planned_step import planned_step
from megaplan.schedules import ACTION_NAMES, Action, ActionKind, Placement, Timeline, num_actions, num_copies, placement, slot_owner
from megaplan.spec.models import Spec
from megaplan.units import format_bytes, format_ns

LANE, MEMORY, GAP = 22, 44, 14
"""Heights: of a chunk's lane, of a rank's memory curve, between ranks."""
LEFT, RIGHT, TOP, BOTTOM = 104, 150, 112, 34
TYPICAL, NARROWEST, WIDEST = 16, 1_000, 4_000
"""Pixels: width of an action at the lower quartile, so that its number is readable; minimum and maximum width of the timeline."""
MAX_DRAWN = 100_000
"""Most actions of a picture, which then has 25 MB; programs do not open much larger ones."""
FILLS = {ActionKind.FORWARD: "#cfe3f7", ActionKind.BACKWARD: "#1f5fa8", ActionKind.INPUT: "url(#input)", ActionKind.WEIGHT: "url(#weight)"}
INKS = {ActionKind.FORWARD: "#10243a", ActionKind.BACKWARD: "#ffffff", ActionKind.INPUT: "#ffffff", ActionKind.WEIGHT: "#10243a"}
HELD, ALWAYS = "#d9ead3", "#a9cf9c"
DIGIT = 6.2
"""Width of a digit at the size of the labels."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The contents of the picture.

    Attributes:
        title: The plan's name and schedule.
        step: The replayed schedule, in ns unless `clock` has other units.
        owners: (pp rank, chunk) of every slot.
        chunks: Chunks per rank.
        levels: Memory of every pp rank over time.
        usable_bytes: Bytes of the device that torch's allocator may use.
        clock: Text of a time.
    """

    title: str
    step: Timeline
    owners: tuple[tuple[int, int], ...]
    chunks: int
    levels: tuple[tuple[Level, ...], ...]
    usable_bytes: int
    clock: Callable[[int], str] = format_ns


def timeline_svg(spec: Spec, spans: Spans) -> str:
    """The picture of one optimizer step of a plan.

    Args:
        spec: Spec of the plan.
        spans: Cuts of the plan.

    Raises:
        MegaplanError: MP481, it has more actions than a picture can show.
    """
    mesh, schedule = spec.mesh, spec.schedule
    _check_size(mesh.pp, mesh.vpp, schedule.num_microbatches)
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, spans)
    step = planned_step(spec, inventory, spans)
    budget = build_budget(spec, inventory, layout)
    where = placement(schedule.kind)
    return render(
        Picture(
            title=f"{spec.name}: {schedule.kind}, pp {mesh.pp} × vpp {mesh.vpp}, {schedule.num_microbatches} microbatches",
            step=step,
            owners=_owners(where, mesh.pp, mesh.vpp),
            chunks=mesh.vpp * num_copies(where),
            levels=memory_over_time(spec, inventory, layout, budget, step),
            usable_bytes=budget.device.usable_bytes,
        )
    )


def schedule_svg(kind: str, pp: int, vpp: int, num_microbatches: int, step: Timeline) -> str:
    """The picture of a schedule alone, without memory.

    Args:
        kind: The schedule.
        pp: Pipeline ranks.
        vpp: Slots of each rank.
        num_microbatches: Microbatches.
        step: The replayed schedule; its times have no unit.

    Raises:
        MegaplanError: MP481, it has more actions than a picture can show.
    """
    _check_size(pp, vpp, num_microbatches)
    where = placement(kind)
    title = f"{kind}, pp {pp} × vpp {vpp}, {num_microbatches} microbatches"
    return render(Picture(title, step, _owners(where, pp, vpp), vpp * num_copies(where), (), 0, str))


def _owners(where: Placement, pp: int, vpp: int) -> tuple[tuple[int, int], ...]:
    return tuple(slot_owner(where, slot, pp) for slot in range(pp * vpp * num_copies(where)))


def _check_size(pp: int, vpp: int, num_microbatches: int) -> None:
    if (total := num_actions(pp, vpp, num_microbatches)) > MAX_DRAWN:
        detail = f"--svg draws at most {MAX_DRAWN:,} actions, and {pp * vpp} slots with {num_microbatches:,} microbatches "
        fewer = MAX_DRAWN // (3 * pp * vpp) // pp * pp
        hints = (f"--set schedule.num_microbatches={fewer} draws fewer microbatches",) if fewer >= 2 * pp else ()
        raise refuse("MP481", f"{detail}have up to {total:,}", *hints, key="schedule.num_microbatches")


def render(picture: Picture) -> str:
    """The SVG document."""
    step = picture.step
    lengths = sorted(item.stop - item.start for rank in step.ranks for item in rank)
    width = min(WIDEST, max(NARROWEST, step.makespan * TYPICAL // max(1, lengths[len(lengths) // 4])))
    scale = width / max(1, step.makespan)
    with_memory = bool(picture.levels)
    rank_height = picture.chunks * LANE + (MEMORY if with_memory else 0) + GAP
    height = TOP + rank_height * len(step.ranks) + BOTTOM
    total = LEFT + width + RIGHT
    idle = f"idle {picture.clock(min(step.bubbles))} to {picture.clock(max(step.bubbles))} per rank" if step.ranks else ""
    about = f"microbatches of a step {picture.clock(step.makespan)}, {idle}{'; memory over time below every rank' if with_memory else ''}"
    peak = max([size for rank in picture.levels for _, size in rank], default=1)
    highest = max(peak, picture.usable_bytes) if 2 * picture.usable_bytes <= 3 * peak else peak  # keep the curves legible
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height}" viewBox="0 0 {total} {height}" '
        'role="img" aria-labelledby="title about" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="10">',
        f'<title id="title">{xml(picture.title)}</title>',
        f'<desc id="about">{xml(about)}</desc>',
        '<defs><pattern id="weight" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="5" height="5" fill="#f6d7a7"/><rect width="1.6" height="5" fill="#c98a2b"/></pattern>'
        '<pattern id="input" width="4" height="4" patternUnits="userSpaceOnUse">'
        '<rect width="4" height="4" fill="#156b6b"/><rect width="4" height="1" fill="#2f8f8f"/></pattern></defs>',
        f'<rect width="{total}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold" fill="#10243a">{xml(picture.title)}</text>',
        f'<text x="12" y="40" font-size="11" fill="#45566a">{xml(about)}</text>',
        *_legend(step),
        *(_memory_legend(picture, highest) if with_memory else ()),
        *_axis(picture, scale, TOP, height - BOTTOM),
    ]
    for rank in range(len(step.ranks)):
        lines += _rank(picture, rank, TOP + rank * rank_height, scale, highest)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _rank(picture: Picture, rank: int, top: int, scale: float, highest: int) -> Iterator[str]:
    yield f'<g id="rank{rank}">'
    yield f'<text x="12" y="{top + 14}" font-size="12" font-weight="bold" fill="#10243a">pp {rank}</text>'
    for chunk in range(picture.chunks):
        y = top + chunk * LANE
        if picture.chunks > 1:
            yield f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#45566a">chunk {chunk}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{scale * picture.step.makespan:.1f}" height="{LANE - 3}" fill="#f1f3f5"/>'
    for item in picture.step.ranks[rank]:
        for part in item.action.parts:
            yield from _box(picture, part, item.start, item.stop, top + picture.owners[part.slot][1] * LANE, scale)
    bubble, inside = picture.step.bubbles[rank], picture.step.bubbles_inside[rank]
    x = LEFT + scale * picture.step.makespan + 8
    yield f'<text x="{x:.1f}" y="{top + 14}" fill="#45566a">idle {picture.clock(bubble)},</text>'
    yield f'<text x="{x:.1f}" y="{top + 27}" fill="#45566a">{picture.clock(inside)} mid-step</text>'
    if picture.levels:
        yield from _memory(picture, rank, top + picture.chunks * LANE, scale, highest)
    yield "</g>"


def _box(picture: Picture, part: Action, start: int, stop: int, y: int, scale: float) -> Iterator[str]:
    width, x = (stop - start) * scale, LEFT + start * scale
    label, what = str(part.microbatch), f"{ACTION_NAMES[part.kind]} of microbatch {part.microbatch}, slot {part.slot}"
    yield (
        f'<g class="action"><title>{what}: {picture.clock(stop - start)} from {picture.clock(start)}</title>'
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{LANE - 3}" fill="{FILLS[part.kind]}" '
        'stroke="#ffffff" stroke-width="0.6"/>'
    )
    if width >= DIGIT * len(label) + 2:
        halo = ' paint-order="stroke" stroke="#fdf3e2" stroke-width="2.5"' if part.kind is ActionKind.WEIGHT else ""
        yield f'<text x="{x + width / 2:.2f}" y="{y + 13}" text-anchor="middle" fill="{INKS[part.kind]}"{halo}>{label}</text>'
    yield "</g>"


def _memory(picture: Picture, rank: int, top: int, scale: float, highest: int) -> Iterator[str]:
    """The memory curve of one rank, its peak, and the limit if it is within the scale."""
    levels, bottom = picture.levels[rank], top + MEMORY
    tall = (MEMORY - 4) / highest
    points = [f"M{LEFT},{bottom}"]
    points += [f"H{LEFT + time * scale:.1f}V{bottom - size * tall:.1f}" for time, size in levels]
    end = LEFT + scale * picture.step.makespan
    peak = max(size for _, size in levels)
    yield f'<text x="{LEFT - 8}" y="{bottom - 4}" text-anchor="end" fill="#45566a">memory</text>'
    curve = f"{''.join(points)}H{end:.1f}V{bottom}Z"
    yield f'<path d="{curve}" fill="{HELD}" stroke="#38761d" stroke-width="1"><title>memory of pp {rank}</title></path>'
    always = min(size for _, size in levels)
    yield (
        f'<rect x="{LEFT}" y="{bottom - always * tall:.1f}" width="{end - LEFT:.1f}" height="{always * tall:.1f}" fill="{ALWAYS}">'
        f"<title>pp {rank} without microbatches in flight: {format_bytes(always)}</title></rect>"
    )
    if picture.usable_bytes <= highest:
        y = bottom - picture.usable_bytes * tall
        yield f'<path d="M{LEFT},{y:.1f}H{end:.1f}" stroke="#b3261e" stroke-width="1" stroke-dasharray="5 3"/>'
    over = " OVER" if peak > picture.usable_bytes else ""
    yield f'<text x="{end + 8:.1f}" y="{bottom - 4}" fill="#38761d">peak {format_bytes(peak)}{over}</text>'


def _legend(step: Timeline) -> Iterator[str]:
    kinds = {part.kind for rank in step.ranks for item in rank for part in item.action.parts}
    x = 12
    for kind in [kind for kind in ActionKind if kind in kinds]:
        yield f'<rect x="{x}" y="52" width="20" height="14" fill="{FILLS[kind]}" stroke="#8a97a5" stroke-width="0.5"/>'
        yield f'<text x="{x + 10}" y="63" text-anchor="middle" fill="{INKS[kind]}">3</text>'
        yield f'<text x="{x + 26}" y="63" fill="#10243a">{ACTION_NAMES[kind]} of microbatch 3</text>'
        x += 40 + int(6.2 * len(f"{ACTION_NAMES[kind]} of microbatch 3"))


def _memory_legend(picture: Picture, highest: int) -> Iterator[str]:
    usable = f"usable {format_bytes(picture.usable_bytes)}"
    rows = (
        (f'<rect y="71" width="20" height="14" fill="{ALWAYS}" stroke="#38761d" stroke-width="0.5"', "states and the running block"),
        (f'<rect y="71" width="20" height="14" fill="{HELD}" stroke="#38761d" stroke-width="0.5"', "microbatches in flight"),
    )
    x = 12
    for mark, text in rows:
        yield mark.replace("<rect", f'<rect x="{x}"', 1) + "/>"
        yield f'<text x="{x + 26}" y="82" fill="#10243a">{text}</text>'
        x += 40 + int(DIGIT * len(text))
    if picture.usable_bytes <= highest:
        yield f'<path d="M{x},78h20" stroke="#b3261e" stroke-dasharray="5 3"/>'
        yield f'<text x="{x + 26}" y="82" fill="#10243a">{usable}</text>'
        x += 40 + int(DIGIT * len(usable))
        usable = ""
    scale = f"memory: 0 to {format_bytes(highest)} on every rank{f', {usable}' if usable else ''}"
    yield f'<text x="{x}" y="82" fill="#45566a">{scale}</text>'


def _axis(picture: Picture, scale: float, top: int, bottom: int) -> Iterator[str]:
    """Vertical lines at round times, labelled above and below."""
    makespan = picture.step.makespan
    unit = _round_step(makespan, max(2, int(makespan * scale) // 120))
    for time in range(0, makespan + 1, unit):
        x = LEFT + time * scale
        yield f'<path d="M{x:.1f},{top - 6}V{bottom}" stroke="#dde3e9" stroke-width="1"/>'
        for y in (top - 10, bottom + 14):
            yield f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="#45566a">{picture.clock(time)}</text>'
    for y in (top - 10, bottom + 14):
        yield f'<text x="12" y="{y}" fill="#45566a">time</text>'


def _round_step(length: int, parts: int) -> int:
    """The smallest of 1, 2, 5 · 10^n that cuts `length` into at most `parts`."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if length <= step * factor * parts:
                return step * factor
        step *= 10
