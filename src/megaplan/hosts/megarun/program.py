"""A block as data: its operations in the order in which megarun runs them, and a replay that gives the allocated storages at every point.

Rules of the replay, all of them autograd's:

- A storage lives from the operation that makes it to the last one that reads it, longer if an operation keeps it for backward or a Python
  local of the block's `forward` still names it (`held`).
- A view has no separate storage: saving it saves the viewed tensor. Its gradient is a separate storage, and the cut's backward
  joins the gradients of all slices into a new one.
- Backward runs the operations in reverse. While an operation's backward runs, its output gradient, its kept storages and every gradient
  that it makes are allocated. Then its output gradient is freed, and so is each saved storage that no other operation saves.
- A second gradient of one storage is added in place to the first, if nothing else holds the first and it is not a view. Otherwise
  the sum is a third storage, made when the operation's own output gradient and kept storages are freed. A linear's input gradient is a view
  of a product of two dims. An addition and a reshape pass their gradient on without a copy, a reshape as a view.
- Parameter gradients stay until the end of the block, where FSDP2 takes them.
- Recompute: storages made inside the region are not kept; its inputs are kept until the region's backward has ended. The region is
  recomputed when backward first needs it, up to the last tensor that it saves: a product that ends it is not recomputed, unless its linear
  can be split and saves its input after the product. Outputs that a selective checkpoint caches are also kept until the recomputation.
- A split backward omits a linear's weight gradient, and keeps its input and its output's gradient until W has computed it. Linears that can
  be split make their input gradient without a view, whether the backward is split or whole.

Source: torch/csrc/autograd/engine.cpp and input_buffer.cpp (`can_accumulate_inplace`: a view shares its storage with its base);
FSDP2's `FSDPParamGroup.post_backward`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from megaplan.blocks.ops import INPUT, OUTPUT, SHARED, Flow, Op
from megaplan.hosts.megarun.graph import AGAIN, Graph, dropped_by, keepers_of, roots_of
from megaplan.hosts.megarun.live_sets import LiveSet, largest_points

CALLER = "caller"  # the caller of autograd, among the holders of gradients
AGAIN_MADE = "+"  # the holder of a sum counts among the holders of its parts, once for each time that the sum was not made in place


Pick = Callable[[dict[str, Any]], tuple[Any, ...]]
"""Function that gives the values of some names in one call."""


PeakCandidate = tuple[LiveSet, Pick, int]
"""A point that can be the peak, the function that picks the sizes of its tensors, and the number of parameter gradients made so far."""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A program's saved set and live sets.

    Attributes:
        saved: Kept storages, each with the operations that keep it.
        of_saved: Function that picks the values of their names.
        keeps_input: True if the block keeps its input, which belongs to the block before.
        counts_input: True if the points of the forward have the input up to its last reader.
        forward: Every live set of the forward.
        backward: Every live set of the backward.
        forward_peaks: Points of `forward` that can be the peak for some sizes: no other point has all their tensors.
        backward_peaks: Points of `backward`, with all parameter gradients so far.
        accumulating_peaks: Points of `backward`, with only the operation's own parameter gradients, and the function that picks these.
        of_params: Function that picks the values of all parameters, in the order in which they are made.
        program: The replayed program.
    """

    saved: tuple[tuple[str, tuple[str, ...]], ...]
    of_saved: Pick
    keeps_input: bool
    counts_input: bool
    forward: tuple[LiveSet, ...]
    backward: tuple[LiveSet, ...]
    forward_peaks: tuple[PeakCandidate, ...]
    backward_peaks: tuple[PeakCandidate, ...]
    accumulating_peaks: tuple[tuple[LiveSet, Pick, Pick], ...]
    of_params: Pick
    program: "Program"


class Program(NamedTuple):
    """Inputs of a backward's replay: kept storages in order, the gradients that arrive, and a storage that the block's caller holds."""

    graph: Graph
    order: tuple[str, ...]
    arriving: dict[str, str]
    pinned: str | None


def replay(
    ops: tuple[Op, ...],
    held: frozenset[str] = frozenset(),
    region: frozenset[str] = frozenset(),
    *,
    cached: frozenset[str] = frozenset(),
    after: frozenset[str] = frozenset(),
    arrives: str = OUTPUT,
    starts: bool = False,
    pinned: str | None = None,
    waiting: tuple[str, ...] = (),
    counts_input: bool = False,
    away: frozenset[str] = frozenset(),
    parts: tuple[frozenset[str], ...] = (),
    passed: frozenset[str] = frozenset(),
) -> Replay:
    """Replay a program.

    Args:
        ops: Operations in execution order; the first reads `x`, the last makes `out`.
        held: Storages that a local of the block's forward names until it returns.
        region: Names of the operations to recompute.
        cached: Storages that a selective checkpoint keeps until the region has run again, with keepers or without.
        after: Operations after the recomputed region that keep some of its inputs, which are not dropped.
        arrives: The storage whose gradient reaches the block first.
        starts: Backward starts here: autograd's caller holds that gradient to the end.
        pinned: A kept storage that the block's caller holds until the block's backward has ended.
        waiting: Gradients that exist before the block's backward begins, by the name of their tensor: of storages that other blocks read
            too, and of shared parameters.
        counts_input: True if the input, which the block does not save, is freed after its last reader; else it is counted outside the block
            for the whole forward.
        away: Storages that are absent between forward and backward (in host memory, or recomputed one by one): each returns when backward
            reaches the last operation that saves it.
        parts: Operations of each checkpoint, in order, if the region has several; none reads a tensor that another drops.
        passed: Storages that other blocks keep, until the backward of an operation after the region that keeps them.
    """
    roots = roots_of(ops)
    dropped = dropped_by(ops, roots, region, after)
    keepers = keepers_of(ops, roots)
    entering = frozenset(roots[name] for op in ops if op.name in region for name in op.reads) - dropped
    passed &= dropped
    why = {name: names for name, names in keepers.items() if name not in dropped and name not in away}
    why |= {name: [keeper for keeper in keepers[name] if keeper not in region] for name in passed}
    why |= {name: [AGAIN] for name in sorted((entering | cached) - set(why))}
    keeps_input = why.pop(INPUT, None) is not None
    order = [name for op in ops if not op.is_view for name in op.makes if name in why]
    cached = cached if region else frozenset()
    graph = Graph(ops, roots, held, keepers, frozenset(why), region, entering, dropped, cached, away, parts, passed)
    arrived = (*(INPUT,) * counts_input, *(SHARED,) * (SHARED in roots))
    forward = _forward(ops, roots, graph.saved, held | {SHARED}, arrived)
    arriving = {arrives: arrives, **({CALLER: arrives} if starts else {}), **{name: name for name in waiting}}
    program = Program(graph, tuple(order), arriving, pinned)
    backward = Backward(program).points
    return Replay(
        saved=tuple((name, tuple(dict.fromkeys(why[name]))) for name in order),
        of_saved=_pick(order),
        keeps_input=keeps_input,
        counts_input=counts_input,
        forward=forward,
        forward_peaks=tuple((point, _pick(point.tensors), 0) for point in largest_points(forward, lambda _: ())),
        program=program,
        **_backward_fields(backward),
    )


def with_backward(run: Replay, program: Program, *, splits: bool = False, splittable: bool = False) -> "tuple[Replay, Backward]":
    """The same forward with another backward, and that backward; the arguments are those of `Backward`."""
    backward = Backward(program, splits=splits, splittable=splittable)
    return replace(run, program=program, **_backward_fields(backward.points)), backward


def _backward_fields(backward: tuple[LiveSet, ...]) -> dict[str, Any]:
    """The fields of a `Replay` that its backward decides."""
    return {
        "backward": backward,
        "backward_peaks": tuple(
            (point, _pick(point.tensors), len(point.params)) for point in largest_points(backward, lambda point: point.params)
        ),
        "accumulating_peaks": tuple(
            (point, _pick(point.tensors), _pick(point.new_params)) for point in largest_points(backward, lambda point: point.new_params)
        ),
        "of_params": _pick(backward[-1].params),
    }


def _pick(names: Sequence[str]) -> Pick:
    if len(names) < 2:  # itemgetter gives one value bare
        return lambda values: tuple([values[name] for name in names])
    return itemgetter(*names)


def _forward(
    ops: tuple[Op, ...], roots: dict[str, str], saved: frozenset[str], held: frozenset[str], arrived: tuple[str, ...] = ()
) -> tuple[LiveSet, ...]:
    last_read = {roots[name]: index for index, op in enumerate(ops) for name in (*op.reads, *op.holds)}
    live: dict[str, None] = dict.fromkeys(arrived)
    points = []
    for index, op in enumerate(ops):
        if not op.is_view:
            live |= dict.fromkeys(op.makes)
        points.append(LiveSet(op.name, tuple(live)))
        for name in list(live):
            if last_read.get(name, index) <= index and name not in saved and name not in held and name != OUTPUT:
                del live[name]
    return tuple(points)


class Pending(NamedTuple):
    """A deferred weight gradient.

    Attributes:
        op: Operation of the linear; several weights that read one gathered input belong to one operation.
        param: The weight.
        kept: The storages that the operation keeps, the linear's input or its copy first.
        gradient: The holder of the output's gradient.
    """

    op: Op
    param: str
    kept: tuple[str, ...]
    gradient: str


class Backward:
    """The replay of a backward.

    Holders of gradients are kept by the name of the gradient's source; a sum that cannot be made in place is another holder of equal size.

    Attributes:
        points: Live sets found.
        pending: Deferred weight gradients, in W's order.
    """

    def __init__(self, program: Program, *, splits: bool = False, splittable: bool = False) -> None:
        """Replay.

        Args:
            program: Program of the block.
            splits: True if it is the first half of a split backward.
            splittable: True if a schedule may split the linears.
        """
        graph = program.graph
        self._graph, self._splits, self._pinned = graph, splits, program.pinned
        self._gradients = dict(program.arriving)
        self._views, self._splittable = set[str](), splits or splittable
        self._waiting = graph.waiting(splits=splits)
        self._live = dict.fromkeys(program.order)
        self._deferred: tuple[str, ...] = ()  # storages that wait for the W of another block while the region recomputes them
        self._params: tuple[str, ...] = ()
        self.points: tuple[LiveSet, ...] = ()
        self.pending: list[Pending] = []
        waits = list(graph.checkpoints) if graph.region else []
        for op in reversed(graph.ops):
            if waits and op.saves and self._reads_again(op, waits[-1]):
                self._recompute(waits.pop())
            self._live |= dict.fromkeys(sorted(graph.away.intersection(map(graph.roots.__getitem__, op.keeps))))
            made, params = self._pass_on(op) if op.flow in (Flow.ADD, Flow.RESHAPE) else self._compute(op)
            for name in op.makes:
                self._gradients.pop(name, None)
            _release(op.name, self._live, self._waiting, self._pinned)
            if graph.passed and op.name not in graph.region:
                self._hand_over(op)
            self._receive(op, made, params)
        self.points += (LiveSet("end", self._storages(), self._held(), self._params),)

    def _storages(self) -> tuple[str, ...]:
        return (*self._live, *self._deferred)

    def _hand_over(self, op: Op) -> None:
        """End an operation after the region that saves a tensor which the region recomputes."""
        passed = self._graph.passed.intersection(op.keeps)
        self._live = {name: None for name in self._live if name not in passed}
        if self._splits and op.waits:
            self._deferred += tuple(sorted(passed))

    def _pass_on(self, op: Op) -> tuple[dict[str, str], tuple[str, ...]]:
        """The holder of the gradient of each input of the operation, and no parameter gradients."""
        self.points += (LiveSet(op.name, self._storages(), self._held(), self._params),)
        holder = self._gradients[op.makes[0]]
        if op.flow is Flow.RESHAPE:
            self._views.add(holder)
        return dict.fromkeys(op.reads if op.grads is None else op.grads, holder), ()

    def _compute(self, op: Op) -> tuple[dict[str, str], tuple[str, ...]]:
        """New holders for the gradients of the operation's inputs, and the parameter gradients that it makes."""
        made, new, fetches, before = op.reads if op.grads is None else op.grads, op.params, op.fetches, op.before
        if self._splits and op.late:
            new, before = self._leave(op)
        else:
            fetches = (*fetches, *op.late_fetches, *op.late_inside)
        for storages, is_made in before:
            there = made if is_made else ()
            held = (*self._held(), *there)
            self.points += (LiveSet(op.name, (*self._storages(), *storages), held, self._params, (), len(there), len(storages)),)
        held = (*self._held(), *made)
        if op.sums:
            own = (*fetches, *op.sums)
            self.points += (LiveSet(op.name, (*self._storages(), *own), held, self._params, (), len(made), len(own)),)
            fetches = op.sums
        own = tuple([name for name in fetches if name not in self._live])
        storages, freed = (*self._storages(), *own), self._freed_before_bias(op)
        if freed is not None:
            first = tuple(param for param, _ in op.late if param in new)
            self.points += (LiveSet(op.name, storages, held, (*self._params, *first), first, len(made), len(own)),)
            storages = (*(name for name in self._live if name != freed), *self._deferred, *own)
        self._params = (*self._params, *new)
        self.points += (LiveSet(op.name, storages, held, self._params, new, len(made), len(own)),)
        return {name: name for name in made}, new

    def _leave(self, op: Op) -> tuple[tuple[str, ...], tuple[tuple[tuple[str, ...], bool], ...]]:
        """Leave an operation's late gradients to W. Returns the parameters whose gradients it still makes, and its points before them."""
        kept = tuple([self._graph.roots[name] for name in op.late_keeps])
        self.pending += [Pending(op, param, kept, self._gradients[output]) for param, output in op.late]
        late = frozenset(param for param, _ in op.late)
        before = tuple((tuple([name for name in made if name not in op.late_fetches]), is_made) for made, is_made in op.before)
        return tuple(param for param in op.params if param not in late), before

    def _freed_before_bias(self, op: Op) -> str | None:
        """Input that torch frees before it sums a bias's gradient: a recomputed tensor of which this product is the last reader.

        Source: torch/csrc/autograd/generated/Functions.cpp (`AddmmBackward0::apply`); a saved input that was not recomputed stays.
        """
        if not op.hands_views or len(op.params) == len(op.late) or self._graph.reduced & frozenset(op.makes):
            return None
        kept = self._graph.roots[op.keeps[0]]
        return kept if kept in self._graph.dropped and self._waiting.get(kept) == {op.name} else None

    def _receive(self, op: Op, made: dict[str, str], params: tuple[str, ...]) -> None:
        """Keep first gradients, and add the others to the existing ones."""
        computed = op.flow not in (Flow.ADD, Flow.RESHAPE)
        arriving = list(made.items())
        while arriving:
            name, new = arriving.pop(0)
            first = self._gradients.get(name)
            if first is None:
                self._gradients[name] = new
                if self._hands_views(op):
                    self._views.add(new)
                continue
            holders = [*self._gradients.values(), *(pending.gradient for pending in self.pending)]
            if first not in self._views and holders.count(first) == 1:
                continue  # in place
            others = [new, *(other for _, other in arriving)] if computed else [] if new in holders else [new]
            gradients = (*self._held(), *(size_name(holder) for holder in (*others, first)))
            if self._hands_views(op) and len(op.params) > len(op.late):
                params = ()  # for a linear with a bias, the weight's gradient is transposed and taken before the input's is reshaped
            self.points += (LiveSet(f"sum after {op.name}", self._storages(), gradients, self._params, params, 1),)
            self._gradients[name] = first + AGAIN_MADE

    def _hands_views(self, op: Op) -> bool:
        """True if the operation's input gradient is a view: linears that a schedule can split do not make views.

        Frozen linears are not among these.
        """
        return op.hands_views and not (self._splittable and op.late)

    def _reads_again(self, op: Op, part: frozenset[str]) -> bool:
        """True if an operation's backward needs a checkpoint's second run."""
        graph, dropped = self._graph, self._graph.dropped & self._graph.made_by(part) - self._graph.passed
        return op.name in graph.region & part or any(graph.roots[name] in dropped for name in op.keeps)

    def _recompute(self, part: frozenset[str]) -> None:
        graph, wanted = self._graph, frozenset(self._waiting)
        again = _forward(graph.run_again(part, wanted, splittable=self._splittable), graph.roots, wanted, graph.held)
        live, held = self._storages(), self._held()
        self.points += tuple(LiveSet(f"recompute {point.op}", (*live, *point.storages), held, self._params) for point in again)
        self._live |= dict.fromkeys(name for name in sorted(graph.dropped & graph.made_by(part)) if name in self._waiting)
        _release(graph.again(part), self._live, self._waiting, self._pinned)

    def _held(self) -> tuple[str, ...]:
        pending = (each.gradient for each in self.pending)
        return tuple(size_name(holder) for holder in dict.fromkeys((*self._gradients.values(), *pending)))


def size_name(holder: str) -> str:
    """The tensor that has the same size as a gradient's holder."""
    return holder.rstrip(AGAIN_MADE)


def _release(op: str, live: dict[str, None], waiting: dict[str, set[str]], pinned: str | None) -> None:
    """Drop the storages whose last reader is this operation."""
    for name in list(live):
        if name in waiting and name != pinned:
            waiting[name].discard(op)
            if not waiting[name]:
                del live[name]
