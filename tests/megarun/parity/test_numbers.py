"""Properties that the parity of a cell does not show: that the cells differ where they should, and what is not held to the metric."""

from typing import Any

import pytest
import torch
from parity_cells import CELLS, Cell
from parity_world import Worlds

pytestmark = [pytest.mark.runtime, pytest.mark.slow]
BY_NAME = {cell.name: cell for cell in CELLS}


def test_training_reduces_the_loss_and_shards_hold_less(worlds: Worlds) -> None:
    """A cell that learns nothing would agree with anything."""
    cell = BY_NAME["dp2"]
    records, reference = worlds.train(cell.case, cell.world_size), worlds.reference(cell.reference)
    assert reference["losses"][-1] < reference["losses"][0]
    assert records[0]["resident_bytes"] < reference["resident_bytes"]


@pytest.mark.requirement("R-19")
def test_idle_experts_get_zero_gradients(worlds: Worlds) -> None:
    """Eight tokens reach at most eight of sixteen experts."""
    gradients = worlds.reference(BY_NAME["dp2-idle-experts"].reference)["gradients"]
    (bank,) = gradients["layers.2.experts.up_proj"]
    assert int((bank.flatten(1).abs().amax(1) == 0).sum()) >= 16 - 8


@pytest.mark.requirement("R-62")
def test_gradients_have_their_dtype(worlds: Worlds) -> None:
    """`precision.grads` is what is kept, and changes the numbers."""
    wide, narrow = BY_NAME["1f1b-pp2-bf16"], BY_NAME["1f1b-pp2-bf16-gradients"]
    for record in worlds.train(narrow.case, narrow.world_size):
        assert all(part.dtype == torch.bfloat16 for parts in record["gradients"].values() for part in parts)
    assert worlds.reference(narrow.reference)["losses"] != worlds.reference(wide.reference)["losses"]


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}, {"tp": 2, "vocab_parallel": True}], ids=str)
def test_bf16_follows_one_process(mesh: dict[str, Any], worlds: Worlds) -> None:
    """One flipped bf16 bit is 4e-3 of a weight, so only losses can be near."""
    cell = Cell("bf16", mesh, spec={"precision.params": "bf16"})
    found = worlds.train(cell.case, 2)[0]["losses"]
    assert found == pytest.approx(worlds.reference(cell.reference)["losses"], rel=1e-2)


def test_muon_of_shards_is_muon_of_whole_matrices(worlds: Worlds) -> None:
    """Odd shapes and a stack, bitwise equal."""
    for record in worlds.train({"run": "muon"}, 2):
        assert all(torch.equal(a, b) for a, b in zip(record["whole"], record["sharded"], strict=True))


@pytest.mark.requirement("R-60")
def test_muon_of_tp_parts_is_muon_of_whole_matrices(worlds: Worlds) -> None:
    """Cut rows, cut columns, whole groups of heads, each sharded by FSDP2 as well."""
    for record in worlds.train({"run": "tensor muon"}, 4):
        for expected, found in zip(record["whole"], record["parts"], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
