"""What each schedule asks of stages and microbatches (R-26, R-27)."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.spec.context import Checked

# One chunk a rank; several chunks in a loop (rank = slot mod pp); two chunks in a V (rank i owns slots i and 2·pp − 1 − i).
SINGLE = frozenset({"gpipe", "1f1b"})
LOOP = frozenset({"interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"})
V_SHAPED = frozenset({"zbv", "dualpipev"})
IN_ROUNDS = frozenset({"interleaved_1f1b", "interleaved_zero_bubble"})


def schedule_rules(checked: Checked) -> Iterator[Diagnostic]:
    """MP212, MP311 … MP313."""
    spec = checked.spec
    kind, mesh = spec.schedule.kind, spec.mesh
    slots, layers = spec.mesh.num_slots, spec.model.num_layers
    if slots > layers:
        detail = f"mesh.pp · mesh.vpp = {mesh.pp} · {mesh.vpp} = {slots} slots, model.num_layers = {layers}, and {slots} > {layers}"
        yield checked.error("MP212", detail, "mesh.pp", f"use at most {layers} slots")
    yield from _stages(checked, kind)
    yield from _microbatches(checked, kind)


def _stages(checked: Checked, kind: str) -> Iterator[Diagnostic]:
    pp, vpp = checked.spec.mesh.pp, checked.spec.mesh.vpp
    if kind in SINGLE and vpp > 1:
        detail = f"schedule.kind = {kind} runs one chunk a rank, and mesh.vpp = {vpp}"
        yield checked.error("MP313", detail, "mesh.vpp", "vpp: 1", "kind: interleaved_1f1b under schedule")
    if kind in LOOP and vpp < 2 and kind != "interleaved_zero_bubble":  # with one chunk a rank that one is ZB-H1
        detail = f"schedule.kind = {kind} runs two or more chunks a rank, and mesh.vpp = {vpp}"
        yield checked.error("MP313", detail, "mesh.vpp", "vpp: 2", "kind: 1f1b under schedule")
    if kind != "1f1b" and pp < 2:
        detail = f"schedule.kind = {kind} needs two or more pipeline ranks, and mesh.pp = {pp}"
        yield checked.error("MP313", detail, "mesh.pp", "pp: 2", "kind: 1f1b under schedule")
    if kind in V_SHAPED and vpp != 2:
        detail = f"schedule.kind = {kind} has 2 · pp = {2 * pp} slots, rank i owning slots i and {2 * pp - 1} − i, and mesh.vpp = {vpp}"
        yield checked.error("MP313", detail, "mesh.vpp", "vpp: 2")


def _microbatches(checked: Checked, kind: str) -> Iterator[Diagnostic]:
    pp, count = checked.spec.mesh.pp, checked.spec.schedule.num_microbatches
    if kind == "1f1b" and pp > 1 and count < pp:
        detail = f"schedule.num_microbatches = {count}, mesh.pp = {pp}, and {count} < {pp}"
        yield checked.error("MP311", detail, "schedule.num_microbatches", f"num_microbatches: {pp}")
    if kind == "dualpipev" and count < 2 * pp:
        detail = f"schedule.num_microbatches = {count}, 2 · mesh.pp = {2 * pp}, and {count} < {2 * pp}"
        yield checked.error("MP311", detail, "schedule.num_microbatches", f"num_microbatches: {2 * pp}", "kind: zbv under schedule")
    rounds = max(1, count // pp)
    if kind in IN_ROUNDS and count % rounds:
        below = count // pp * pp
        detail = (
            f"schedule.num_microbatches = {count}, mesh.pp = {pp}, rounds = max(1, {count} // {pp}) = {rounds}, "
            f"and {count} % {rounds} = {count % rounds}"
        )
        yield checked.error("MP312", detail, "schedule.num_microbatches", f"num_microbatches: {below} or {below + pp}")
