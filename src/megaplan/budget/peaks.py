"""The largest peak of every pp rank, over many layouts of one spec: for a search that moves a few cuts at a time."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from megaplan.inventory.tensors import Inventory
from megaplan.layout.spans import Spans
from megaplan.layout.values import Layout
from megaplan.spec.models import Spec

if TYPE_CHECKING:
    from megaplan.budget.evaluation import BlockMemo, Evaluation
    from megaplan.budget.megarun import ScheduleCounts

WORK_OF_STAGE, WORK_OF_LAYER, WORK_OF_MEGATRON_LAYER = 300, 6, 200
"""Microseconds on one machine: of a stage, of a layer on one of its ranks (on the ranks with other shards, twice), under Megatron-Core."""


class StagePeaks:
    """What `build_budget` says of each pp rank. Blocks and the schedule are evaluated once, and a pp rank once for each set of its spans.

    A pp rank's budget depends on its own slots alone: on their layers, and on whether they are the first or the last of the model.

    Attributes:
        num_stages: pp ranks evaluated so far; all of a layout's for a host whose stages depend on each other.
        work: What they took, in steps of about a microsecond; the same on every machine.
    """

    def __init__(self, spec: Spec, inventory: Inventory, memo: BlockMemo | None = None) -> None:
        """`spec`: checked; `inventory`: its parameter tensors; `memo`: blocks of other specs of a search."""
        self._spec, self._inventory, self._memo = spec, inventory, memo
        self._evaluated: list[tuple[Evaluation, Container[int]]] = []
        self._counts: ScheduleCounts | None = None
        self._peaks: dict[tuple[int, Spans], int] = {}
        self.num_stages = self.work = 0

    def of(self, layout: Layout, pp_ranks: Sequence[int]) -> list[int]:
        """Bytes at the largest peaks of some pp ranks.

        Raises:
            MegaplanError: MP311 … MP313 if the schedule cannot run on these degrees; MP504 if the device is unknown.
        """
        if self._spec.host.name == "torchtitan":
            found = self._of_whole_job(layout)
            return [found[rank] for rank in pp_ranks]
        of_rank = layout.by_rank()
        own = [(rank, tuple([(slot.start, slot.stop) for slot in of_rank[rank]])) for rank in pp_ranks]
        if missing := [key for key in own if key not in self._peaks]:
            evaluate_missing = self._evaluate if self._spec.host.name == "megarun" else self._evaluate_megatron
            evaluate_missing(layout, missing)
        return [self._peaks[key] for key in own]

    def _evaluate(self, layout: Layout, missing: list[tuple[int, Spans]]) -> None:
        from megaplan.budget.megarun import evaluate, schedule_counts, stage_ranks  # noqa: PLC0415  (other hosts have their own)

        if self._counts is None:
            self._counts = schedule_counts(self._spec)
            self._evaluated = evaluate(self._spec, self._inventory, layout, memo=self._memo)
        evaluations = [(evaluation.of_layout(layout), places) for evaluation, places in self._evaluated]
        for key in missing:
            counts = self._counts
            found = [
                rank for evaluation, places in evaluations for rank in stage_ranks(evaluation, 0, places, counts, key[:1], listed=False)
            ]
            self._peaks[key] = max([rank.peak_bytes for rank in found])
            self.work += WORK_OF_STAGE + WORK_OF_LAYER * (2 * len(found) - 1) * sum([stop - start for start, stop in key[1]])
        self.num_stages += len(missing)

    def _evaluate_megatron(self, layout: Layout, missing: list[tuple[int, Spans]]) -> None:
        from megaplan.budget.megatron import megatron_peaks  # noqa: PLC0415  (another host needs none of it)

        found = megatron_peaks(self._spec, self._inventory, layout, [rank for rank, _ in missing])
        self._peaks.update(zip(missing, found, strict=True))
        num_layers = sum([stop - start for _, spans in missing for start, stop in spans])
        self.work += len(missing) * WORK_OF_STAGE + WORK_OF_MEGATRON_LAYER * num_layers
        self.num_stages += len(missing)

    def _of_whole_job(self, layout: Layout) -> list[int]:
        from megaplan.budget.torchtitan import torchtitan_budget  # noqa: PLC0415  (other hosts need none of it)

        per_stage, found = self._spec.mesh.world_size // layout.pp, [0] * layout.pp
        for budget in torchtitan_budget(self._spec, self._inventory, layout, listed=False).ranks:
            for stage in {rank // per_stage for rank in budget.ranks}:
                found[stage] = max(found[stage], budget.peak_bytes)
        self.num_stages += layout.pp
        self.work += layout.pp * WORK_OF_STAGE + WORK_OF_MEGATRON_LAYER * len(self._inventory.layers)
        return found
