"""What is balanced, how its slots lie on ranks, and what every split that fits keeps: the best cuts within all of that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from megaplan.layout.spans import Spans
from megaplan.partition.constraints import Constraints
from megaplan.partition.limits import EdgeWeights, PairLimits, SlotLimits, Span, Weight
from megaplan.partition.values import Balance, StackCosts, bottleneck
from megaplan.partition.weighted import balance, within_limits
from megaplan.schedules.placement import Placement, slots_of_rank

if TYPE_CHECKING:
    from megaplan.partition.layer_bytes import RankSum

Shares = Mapping[int, tuple[tuple[Weight, int], ...]]
"""More limits of slots: weights, and the most a span may weigh."""
Exclusion = tuple[tuple[int, Span], ...]
"""Spans of slots, (slot, span), that are never contained in those slots' spans all at once."""


@dataclass(frozen=True)
class Stack:
    """What is balanced, and how its slots lie on ranks.

    Attributes:
        costs: Of layers and ends.
        rules: Constraints on cuts.
        where: Placement.
        pp: Ranks.
        vpp: Slots a rank.
        baseline: Cuts to keep where that costs nothing.
        sums: For each rank, sums that every split which fits keeps.
    """

    costs: StackCosts
    rules: Constraints
    where: Placement
    pp: int
    vpp: int
    baseline: tuple[int, ...] | None = None
    sums: tuple[tuple[RankSum, ...], ...] = ()

    @cached_property
    def _between(self) -> EdgeWeights:
        return EdgeWeights()

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return len(self.costs.layers)

    def bottleneck(self, spans: Spans) -> int:
        """Cost of what paces a step cut so: see `values.bottleneck`."""
        return bottleneck(self.where, self.costs.of_slots(spans))[1]

    def slots(self, rank: int) -> tuple[int, ...]:
        """Of a rank, by chunk."""
        return slots_of_rank(self.where, rank, self.pp, self.vpp)

    def best(
        self,
        exclusions: Iterable[Exclusion] = (),
        spare: Sequence[int] | None = None,
        shares: Shares | None = None,
        most: int | None = None,
    ) -> Balance | None:
        """The best cuts within the sums and without what is excluded.

        Args:
            exclusions: For loop placement, of one slot each.
            spare: For each rank bytes that it may hold beside the sums; negative to hold fewer.
            shares: For loop placement.
            most: The largest cost of a slot, or rank, that is of use; None for any.
        """
        room, excluded = spare or (0,) * self.pp, list(exclusions)
        limited = bool(self.sums or excluded)
        if self.where == "v":
            pairs = [self._pair(rank, room[rank], excluded) for rank in range(self.pp)] if limited else None
            from megaplan.partition.folded_ties import balance_folded  # noqa: PLC0415  (only a V needs it)

            return balance_folded(self.costs, self.pp, self.rules, limits=pairs, baseline=self.baseline, most=most)
        slots = list(self._slot_limits(room, excluded)) if limited else None
        if slots is not None:
            for slot, share in (shares or {}).items():
                slots[slot] = slots[slot]._replace(sums=(*slots[slot].sums, *share))
        num_slots, weights = self.pp * self.vpp, self._between
        return balance(self.costs, num_slots, self.rules, limits=slots, baseline=self.baseline, weights=weights, most=most)

    @cached_property
    def partition_work(self) -> int:
        """Work of one search for cuts, in steps of about a microsecond.

        A loop placement: each layer at each slot, and each sum of each slot. A V placement searches pairs of cuts: measured as 20 steps
        for each pair of layers.
        """
        num_slots = self.pp * self.vpp
        if self.where == "v":
            return 20 * self.num_layers * self.num_layers
        return num_slots * self.num_layers + 10 * sum(len(moments) for moments in self.sums) * self.vpp

    def leaves_any(self, exclusions: Iterable[Exclusion], spare: Sequence[int]) -> bool:
        """Whether there are cuts within the sums and without what is excluded, whatever they cost; arguments as for `best`."""
        excluded = list(exclusions)
        if self.where == "v":
            from megaplan.partition.folded_ties import within_limits_folded  # noqa: PLC0415  (only a V needs it)

            pairs = [self._pair(rank, spare[rank], excluded) for rank in range(self.pp)]
            return within_limits_folded(self.costs, self.pp, self.rules, pairs)
        slots = list(self._slot_limits(spare, excluded))
        return within_limits(self.costs, self.pp * self.vpp, self.rules, slots, self._between)

    def _pair(self, rank: int, room: int, exclusions: Sequence[Exclusion]) -> PairLimits:
        first, second = self.slots(rank)
        spans = [dict(exclusion) for exclusion in exclusions]
        sums = self.sums[rank] if self.sums else ()
        return PairLimits(
            tuple((moment.weights[0], moment.weights[1], moment.most + room) for moment in sums),
            tuple((found[first], found[second]) for found in spans if first in found),
        )

    def _slot_limits(self, room: Sequence[int], exclusions: Sequence[Exclusion]) -> Iterator[SlotLimits]:
        """A chunk's own sums; where a rank has more chunks, all the others together hold their lightest spans at least."""
        for slot in range(self.pp * self.vpp):
            spare = room[slot % self.pp]
            sums = tuple([(weight, most + spare) for weight, most in self._alone[slot]])
            yield SlotLimits(sums, tuple([span for ((own, span),) in exclusions if own == slot]))

    @cached_property
    def _alone(self) -> list[list[tuple[Weight, int]]]:
        """For each slot the weights of its chunk, and the most it may weigh beside the lightest spans of its rank's other chunks."""
        known: dict[int, int] = {}  # of weights, which moments share
        found: list[list[tuple[Weight, int]]] = [[] for _ in range(self.pp * self.vpp)]
        for rank, moments in enumerate(self.sums):
            for moment in moments:
                for weight in moment.weights:
                    if id(weight) not in known:
                        known[id(weight)] = min([after - start for start, after in pairwise(weight.up)])
                lightest = [known[id(weight)] for weight in moment.weights]
                most = moment.most - sum(lightest)
                for chunk, (weight, own) in enumerate(zip(moment.weights, lightest, strict=True)):
                    found[rank + chunk * self.pp].append((weight, most + own))
        return found

    def least_excess(self) -> int:
        """No cuts exceed the sums by less, whatever they cost: from means of all of them."""
        from megaplan.partition.mean_bound import SlotSum, mean_bound  # noqa: PLC0415  (only where nothing fits)

        slots, sums = {rank: self.slots(rank) for rank in range(self.pp)}, []
        for rank, moments in enumerate(self.sums):
            for moment in moments:
                before = {slot: weight.up for slot, weight in zip(slots[rank], moment.weights, strict=True)}
                sums.append(SlotSum(before, -moment.most))
        return mean_bound(sums, self.pp * self.vpp, self.num_layers, self.rules)

    def shares(self, rank: int, spans: Spans, excess: int) -> Shares:
        """Of the slots of a rank that has too much, what each may weigh when all give way in proportion."""
        owned = self.slots(rank)
        moment = max(self.sums[rank], key=lambda moment: moment.excess([spans[slot] for slot in owned]))
        weights = [weight.of(spans[slot]) for weight, slot in zip(moment.weights, owned, strict=True)]
        total = sum(weights) or 1
        return {slot: ((weight, size - size * excess // total),) for slot, weight, size in zip(owned, moment.weights, weights, strict=True)}

    def apportioned(self, ratio: tuple[int, int], spare: Sequence[int]) -> Shares:
        """What each slot may weigh when every chunk of a rank gets `ratio` as much as the chunk before it."""
        (num, den), last = ratio, self.vpp - 1
        parts = [den ** (last - chunk) * num**chunk for chunk in range(self.vpp)]
        found: dict[int, tuple[tuple[Weight, int], ...]] = {}
        for rank in range(self.pp):
            for chunk, slot in enumerate(self.slots(rank)):
                found[slot] = tuple(
                    (each.weights[chunk], (each.most + spare[rank]) * parts[chunk] // sum(parts)) for each in self.sums[rank]
                )
        return found

    def rank_excess(self, rank: int, spans: Spans) -> int:
        """By how much the rank exceeds its sums; negative where it is within them."""
        owned = [spans[slot] for slot in self.slots(rank)]
        return max(moment.excess(owned) for moment in self.sums[rank])
