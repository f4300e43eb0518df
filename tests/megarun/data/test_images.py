"""Images of a batch: the same for every layout and every start, at positions that are not read and not predicted."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaplan.spec.models import Spec
from megarun.data.batches import Batches
from megarun.data.images import covered_positions, num_labels
from megarun.parallel.groups.tensor_vocabulary import IGNORE_INDEX

pytestmark = pytest.mark.runtime
ENCODER = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "head_dim": 8, "ffn_hidden_size": 20, "patch_values": 5, "patches": 6}
TOWERS = {"vision": {"encoder": ENCODER}, "projector": {"projection": {"widths": [32, 32], "joined_patches": 2}}}


def spec_of(spec_with: Any, microbatches: int, **more: Any) -> Spec:
    batch = {"micro_batch_size": 2, "seq_length": 11, "images": 2}
    model = {"model.pattern": "AD", "model.num_layers": 2, "model.towers": TOWERS}
    return Spec.model_validate(spec_with({**model, "batch": batch, "schedule.num_microbatches": microbatches, **more}))


def place(data_rank: int, num_data_ranks: int, stage: int = 0, num_stages: int = 1, tp: int = 0) -> Any:
    coordinate = {"pp": stage, "cp": 0, "tp": tp}
    device = torch.device("cpu")
    return SimpleNamespace(
        coordinate=coordinate, device=device, data_rank=data_rank, num_data_ranks=num_data_ranks, size=lambda _: num_stages
    )


def test_data_ranks_have_the_images_of_one_process(spec_with: Any, worker: Any) -> None:
    rows = worker.CountingRows(61)
    one = Batches(rows, spec_of(spec_with, 4), place(0, 1))
    two = [Batches(rows, spec_of(spec_with, 2), place(rank, 2)) for rank in range(2)]
    for step in (0, 7):
        whole = one.at(step)
        for rank, batches in enumerate(two):
            batch = batches.at(step)
            for index in range(2):
                found, expected = batch.part(index, 2), whole.part(2 * index + rank, 4)
                assert torch.equal(found.patches, expected.patches)
                assert torch.equal(found.places, expected.places)
                assert found.keyword_inputs().keys() == expected.keyword_inputs().keys() >= {"patches", "places"}


def test_a_tensor_rank_has_its_patches_and_places(spec_with: Any, worker: Any) -> None:
    """Image 0 at positions 0 to 3, image 1 at 6 to 9 of 12; the place of another rank's row is behind the two rows of six positions."""
    towers = {**TOWERS, "vision": {"encoder": {**ENCODER, "patches": 8}}}
    more = {"model.towers": towers, "batch.seq_length": 12, "mesh": {"tp": 2, "towers": "split"}}
    one = Batches(worker.CountingRows(61), spec_of(spec_with, 1, **{**more, "mesh": {}}), place(0, 1)).at(0)
    found = [Batches(worker.CountingRows(61), spec_of(spec_with, 1, **more), place(0, 1, tp=rank)).at(0) for rank in range(2)]
    assert torch.equal(torch.cat([batch.patches for batch in found], 1), one.patches)
    own, other = [0, 1, 2, 3], [12] * 4
    assert found[0].places.tolist() == [*own, *other, *(each + 6 for each in own), *other]
    assert found[1].places.tolist() == [*other, *own, *other, *(each + 6 for each in own)]


def test_images_are_a_function_of_the_step(spec_with: Any, worker: Any) -> None:
    """A resumed run asks for a step again; no image comes twice."""
    first, again = (Batches(worker.CountingRows(61), spec_of(spec_with, 2), place(0, 1)) for _ in range(2))
    assert torch.equal(first.at(3).patches, again.at(3).patches)
    images = torch.cat([first.at(step).patches for step in range(3)]).flatten(1)
    assert len(images.unique(dim=0)) == len(images) == 3 * 4 * 2
    other = Batches(worker.CountingRows(61), spec_of(spec_with, 2, **{"training.seed": 7}), place(0, 1))
    assert not torch.equal(first.at(3).patches, other.at(3).patches)


def test_text_under_an_image_is_not_predicted(spec_with: Any, worker: Any) -> None:
    """Image 0 at positions 0 to 2, image 1 at 5 to 7; the label before each of them is none."""
    spec = spec_of(spec_with, 2)
    assert covered_positions(spec).tolist() == [0, 1, 2, 5, 6, 7]
    batch = Batches(worker.CountingRows(61), spec, place(0, 1)).at(0)
    hidden = torch.tensor([True, True, False, False, True, True, True, False, False, False, False])
    assert torch.equal(batch.labels == IGNORE_INDEX, hidden.expand_as(batch.labels))
    assert num_labels(spec) == int((batch.labels != IGNORE_INDEX).sum()) == 4 * 6
    assert batch.part(0, 2).places.tolist() == [0, 1, 2, 5, 6, 7, 11, 12, 13, 16, 17, 18]


def test_documents_and_images_together(spec_with: Any, worker: Any) -> None:
    spec = spec_of(spec_with, 2, **{"data.packing": "documents"})
    batch = Batches(worker.CountingRows(61), spec, place(0, 1)).at(0)
    assert batch.packed.num_targets == int((batch.labels != IGNORE_INDEX).sum()) > 0


def test_only_the_first_stage_has_images(spec_with: Any, worker: Any) -> None:
    spec = spec_of(spec_with, 4, **{"mesh.pp": 2})
    found = [Batches(worker.CountingRows(61), spec, place(0, 1, stage, 2)).at(0) for stage in range(2)]
    assert [batch.patches is None for batch in found] == [False, True]
    assert found[1].labels is not None
    assert int((found[1].labels == IGNORE_INDEX).sum()) > 0


def test_without_an_encoder_nothing_is_covered(spec_with: Any) -> None:
    spec = Spec.model_validate(spec_with())
    assert covered_positions(spec).size == 0
    assert num_labels(spec) == spec.global_batch_tokens
