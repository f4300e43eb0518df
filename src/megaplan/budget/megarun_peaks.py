"""Peaks of single pipeline ranks of a job that megarun runs: blocks and the schedule are evaluated once for all of them."""

from __future__ import annotations

from collections.abc import Container, Sequence

from megaplan.budget.evaluation import BlockMemo, Evaluation
from megaplan.budget.megarun import evaluate, schedule_counts, stage_ranks
from megaplan.budget.peaks import WORK_OF_STAGE, Stage
from megaplan.inventory.tensors import Inventory
from megaplan.layout.values import Layout
from megaplan.spec.models import Spec

WORK_OF_LAYER = 6
"""Of a layer on one rank of its stage, in steps of about a microsecond; on the ranks with other shards, twice."""


class MegarunPeaks:
    """The peaks of some pipeline ranks of a layout, and the work that they took."""

    def __init__(self, spec: Spec, inventory: Inventory, memo: BlockMemo | None) -> None:
        """`memo`: blocks of other specs of a search."""
        self._of_job = spec, inventory, memo
        self._counts = schedule_counts(spec)
        self._evaluated: list[tuple[Evaluation, Container[int]]] = []

    def __call__(self, layout: Layout, stages: Sequence[Stage]) -> tuple[list[int], int]:
        """`stages`: pipeline ranks with their spans in the layout."""
        spec, inventory, memo = self._of_job
        self._evaluated = self._evaluated or evaluate(spec, inventory, layout, memo=memo)
        evaluations = [(evaluation.of_layout(layout), places) for evaluation, places in self._evaluated]
        peaks, work = [], 0
        for rank, spans in stages:
            found = [
                each
                for evaluation, places in evaluations
                for each in stage_ranks(evaluation, 0, places, self._counts, (rank,), listed=False)
            ]
            peaks.append(max([each.peak_bytes for each in found]))
            work += WORK_OF_STAGE + WORK_OF_LAYER * (2 * len(found) - 1) * sum([stop - start for start, stop in spans])
        return peaks, work
