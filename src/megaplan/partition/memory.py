"""Excesses of splits over the memory, by the budget of the whole job, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaplan.budget.peaks import StagePeaks
from megaplan.budget.values import spec_device
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans, build_layout
from megaplan.layout.ranks import Layout
from megaplan.spec.models import Spec
from megaplan.spec.pools import parts_of

if TYPE_CHECKING:
    from megaplan.budget.evaluation import BlockMemo
    from megaplan.cost.values import MeasuredCosts
    from megaplan.partition.limits import SpanSum


class Memory:
    """Excesses of splits of one spec; the budget of each split is computed once."""

    def __init__(
        self,
        spec: Spec,
        inventory: Inventory,
        measured: MeasuredCosts | None = None,
        *,
        headroom_bytes: int = 0,
        memo: BlockMemo | None = None,
    ) -> None:
        """A costs file's bytes count where they are larger than the budget's.

        Args:
            spec: A checked spec.
            inventory: Parameter tensors of the spec.
            measured: A costs file.
            headroom_bytes: Usable bytes that must stay free.
            memo: Blocks of a search's other specs.
        """
        self._spec, self._inventory, self._measured = spec, inventory, measured
        self._measured_sums: tuple[tuple[SpanSum, ...], ...] = ()
        self._excesses: dict[Spans, tuple[int, ...]] = {}
        self._asked: set[Spans] = set()
        self._peaks, self._usable_bytes, self._headroom_bytes = list[StagePeaks](), list[int](), headroom_bytes
        for part in parts_of(spec):
            peaks = StagePeaks(part.spec, inventory, None if spec.pools else memo)
            self._peaks += [peaks] * len(part.ranks)
            usable = spec_device(part.spec, spec.mesh.world_size).usable_bytes - headroom_bytes
            self._usable_bytes += [usable] * len(part.ranks)

    @property
    def num_budgets(self) -> int:
        """Number of splits whose budget was computed so far, for all ranks or for one."""
        return len(self._asked)

    @property
    def work(self) -> int:
        """Work of these budgets, counted in steps of about a microsecond."""
        return sum(peaks.work for peaks in set(self._peaks))

    @property
    def num_stages(self) -> int:
        """Stages evaluated for them; a stage with the same spans in two splits is evaluated once."""
        return sum(peaks.num_stages for peaks in set(self._peaks))

    def excesses(self, spans: Spans) -> tuple[int, ...]:
        """Bytes by which each pp rank exceeds usable memory; negative values are headroom. Of mirrored ranks only the first is listed."""
        if spans not in self._excesses:
            self._excesses[spans] = tuple(self._found(spans, range(self._spec.pp_shares)))
        return self._excesses[spans]

    def largest_peak(self, spans: Spans) -> int:
        """Bytes at the largest peak of any rank."""
        return max(peak for peak, _ in self.peaks(spans))

    def peaks(self, spans: Spans) -> list[tuple[int, int]]:
        """Bytes at the peak of each pp rank, and the remaining usable bytes."""
        found = zip(self.excesses(spans), self._usable_bytes[: self._spec.pp_shares], strict=True)
        return [(over + usable, self._headroom_bytes - over) for over, usable in found]

    def fullest(self, spans: Spans) -> tuple[int, int]:
        """The same for the pp rank with the least headroom."""
        return min(self.peaks(spans), key=lambda each: each[1])

    def excess(self, rank: int, spans: Spans) -> int:
        """The excess of one pp rank."""
        known = self._excesses.get(spans)
        return self._found(spans, (rank,))[0] if known is None else known[rank]

    def sums(self, spans: Spans) -> tuple[tuple[SpanSum, ...], ...]:
        """The sums of each pp rank that every fitting split keeps; `spans` are of any split."""
        layout, of_host = build_layout(self._spec, self._inventory, spans), self._spec.host.kind.sums
        found: list[tuple[SpanSum, ...]] = []
        for part in parts_of(self._spec):
            usable = self._usable_bytes[part.ranks.start]
            found += of_host(part.spec, self._inventory, layout, usable, self._measured)[part.ranks.start : part.ranks.stop]
        return tuple(found[: self._spec.pp_shares])

    def _found(self, spans: Spans, ranks: Sequence[int]) -> list[int]:
        self._asked.add(spans)
        layout = build_layout(self._spec, self._inventory, spans)
        if self._spec.num_copies > 1:  # a rank and its mirror hold the same layers in the opposite order
            (peaks,) = dict.fromkeys(self._peaks)
            pairs = [(rank, self._spec.mesh.pp - 1 - rank) for rank in ranks]
            found = [max(peaks.of(layout, pair)) - self._usable_bytes[pair[0]] for pair in pairs]
            return found if self._measured is None else list(map(max, found, self._measured_excesses(layout, ranks)))
        of_rank = dict[int, int]()
        for peaks in dict.fromkeys(self._peaks[rank] for rank in ranks):
            own = [rank for rank in ranks if self._peaks[rank] is peaks]
            of_rank |= zip(own, peaks.of(layout, own), strict=True)
        found = [of_rank[rank] - self._usable_bytes[rank] for rank in ranks]
        if self._measured is not None and len(spans) > 1:
            found = list(map(max, found, self._measured_excesses(layout, ranks)))
        return found

    def _measured_excesses(self, layout: Layout, ranks: Sequence[int]) -> list[int]:
        sums = self._measured_sums or self.sums(layout.spans)
        self._measured_sums = sums
        of_rank = layout.by_rank()
        owned = [[(slot.start, slot.stop) for slot in of_rank[rank]] for rank in ranks]
        return [max(point.excess(spans) for point in sums[rank]) for rank, spans in zip(ranks, owned, strict=True)]
