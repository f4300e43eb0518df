"""What can be wrong with a schedule: one function a diagnostic (MP310 … MP313)."""

from __future__ import annotations

from collections.abc import Iterable

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location

_MICROBATCHES = Location(key="schedule.num_microbatches")


def not_a_schedule(kind: str, available: Iterable[str]) -> Diagnostic:
    """A name that no schedule has."""
    hints = [f"--set schedule.kind={name}" for name in available]
    return diagnostic("MP310", f"schedule.kind = {kind}", Location(key="schedule.kind"), hints)


def few_microbatches(kind: str, num_microbatches: int, pp: int) -> Diagnostic:
    """A schedule that needs a microbatch for every stage."""
    detail = f"schedule.kind = {kind}, schedule.num_microbatches = {num_microbatches} < mesh.pp = {pp}"
    return diagnostic("MP311", detail, _MICROBATCHES, (f"--set schedule.num_microbatches={pp}",))


def uneven_rounds(num_microbatches: int, pp: int, rounds: int) -> Diagnostic:
    """Interleaving in rounds that the microbatches do not fill."""
    detail = (
        f"schedule.num_microbatches = {num_microbatches}, mesh.pp = {pp}, rounds = max(1, {num_microbatches} div {pp}) = {rounds}, "
        f"and {num_microbatches} % {rounds} = {num_microbatches % rounds}"
    )
    below = num_microbatches - num_microbatches % pp
    return diagnostic("MP312", detail, _MICROBATCHES, [f"--set schedule.num_microbatches={legal}" for legal in (below, below + pp)])


def one_slot_a_rank(kind: str, vpp: int) -> Diagnostic:
    """Virtual stages under a schedule that has none."""
    detail = f"schedule.kind = {kind} runs one slot on each rank, and mesh.vpp = {vpp}"
    return diagnostic("MP313", detail, Location(key="mesh.vpp"), ("--set mesh.vpp=1", "--set schedule.kind=interleaved_1f1b"))


def two_slots_a_rank(kind: str, vpp: int) -> Diagnostic:
    """A V has two legs on every rank."""
    detail = f"schedule.kind = {kind} runs two slots on each rank, and mesh.vpp = {vpp}"
    return diagnostic("MP313", detail, Location(key="mesh.vpp"), ("--set mesh.vpp=2", "--set schedule.kind=interleaved_zero_bubble"))


def fewer_than_slots(kind: str, num_microbatches: int, pp: int) -> Diagnostic:
    """A schedule that needs a microbatch for every slot."""
    detail = f"schedule.kind = {kind}, schedule.num_microbatches = {num_microbatches} < 2 · mesh.pp = {2 * pp}"
    return diagnostic("MP311", detail, _MICROBATCHES, (f"--set schedule.num_microbatches={2 * pp}", "--set schedule.kind=zbv"))
