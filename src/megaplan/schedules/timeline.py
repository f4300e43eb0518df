"""Replay, as soon as possible, of action orders: the length of the step, and each rank's waits.

Times are integers in any one unit. Dependencies do not depend on them, so an order is linked once (`link`) and replayed for any number of
times.
"""

from collections import Counter, defaultdict
from operator import add, itemgetter
from typing import NamedTuple

from megaplan.schedules.actions import Action, ActionKind, Orders, Overlap, ScheduleStep
from megaplan.schedules.repeats import Node, Repeat, repeat_of
from megaplan.schedules.turns import Course, pair_length

SINGLE = (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT, ActionKind.BACKWARD)
"""Kinds of single actions, in the order of `LinkedOrders.places`."""


class SlotTimes(NamedTuple):
    """Time of one microbatch on each slot, in model order.

    Attributes:
        forward: Time of F.
        input: Time of I, repeated forward work included.
        weight: Time of W. A whole backward takes I + W.
        hidden_percent: Share of the shorter part of an overlapped forward and backward that the longer hides: 0 runs them in sequence, as
            torch does; at 100 the pair takes as long as its longer part.
        courses: F and I + W of each slot if the parts of an overlap take turns; else empty.
    """

    forward: tuple[int, ...]
    input: tuple[int, ...]
    weight: tuple[int, ...]
    hidden_percent: int = 0
    courses: tuple[tuple[Course, Course], ...] = ()

    def of(self, step: ScheduleStep) -> int:
        """Time of one action; the hidden part of an overlap is rounded down."""
        if isinstance(step, Overlap):
            if self.courses:
                return pair_length(self.courses[step.forward.slot][0], self.courses[step.backward.slot][1])
            forward, backward = self.of(step.forward), self.of(step.backward)
            return forward + backward - min(forward, backward) * self.hidden_percent // 100
        match step.kind:
            case ActionKind.FORWARD:
                return self.forward[step.slot]
            case ActionKind.INPUT:
                return self.input[step.slot]
            case ActionKind.WEIGHT:
                return self.weight[step.slot]
        return self.input[step.slot] + self.weight[step.slot]

    @staticmethod
    def equal(num_slots: int, forward: int = 1, input: int = 1, weight: int = 1) -> "SlotTimes":
        """The same times for every slot."""
        return SlotTimes((forward,) * num_slots, (input,) * num_slots, (weight,) * num_slots)


class Timed(NamedTuple):
    """An action with its half-open interval of time."""

    action: ScheduleStep
    start: int
    stop: int


class Timeline(NamedTuple):
    """A replayed step.

    Attributes:
        ranks: Actions of each pp rank with their times, in order.
        makespan: End of the last action of any rank, from 0.
        busy: Computing time of each pp rank.
    """

    ranks: tuple[tuple[Timed, ...], ...]
    makespan: int
    busy: tuple[int, ...]

    @property
    def bubbles(self) -> tuple[int, ...]:
        """Idle time of each rank in a step that ends with a global synchronisation (a gradient norm): makespan − busy."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubbles_inside(self) -> tuple[int, ...]:
        """Idle time of each rank between its own first start and its own last stop: the figure of zero-bubble papers."""
        return tuple(rank[-1].stop - rank[0].start - busy for rank, busy in zip(self.ranks, self.busy, strict=True))


class LinkedOrders(NamedTuple):
    """Orders with the dependencies of every action.

    Attributes:
        num_ranks: Pipeline ranks.
        nodes: Every action, after all its dependencies.
        steps: The actions themselves, in the nodes' order.
        shapes: One action of each kind and slot, or of each pair that overlaps: actions of one shape take equally long.
        places: Index of each shape's time in the list of F, I, W and unsplit backwards of all slots; −1 for a pair.
        repeat: The nodes that repeat between fill and drain.
    """

    num_ranks: int
    nodes: tuple[Node, ...]
    steps: tuple[ScheduleStep, ...]
    shapes: tuple[ScheduleStep, ...]
    places: tuple[int, ...]
    repeat: Repeat | None

    def makespan(self, times: SlotTimes, *, p2p: int = 0) -> int:
        """Length of the step; see `replay`."""
        return max(self._stops(self._lengths(times), p2p), default=0)

    def _lengths(self, times: SlotTimes) -> list[int]:
        """Time of an action of each shape."""
        single = [*times.forward, *times.input, *times.weight, *map(add, times.input, times.weight)]
        return [single[place] if place >= 0 else times.of(shape) for place, shape in zip(self.places, self.shapes, strict=True)]

    def hidden(self, times: SlotTimes) -> int:
        """Time that the pairs of all ranks save compared with running their parts one after the other."""
        if not times.courses:
            return 0
        often = Counter(map(itemgetter(1), self.nodes))
        pairs = [(shape, step) for shape, step in enumerate(self.shapes) if isinstance(step, Overlap)]
        return sum(often[shape] * (sum(map(times.of, step.parts)) - times.of(step)) for shape, step in pairs)

    def replay(self, times: SlotTimes, *, p2p: int = 0) -> Timeline:
        """Start every action as soon as its rank is free and its input has arrived.

        Args:
            times: Times of one microbatch on each slot.
            p2p: Time of one boundary tensor between two ranks; the sender does not wait for it. None inside a rank (the turn of a V).
        """
        lengths = self._lengths(times)
        stops = self._stops(lengths, p2p)
        ranks: list[list[Timed]] = [[] for _ in range(self.num_ranks)]
        busy = [0] * self.num_ranks
        for (rank, shape, _), step, stop in zip(self.nodes, self.steps, stops, strict=True):
            busy[rank] += lengths[shape]
            ranks[rank].append(Timed(step, stop - lengths[shape], stop))
        return Timeline(tuple(map(tuple, ranks)), max(stops, default=0), tuple(busy))

    def _stops(self, lengths: list[int], p2p: int) -> list[int]:
        """End of every action.

        Once every rank runs a period of the repeating nodes as the period before, only later, all further periods do: their ends
        are added up instead of replayed.
        """
        stops: list[int] = []
        free, repeat = [0] * self.num_ranks, self.repeat
        if repeat is not None:
            self._advance(stops, free, lengths, p2p, repeat.start + repeat.period)
            while len(stops) + repeat.period <= repeat.stop:
                before = free.copy()
                self._advance(stops, free, lengths, p2p, len(stops) + repeat.period)
                later = free[0] - before[0]
                if all(now - then == later for now, then in zip(free, before, strict=True)) and repeat.is_steady(stops, later):
                    number, ends = (repeat.stop - len(stops)) // repeat.period, stops[-repeat.period :]
                    for _ in range(number):
                        ends = [end + later for end in ends]
                        stops += ends
                    free[:] = [now + number * later for now in free]
                    break
        self._advance(stops, free, lengths, p2p, len(self.nodes))
        return stops

    def _advance(self, stops: list[int], free: list[int], lengths: list[int], p2p: int, stop: int) -> None:
        """Replays up to a node; the inner loop of a search for cuts."""
        for rank, shape, far in self.nodes[len(stops) : stop]:
            start = free[rank]
            for index in far:
                arrival = stops[index] + p2p
                if arrival > start:  # noqa: PLR1730 (a call of max takes twice as long)
                    start = arrival
            free[rank] = end = start + lengths[shape]
            stops.append(end)


def replay(orders: Orders, times: SlotTimes, *, p2p: int = 0, copies: int = 1) -> Timeline:
    """Link and replay; see `link` and `LinkedOrders.replay`.

    Raises:
        ValueError: If the orders wait for each other forever, or an action waits for one that never runs; the message names them.
    """
    return link(orders, len(times.forward), copies).replay(times, p2p=p2p)


def link(orders: Orders, num_slots: int, copies: int = 1) -> LinkedOrders:
    """Find the dependencies of every action, and an order in which all can run.

    A forward waits for the same microbatch on the slot before; a backward, or its input half, for the slot after, and on the last slot for
    its own forward; a weight gradient for its own input half. Both parts of an overlap begin and end together.

    Args:
        orders: Action order of each pp rank.
        num_slots: Slots of the pipeline.
        copies: Copies of the model, one after the other in the slots: microbatches end with the last slot of each.

    Raises:
        ValueError: If the orders wait for each other forever, or an action waits for one that never runs; the message names them.
    """
    num_ranks, results = len(orders), defaultdict[tuple[ActionKind, int], _Results](_Results.none)
    wires: dict[tuple[ActionKind, int], tuple[_Results | None, _Results]] = {}
    turns, numbers, waits, steps = (
        list[int](),
        list[int](),
        list[tuple[int, ...]](),
        list[ScheduleStep](),
    )  # values of each node, in discovery order
    shapes: dict[tuple[tuple[ActionKind, int], ...], tuple[int, ScheduleStep]] = {}
    last, position, ready = [0] * num_ranks, [0] * num_ranks, list(range(num_ranks))
    while ready:
        rank = ready.pop()
        while position[rank] < len(orders[rank]):
            step = orders[rank][position[rank]]
            time, far, made = last[rank], [], []
            for kind, slot, microbatch in step.parts:
                wire = wires.get((kind, slot))
                if wire is None:
                    source = _source_of(kind, slot, num_slots // copies)
                    wire = wires[kind, slot] = results[source] if source else None, results[_made(kind), slot]
                needed, made_here = wire
                made.append((made_here, microbatch))
                if needed is None:
                    continue
                turn = needed.turns.get(microbatch)
                if turn is None:
                    needed.waiting[microbatch] = rank
                    break
                if turn % num_ranks != rank:
                    far.append(turn)
                    if turn // num_ranks > time:  # noqa: PLR1730 (a call of max takes twice as long)
                        time = turn // num_ranks
            else:
                last[rank], turn = time + 1, (time + 1) * num_ranks + rank
                turns.append(turn)
                numbers.append(shapes.setdefault(tuple([part[:2] for part in step.parts]), (len(shapes), step))[0])
                waits.append(tuple(far))
                steps.append(step)
                position[rank] += 1
                for results_here, microbatch in made:
                    results_here.turns[microbatch] = turn
                    if microbatch in results_here.waiting:
                        ready.append(results_here.waiting.pop(microbatch))
                continue
            break
    stuck = [order[at] for order, at in zip(orders, position, strict=True) if at < len(order)]
    if stuck:
        raise ValueError(f"the schedule cannot continue: {', '.join(map(str, stuck))} wait for actions that never run")
    order = sorted(range(len(turns)), key=turns.__getitem__)
    places = dict(zip(sorted(turns), range(len(turns)), strict=True))
    nodes = tuple([(turns[at] % num_ranks, numbers[at], tuple([places[turn] for turn in waits[at]])) for at in order])
    examples = tuple([step for _, step in shapes.values()])
    return LinkedOrders(num_ranks, nodes, tuple([steps[at] for at in order]), examples, _places(examples, num_slots), repeat_of(nodes))


def _places(shapes: tuple[ScheduleStep, ...], num_slots: int) -> tuple[int, ...]:
    return tuple([SINGLE.index(each.kind) * num_slots + each.slot if isinstance(each, Action) else -1 for each in shapes])


class _Results(NamedTuple):
    """Results of one kind of computation on one slot, by microbatch.

    Attributes:
        turns: Time and rank of each result if all actions have equal times, as time · ranks + rank. In this order of the nodes a
            repeating schedule is linked the same way every time.
        waiting: Ranks that wait for them.
    """

    turns: dict[int, int]
    waiting: dict[int, int]

    @staticmethod
    def none() -> "_Results":
        """No results yet."""
        return _Results({}, {})


def _made(kind: ActionKind) -> ActionKind:
    """Results of an action; an unsplit backward also gives its input half's result."""
    return ActionKind.INPUT if kind is ActionKind.BACKWARD else kind


def _source_of(kind: ActionKind, slot: int, num_parts: int) -> tuple[ActionKind, int] | None:
    """Kind and slot of the dependency of an action, for its microbatch; a copy of the model has `num_parts` slots."""
    if kind is ActionKind.FORWARD:
        return (ActionKind.FORWARD, slot - 1) if slot % num_parts else None
    if kind is ActionKind.WEIGHT:
        return ActionKind.INPUT, slot
    return (ActionKind.FORWARD, slot) if (slot + 1) % num_parts == 0 else (ActionKind.INPUT, slot + 1)
