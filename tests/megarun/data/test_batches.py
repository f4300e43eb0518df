"""Data ranks divide the global batch so that they and one process read the same microbatches."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megaplan.errors import MegaplanError
from megaplan.spec.models import Spec
from megarun.data.batches import FURTHER, Batches
from megarun.parallel.groups.context import own_positions
from megarun.parallel.groups.tensor_vocabulary import IGNORE_INDEX

pytestmark = pytest.mark.runtime


def place(data_rank: int, num_data_ranks: int, stage: int = 0, num_stages: int = 1) -> Any:
    coordinate, device = {"pp": stage, "cp": 0, "tp": 0}, torch.device("cpu")
    return SimpleNamespace(
        coordinate=coordinate, device=device, data_rank=data_rank, num_data_ranks=num_data_ranks, size=lambda _: num_stages
    )


def test_ranks_read_the_microbatches_of_one_process(spec_with: Any, worker: Any) -> None:
    """Microbatch m of data rank d is microbatch m · D + d of one process; labels are the tokens' successors."""
    rows = worker.CountingRows(61)
    one = Batches(rows, Spec.model_validate(spec_with({"schedule.num_microbatches": 6})), place(0, 1))
    three = [Batches(rows, Spec.model_validate(spec_with({"schedule.num_microbatches": 2})), place(d, 3)) for d in range(3)]
    for step in (0, 5):
        whole, labels = (part.chunk(6) for part in one.at(step)[:2])
        for d, batches in enumerate(three):
            tokens = batches.at(step)[0].chunk(2)
            assert all(torch.equal(tokens[m], whole[m * 3 + d]) for m in range(2))
        assert all(torch.equal((w + 1) % 61, label) for w, label in zip(whole, labels, strict=True))
    assert not torch.equal(one.at(0)[0], one.at(1)[0])


def test_a_stage_reads_what_it_needs(spec_with: Any, worker: Any) -> None:
    """Tokens on the first stage, labels on the last, nothing between."""
    spec = Spec.model_validate(spec_with({"mesh.pp": 3, "schedule.num_microbatches": 3}))
    found = [Batches(worker.CountingRows(61), spec, place(0, 1, stage, 3)).at(0) for stage in range(3)]
    assert [(batch.tokens is None, batch.labels is None) for batch in found] == [(False, True), (True, True), (True, False)]


@pytest.mark.requirement("R-63")
def test_packed_rows_predict_nothing_across_documents(spec_with: Any, worker: Any) -> None:
    """A label counts exactly where the next token is of the same document; every stage has the starts; all ranks count the same labels."""
    settings = {"schedule.num_microbatches": 3, "data.packing": "documents", "mesh.pp": 3}
    rows, spec = worker.CountingRows(61), Spec.model_validate(spec_with(settings))
    tokens = Batches(rows, spec, place(0, 2, 0, 3)).at(1)
    middle, last = (Batches(rows, spec, place(0, 2, stage, 3)).at(1) for stage in (1, 2))
    other = Batches(rows, spec, place(1, 2, 2, 3)).at(1)
    assert (middle.tokens, middle.labels) == (None, None)
    assert all(torch.equal(batch.packed.starts, tokens.packed.starts) for batch in (middle, last))
    starts, labels = last.packed.starts, last.labels
    assert starts.dtype == torch.int32
    positions = torch.arange(spec.batch.seq_length)
    begins = starts == positions
    assert begins.any(1).all()
    assert torch.equal(labels[:, :-1] == IGNORE_INDEX, begins[:, 1:])
    counted = labels != IGNORE_INDEX
    assert torch.equal(labels[counted], ((tokens.tokens + 1) % 61)[counted])
    assert last.packed.num_targets == other.packed.num_targets == int(counted.sum() + (other.labels != IGNORE_INDEX).sum())


def test_a_batch_of_ends_alone_is_refused(spec_with: Any, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def every_column(_self: Any, _step: int, _seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        return np.tile(np.arange(seq_length + 1, dtype=np.int32), (num_rows, 1))

    monkeypatch.setattr(worker.CountingRows, "starts", every_column)
    with pytest.raises(MegaplanError, match=r"step 3: 48 tokens, each the last of its document"):
        Batches(worker.CountingRows(61), Spec.model_validate(spec_with({"data.packing": "documents"})), place(0, 1)).at(2)


SIDES = {"ngram": {"num_tables": 2, "num_rows": 9, "dim": 4, "max_order": 4}, "structure": {"num_categories": 7, "bottleneck": 4}}
SIDES |= {"platform": {"num_categories": 5, "bottleneck": 4}}
AHEAD = {"mtp": {"depth": 2, "ffn_hidden_size": 8, "side_embeddings": True}}


@pytest.mark.parametrize("packing", ["none", "documents"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "vocab_parallel": True}, {"cp": 2}, {"cp": 2, "tp": 2, "vocab_parallel": True}])
def test_features_read_beyond_a_rank_s_own_tokens(mesh: dict[str, Any], packing: str, spec_with: Any, worker: Any) -> None:
    """N-grams look back, predictions look ahead, never across the end of a row or document, wherever pieces are divided."""
    more = {f"mesh.{key}": value for key, value in mesh.items()} | {"model.attention.num_kv_heads": 2, "data.packing": packing}
    spec, rows = Spec.model_validate(spec_with({"model.features": SIDES | AHEAD} | more)), worker.CountingRows(61)
    length, batch = spec.batch.seq_length, (0, spec.training.seed, spec.batch.micro_batch_size, spec.batch.seq_length)
    row, classes, platforms = rows.rows(*batch), rows.structure_rows(*batch), rows.platform_rows(*batch)
    starts = rows.starts(*batch) if packing == "documents" else np.zeros_like(row)
    begins = [{*np.flatnonzero(line == np.arange(length + 1)).tolist()} for line in starts]

    def seen(index: int, position: int, places: int, nothing: int) -> int:
        """The token `places` from `position`, if no document begins between the two."""
        low, high = sorted((position, position + places))
        separate = low < 0 or high > length or any(low < first <= high for first in begins[index] if packing == "documents")
        return nothing if separate else int(row[index, position + places])

    def at(table: np.ndarray, index: int, position: int) -> int:
        return int(table[index, position]) if position <= length else 0

    for coordinate in product(range(spec.mesh.cp), range(spec.mesh.tp)):
        place_of = place(0, 1)
        place_of.coordinate["cp"], place_of.coordinate["tp"] = coordinate
        found = Batches(rows, spec, place_of).at(0)
        shared = own_positions(coordinate[0], spec.mesh.cp, length).tolist()
        share = len(shared) // spec.mesh.tp
        own = shared[coordinate[1] * share :][:share]
        read = shared if spec.mesh.vocab_parallel else own
        for index in range(len(row)):
            assert found.tokens[index].tolist() == row[index, read].tolist()
            for places, labels in enumerate((found.labels, *found.following), start=1):
                assert labels[index].tolist() == [seen(index, position, places, -100) for position in read]
            for places in (1, 2, 3):
                assert found.before[index, places - 1].tolist() == [seen(index, position, -places, -1) for position in own]
            assert found.structure[index].tolist() == classes[index, own].tolist()
            assert found.platform[index].tolist() == platforms[index, own].tolist()
            for depth in (0, 1):
                read_by = [position + depth + 1 for position in own]
                for places in (1, 2, 3):
                    seen_by = [seen(index, position, -places, -1) for position in read_by]
                    assert found.following_before[depth][index, places - 1].tolist() == seen_by
                assert found.following_structure[depth][index].tolist() == [at(classes, index, position) for position in read_by]
                assert found.following_platform[depth][index].tolist() == [at(platforms, index, position) for position in read_by]
        assert (len(found.following), found.structure.dtype) == (2, torch.uint8)
        assert len(found.following_before) == len(found.following_structure) == len(found.following_platform) == 2
        given = found.part(0, 1).keyword_inputs()
        assert [len(given[name]) for name in FURTHER] == [2, 2, 2, 2]


def test_depths_without_side_embeddings_read_none(spec_with: Any, worker: Any) -> None:
    ahead = {"mtp": {"depth": 2, "ffn_hidden_size": 8}}
    found = Batches(worker.CountingRows(61), Spec.model_validate(spec_with({"model.features": SIDES | ahead})), place(0, 1)).at(0)
    assert (found.following_before, found.following_structure, found.following_platform) == ((), (), ())
    assert found.keyword_inputs().keys() == {"before", "structure", "platform", "labels", "following"}
