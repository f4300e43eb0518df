"""One data rank has no FSDP2: copies only of tensors stored in another dtype, and gradients without buffers of a reduction."""

from collections.abc import Callable
from typing import Any

import pytest

from megaplan.budget.values import Budget
from megaplan.columns import Column, Phase
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec

EQUAL = dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "bf16")
MIXED = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}


def cells(budget: Budget, phase: Phase = Phase.FORWARD_BACKWARD) -> dict[Column, int]:
    (rank,) = budget.ranks
    return rank.cells[phase]


@pytest.mark.parametrize("reshard", [False, True])
def test_parameters_in_the_used_dtype_are_not_copied(reshard: bool, hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    found = cells(budget_of(hybrid({"mesh": {}, "precision": EQUAL, "sharding.reshard_after_forward": reshard})))
    assert found[Column.COMMUNICATION] == 0


def test_others_have_one_copy_each(hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]) -> None:
    """At a microbatch's peak in the head's backward, where all layers are still there."""
    few: dict[str, Any] = {"model.vocab_size": 4096, "model.features": {}, "batch.micro_batch_size": 4, "batch.seq_length": 512}
    spec = hybrid({"mesh": {}, "precision": MIXED, **few})
    budget, elements = budget_of(spec), build_inventory(spec).parameters
    (rank,) = budget.ranks
    assert rank.peak_places[Phase.FORWARD_BACKWARD].startswith("backward of head")
    assert cells(budget)[Column.COMMUNICATION] == 2 * elements
    assert cells(budget, Phase.OPTIMIZER)[Column.COMMUNICATION] == 0


def test_a_second_rank_brings_fsdp2_back(hybrid: Callable[..., Spec]) -> None:
    """The same with replicas and shards of banks, whose sums need a reduction."""
    alone = {"pp": 2, "tp": 2, "cp": 2, "ep": 4}
    assert hybrid({"mesh": alone, "model.features": {}}).has_whole_state
    for mesh in ({"dp_shard": 2}, {"dp_replicate": 2}, {**alone, "ep": 2}):
        assert not hybrid({"mesh": mesh, "model.features": {}}).has_whole_state


@pytest.mark.parametrize(
    ("mesh", "alone"),
    [
        ({"dp_shard": 4}, {}),
        ({"dp_replicate": 3, "dp_shard": 2}, {}),
        ({"pp": 2, "dp_replicate": 2}, {"pp": 2}),
        ({"dp_shard": 2, "cp": 2, "ep": 2}, {"cp": 2, "ep": 2}),
    ],
)
def test_copies_need_what_one_data_rank_needs(
    mesh: dict[str, int], alone: dict[str, int], hybrid: Callable[..., Spec], budget_of: Callable[..., Budget]
) -> None:
    """Sums are made in place; a bank that no other rank of its EP group shares is whole, however many ranks have it."""
    rest: dict[str, Any] = {"precision": MIXED, "model.features": {}, "schedule": {"kind": "1f1b", "num_microbatches": 4}}
    copied = hybrid({"mesh": mesh, "sharding": {"mode": "ddp"}, **rest})
    assert copied.has_whole_state
    assert copied.shard_degrees == (1, 1)
    found, expected = budget_of(copied), budget_of(hybrid({"mesh": alone, **rest}))
    assert [rank.cells for rank in found.ranks] == [rank.cells for rank in expected.ranks]
    assert sorted(each for rank in found.ranks for each in rank.ranks) == list(range(copied.mesh.world_size))
