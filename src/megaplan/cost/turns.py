"""Legs of a layer's passes: the computation between its exchanges of rows, at which pairs of microbatches take turns.

The layer's program gives the places of its exchanges among its operations; backward runs them in reverse. A layer's other transfers count
as computation: ranks with slices of an expert gather and sum rows between the two exchanges; a tensor group exchanges only for the shared
expert, which runs after both. The exchange of row counts takes no time but uses the same group: during it a forward does not pass the turn,
and waits for the exchanges in flight in that group.

Source: `megarun.model.moe.ExpertBlock`, `megarun.parallel.groups.turns`.
"""

from typing import NamedTuple

from megaplan.blocks.work import Workload, Works
from megaplan.cost.blocks import adapter_name
from megaplan.families.family import Exchanges
from megaplan.families.moe.travel import ANNOUNCE, EXCHANGES
from megaplan.families.registry import FAMILIES
from megaplan.families.residual import path_in, program_of
from megaplan.inventory.tensors import Block
from megaplan.schedules import Leg, Legs
from megaplan.spec.models import Spec


class Stops(NamedTuple):
    """The exchanges of a layer's rows.

    Attributes:
        pass_turns: True for each exchange of a forward, in order, during which another microbatch computes.
        before: Number of exchanges before each operation.
    """

    pass_turns: tuple[bool, ...]
    before: dict[str, int]

    def of(self, ops: Works) -> list[int]:
        """Number of exchanges before each of these operations.

        An operation that is part of another one in the program runs before all exchanges.
        """
        return [max([self.before.get(name, 0) for name in op.counts or (op.name,)]) for op in ops]


class Priced(NamedTuple):
    """Nanoseconds of each operation of a layer: F, and I with W."""

    forward: list[int]
    backward: list[int]


class Waits(NamedTuple):
    """Transfers that a layer waits for, in nanoseconds.

    Attributes:
        exchanged: An exchange of rows.
        sliced: A gather or reduce-scatter of rows among ranks with slices of an expert.
        forward: All of F.
        backward: All of I.
    """

    exchanged: int
    sliced: int
    forward: int
    backward: int


def stops_of(spec: Spec, load: Workload, block: Block, exchanges: Exchanges) -> Stops | None:
    """The exchanges of a layer at which the microbatches of a pair take turns; None if it has none."""
    family = FAMILIES[block.family]
    if family.exchanging is None:
        return None
    program = program_of(path_in(spec.model.residual_path, block), family.exchanging(load, family.section_of(spec.model)))
    pass_turns, before = list[bool](), dict[str, int]()
    for op in program.ops:
        for name in (op.name, *(param.removesuffix(".weight") for param in op.params)):  # linears of the same input may be one operation
            before[name] = before[adapter_name(name)] = len(pass_turns)
        if op.name in EXCHANGES or (op.name == ANNOUNCE and exchanges.counts):
            pass_turns.append(op.name in EXCHANGES)
    return Stops(tuple(pass_turns), before) if any(pass_turns) else None


def legs_of(stops: Stops, ops: Works, priced: Priced, waits: Waits, again: tuple[Works, int]) -> tuple[Legs, Legs]:
    """Legs of F, and of I and W.

    Args:
        stops: Exchanges of the layer.
        ops: Operations of the layer.
        priced: Times of these.
        waits: Transfers.
        again: Operations that run again before their backward, and their time.
    """
    number, places, computed = len(stops.pass_turns), stops.of(ops), []
    for times, waited in ((priced.forward, waits.forward), (priced.backward, waits.backward)):
        computing = [0] * (number + 1)
        for place, time in zip(places, times, strict=True):
            computing[place] += time
        computing[-2] += 2 * waits.sliced
        computing[-1] += waited - 2 * (waits.exchanged + waits.sliced)
        computed.append(computing)
    forward, backward = computed
    backward[max(stops.of(again[0]), default=0)] += again[1]
    there = [Leg(forward[stop], waits.exchanged * passes, passes) for stop, passes in enumerate(stops.pass_turns)]
    back, since = list[Leg](), 0
    for stop in reversed(range(number)):
        since += backward[stop + 1]
        if stops.pass_turns[stop]:  # a backward knows the counts
            back.append(Leg(since, waits.exchanged))
            since = 0
    return tuple(there), tuple(back)
