"""The part of a tensor that one rank owns."""

from itertools import product
from math import prod
from pathlib import Path

import pytest

from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Owner
from megaplan.spec.load import load_spec

PLANS = Path(__file__).parents[3] / "plans"


@pytest.mark.requirement("R-41")
@pytest.mark.parametrize("plan", ["nam56r-8xh200", "mixtral-8x7b"])
@pytest.mark.parametrize(("tp", "ep", "etp"), list(product([1, 2, 4], repeat=3)))
def test_the_ranks_that_share_a_tensor_own_all_of_it(plan: str, tp: int, ep: int, etp: int) -> None:
    """Every tensor of every family: as many shards as its owner rule has ranks, and one dim alone is cut by each."""
    for name, block in build_inventory(load_spec(str(PLANS / f"{plan}.yaml"), []).spec).blocks():
        for tensor in block.tensors:
            tensor_ranks = tp if tensor.owner is Owner.TENSOR_PARALLEL and tensor.tp_dim is not None else 1
            if tensor.owner is Owner.EXPERT_PARALLEL:
                tensor_ranks = ep * (etp if tensor.tp_dim is not None else 1)
            local = tensor.local_shape(tp, ep, etp)
            assert prod(local) * tensor_ranks == prod(tensor.shape), (name, tensor.name)
            assert len(local) == len(tensor.shape)
            for dim, (part, whole) in enumerate(zip(local, tensor.shape, strict=True)):
                assert part == whole or dim in {0 if tensor.owner is Owner.EXPERT_PARALLEL else tensor.tp_dim, tensor.tp_dim}
