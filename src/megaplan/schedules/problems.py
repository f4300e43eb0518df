"""Diagnostics about a schedule's degrees: one function per diagnostic (MP310 … MP313)."""

from collections.abc import Iterable
from typing import NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location


class Problem(NamedTuple):
    """A reason that a schedule cannot run on given degrees.

    Attributes:
        code: Code of the diagnostic.
        key: Key of the spec with the wrong value.
        detail: Values and the rule that they break.
        remedies: Keys, each with the values that would be right.
    """

    code: str
    key: str
    detail: str
    remedies: tuple[tuple[str, tuple[object, ...]], ...]

    @property
    def hints(self) -> list[str]:
        """The remedies as overrides, valid for a value of a spec file and of the command line."""
        return [f"--set {key}={value}" for key, values in self.remedies for value in values]

    def diagnostic(self) -> Diagnostic:
        """The diagnostic of a command that reads no spec file."""
        return diagnostic(self.code, self.detail, Location(key=self.key), self.hints)


KIND, PP, VPP, MICROBATCHES = "schedule.kind", "mesh.pp", "mesh.vpp", "schedule.num_microbatches"


def not_a_schedule(kind: str, available: Iterable[str]) -> Problem:
    """The name is not a schedule's."""
    return Problem("MP310", KIND, f"schedule.kind = {kind}", ((KIND, tuple(available)),))


def few_microbatches(num_microbatches: int, pp: int) -> Problem:
    """The schedule needs a microbatch for every rank."""
    detail = f"schedule.num_microbatches = {num_microbatches}, mesh.pp = {pp}, and {num_microbatches} < {pp}"
    return Problem("MP311", MICROBATCHES, detail, ((MICROBATCHES, (pp,)),))


def fewer_than_slots(num_microbatches: int, pp: int, other: str = "zbv") -> Problem:
    """The schedule needs a microbatch for every slot of a V; the schedule `other` does not."""
    slots = 2 * pp
    detail = f"schedule.num_microbatches = {num_microbatches}, 2 · mesh.pp = {slots}, and {num_microbatches} < {slots}"
    return Problem("MP311", MICROBATCHES, detail, ((MICROBATCHES, (slots,)), (KIND, (other,))))


def odd_microbatches(num_microbatches: int) -> Problem:
    """The schedule runs half of the microbatches from either end."""
    detail = f"schedule.num_microbatches = {num_microbatches}, half from either end, and {num_microbatches} % 2 = 1"
    return Problem("MP312", MICROBATCHES, detail, ((MICROBATCHES, (num_microbatches + 1,)),))


def odd_ranks(kind: str, pp: int) -> Problem:
    """The schedule pairs every rank with its mirror."""
    detail = f"schedule.kind = {kind} pairs rank i with rank {pp - 1} − i, so mesh.pp = {pp} must be even"
    return Problem("MP313", PP, detail, ((PP, (pp + 1,)), (KIND, ("dualpipev",))))


def uneven_rounds(num_microbatches: int, pp: int, rounds: int) -> Problem:
    """The schedule interleaves in rounds that the microbatches do not fill."""
    detail = (
        f"schedule.num_microbatches = {num_microbatches}, mesh.pp = {pp}, rounds = max(1, {num_microbatches} // {pp}) = {rounds}, "
        f"and {num_microbatches} % {rounds} = {num_microbatches % rounds}"
    )
    below = num_microbatches - num_microbatches % pp
    return Problem("MP312", MICROBATCHES, detail, ((MICROBATCHES, (below, below + pp)),))


def one_chunk_a_rank(kind: str, vpp: int) -> Problem:
    """The schedule has no virtual stages."""
    detail = f"schedule.kind = {kind} runs one chunk per rank, but mesh.vpp = {vpp}"
    return Problem("MP313", VPP, detail, ((VPP, (1,)), (KIND, ("interleaved_1f1b",))))


def several_chunks_a_rank(kind: str, vpp: int) -> Problem:
    """The schedule needs several slots per rank."""
    detail = f"schedule.kind = {kind} runs two or more chunks per rank, but mesh.vpp = {vpp}"
    return Problem("MP313", VPP, detail, ((VPP, (2,)), (KIND, ("1f1b",))))


def two_chunks_a_rank(kind: str, pp: int, vpp: int) -> Problem:
    """A V has two slots on every rank."""
    detail = f"schedule.kind = {kind} has 2 · pp = {2 * pp} slots, rank i owning slots i and {2 * pp - 1} − i, and mesh.vpp = {vpp}"
    return Problem("MP313", VPP, detail, ((VPP, (2,)),))


def several_ranks(kind: str, pp: int) -> Problem:
    """A spec with one pipeline rank accumulates its microbatches under 1f1b."""
    detail = f"schedule.kind = {kind} needs two or more pipeline ranks, but mesh.pp = {pp}"
    return Problem("MP313", PP, detail, ((PP, (2,)), (KIND, ("1f1b",))))
