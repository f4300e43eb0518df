"""No token for an expert, none for a whole rank, all tokens for one expert: every layout still trains as one process does."""

import pytest
import torch
from parity_cells import RECOMPUTED, RESHARD, Cell
from parity_compare import first_difference
from parity_world import Worlds

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
NUM_EXPERTS = 8
ONE, LAST_RANK_ONLY, TWO_OF_EIGHT = (3, 4), (6, 8), (0, 2)
TOP_1 = {"model.moe.top_k": 1, "model.moe.normalize_top_k": False}  # normalised, one weight is 1 and the router has no gradient
EP2, EP4 = {"dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 4}
CELLS = [
    (ONE, Cell("one-expert-ep2", EP2, spec=TOP_1)),
    (ONE, Cell("one-expert-ep4", EP4, spec=TOP_1)),
    (ONE, Cell("one-expert-twice-ep4", EP4)),
    (ONE, Cell("one-expert-ep2-dp4-adamw", {"dp_shard": 4, "ep": 2}, spec=TOP_1 | {"optimizer.matrix": "adamw"})),
    (LAST_RANK_ONLY, Cell("one-rank-ep4", EP4, spec=RECOMPUTED | RESHARD, ci=True)),
    (LAST_RANK_ONLY, Cell("one-rank-ep4-dp8", {"dp_shard": 8, "ep": 4}, num_microbatches=8)),
    (TWO_OF_EIGHT, Cell("one-rank-pp2-ep2", EP2 | {"pp": 2})),
    (TWO_OF_EIGHT, Cell("one-rank-zbv-pp2-ep2", EP2 | {"pp": 2, "vpp": 2}, "zbv")),
    (TWO_OF_EIGHT, Cell("one-rank-tp2-ep4-dp2", {"tp": 2, "dp_shard": 2, "ep": 4})),
]


@pytest.mark.requirement("R-19")
@pytest.mark.requirement("R-58")
@pytest.mark.parametrize(
    ("among", "cell"), [pytest.param(among, cell, id=cell.name, marks=() if cell.ci else pytest.mark.slow) for among, cell in CELLS]
)
def test_few_experts_train_as_on_one_process(among: tuple[int, int], cell: Cell, worlds: Worlds) -> None:
    """Forward, backward and three steps; idle experts have gradients, which are zero."""
    case, alone = cell.case | {"experts": among}, cell.reference | {"experts": among}
    records, reference = worlds.train(case, cell.world_size), worlds.reference(alone)
    found = first_difference(case, records, reference, cell.bound)
    assert found is None, f"{cell.name} ({cell.axes}): {found} > {cell.bound:.0e}"
    (bank,) = reference["gradients"]["layers.2.experts.down_proj"]
    busy = bank.flatten(1).abs().amax(1) > 0
    assert torch.equal(busy, (torch.arange(NUM_EXPERTS) >= among[0]) & (torch.arange(NUM_EXPERTS) < among[1]))


def test_bf16_rows_follow_one_process(worlds: Worlds) -> None:
    """Rows travel in bf16, their weights in fp32; one flipped bit of a weight is 4e-3, so only losses can be near."""
    cell = Cell("ep2-bf16", EP2, spec={"precision.params": "bf16"})
    found = worlds.train(cell.case, 2)[0]["losses"]
    assert found == pytest.approx(worlds.reference(cell.reference)["losses"], rel=1e-2)
