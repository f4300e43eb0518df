"""Data ranks divide the global batch so that they and one process read the same microbatches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaplan.spec.models import Spec
from megarun.batches import Batches

pytestmark = pytest.mark.runtime


def place(data_rank: int, num_data_ranks: int, stage: int = 0, num_stages: int = 1) -> Any:
    coordinate, device = {"pp": stage}, torch.device("cpu")
    return SimpleNamespace(
        coordinate=coordinate, device=device, data_rank=data_rank, num_data_ranks=num_data_ranks, size=lambda _: num_stages
    )


def test_ranks_read_the_microbatches_of_one_process(spec_with: Any, worker: Any) -> None:
    """Microbatch m of data rank d is microbatch m · D + d of one process; labels are the tokens' successors."""
    rows = worker.CountingRows(61)
    one = Batches(rows, Spec.model_validate(spec_with({"schedule.num_microbatches": 6})), place(0, 1))
    three = [Batches(rows, Spec.model_validate(spec_with({"schedule.num_microbatches": 2})), place(d, 3)) for d in range(3)]
    for step in (0, 5):
        whole, labels = (part.chunk(6) for part in one.at(step))
        for d, batches in enumerate(three):
            tokens = batches.at(step)[0].chunk(2)
            assert all(torch.equal(tokens[m], whole[m * 3 + d]) for m in range(2))
        assert all(torch.equal((w + 1) % 61, label) for w, label in zip(whole, labels, strict=True))
    assert not torch.equal(one.at(0)[0], one.at(1)[0])


def test_a_stage_reads_what_it_needs(spec_with: Any, worker: Any) -> None:
    """Tokens on the first stage, labels on the last, nothing between."""
    spec = Spec.model_validate(spec_with({"mesh.pp": 3, "schedule.num_microbatches": 3}))
    found = [Batches(worker.CountingRows(61), spec, place(0, 1, stage, 3)).at(0) for stage in range(3)]
    assert [(tokens is None, labels is None) for tokens, labels in found] == [(False, True), (True, True), (True, False)]
