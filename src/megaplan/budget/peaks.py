"""The largest peak of every pp rank for many layouts of one spec, for a search that moves a few cuts at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megaplan.budget.values import Budget, PoolBudget, RankBudget, merged_ranks
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans
from megaplan.layout.ranks import Layout, rank_coordinate
from megaplan.spec.models import Spec
from megaplan.spec.pools import parts_of

if TYPE_CHECKING:
    from megaplan.budget.evaluation import BlockMemo


def build_budget(spec: Spec, inventory: Inventory, layout: Layout) -> Budget:
    """Bytes of every rank by phase and column, for the tensors of the spec's host.

    Args:
        spec: A checked spec.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec.

    Returns:
        The budget; ranks with equal cells are listed together, those with the least headroom first.

    Raises:
        MegaplanError: MP311 … MP313 if the schedule cannot run on these degrees; MP504 if the device is unknown.
    """
    parts, per_stage = parts_of(spec), spec.mesh.world_size // spec.mesh.pp
    budgets: list[Budget] = [spec.host.kind.budget(part.spec, inventory, layout) for part in parts]
    if not spec.pools:
        return budgets[0]
    ranks, pools = list[RankBudget](), list[PoolBudget]()
    for part, budget in zip(parts, budgets, strict=True):
        first, stop = part.ranks.start * per_stage, part.ranks.stop * per_stage
        pools.append(PoolBudget((first, stop), budget.device))
        for rank in budget.ranks:
            if own := tuple([each for each in rank.ranks if first <= each < stop]):
                ranks.append(rank._replace(ranks=own, coordinate=rank_coordinate(spec.mesh, own[0])))
    return budgets[0]._replace(ranks=merged_ranks(ranks), pools=tuple(pools))


StageSpans = tuple[int, Spans]
"""A pipeline rank and the spans of its slots."""
WORK_OF_STAGE, WORK_OF_JOB_LAYER = 300, 200
"""Microseconds of an evaluation on one machine: of a stage, and of a layer if nothing can be reused for the next layout."""


class StagePeaks:
    """Peaks of pp ranks, equal to those of `build_budget`. Blocks and schedule are evaluated once, a rank once for each set of its spans.

    A pp rank's budget depends on its own slots alone: on their layers, and on whether they are the first or the last of the model.

    Attributes:
        num_stages: pp ranks evaluated so far; all ranks of a layout for a host without separate peaks.
        work: Work of these evaluations in steps of about a microsecond; the same on every machine.
    """

    def __init__(self, spec: Spec, inventory: Inventory, memo: BlockMemo | None = None) -> None:
        """`spec` is checked, `inventory` has its parameter tensors, `memo` has blocks of other specs of a search."""
        self._spec, self._inventory, self._memo = spec, inventory, memo
        self._of_stages: Callable[[Layout, Sequence[StageSpans]], tuple[list[int], int]] | None = None
        self._peaks: dict[StageSpans, int] = {}
        self.num_stages = self.work = 0

    def of(self, layout: Layout, pp_ranks: Sequence[int]) -> list[int]:
        """Bytes at the largest peaks of some pp ranks.

        Raises:
            MegaplanError: MP311 … MP313 if the schedule cannot run on these degrees; MP504 if the device is unknown.
        """
        own_peaks = self._spec.host.kind.peaks
        if own_peaks is None:
            found = self._of_budget(layout)
            return [found[rank] for rank in pp_ranks]
        of_rank = layout.by_rank()
        own = [(rank, tuple([(slot.start, slot.stop) for slot in of_rank[rank]])) for rank in pp_ranks]
        if missing := [key for key in own if key not in self._peaks]:
            if self._of_stages is None:
                self._of_stages = own_peaks(self._spec, self._inventory, self._memo)
            peaks, work = self._of_stages(layout, missing)
            self._peaks.update(zip(missing, peaks, strict=True))
            self.work += work
            self.num_stages += len(missing)
        return [self._peaks[key] for key in own]

    def _of_budget(self, layout: Layout) -> list[int]:
        per_stage, found = self._spec.mesh.world_size // layout.pp, [0] * layout.pp
        for budget in build_budget(self._spec, self._inventory, layout).ranks:
            for stage in {rank // per_stage for rank in budget.ranks}:
                found[stage] = max(found[stage], budget.peak_bytes)
        self.num_stages += layout.pp
        self.work += layout.pp * WORK_OF_STAGE + WORK_OF_JOB_LAYER * len(self._inventory.layers)
        return found
