"""Optimizer state in host memory changes no value: steps and resumed runs are bitwise those with all state on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cells import ADAMW, BF16, BF16_GRADIENTS, GENTLE, T2, TIED, TWO_EXPERTS, Cell
from parity_world import Worlds, assert_bitwise
from test_resume import run, state

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
ALL, PART = {"host.optimizer_offload": 1.0}, {"host.optimizer_offload": 0.4}
CELLS = [
    (Cell("one-muon"), ALL),
    (Cell("one-adamw", spec=ADAMW), ALL),
    (Cell("one-muon-narrow", spec=BF16_GRADIENTS), PART),
    (Cell("dp2-muon", {"dp_shard": 2}, spec=BF16), ALL),
    (Cell("dp2-adamw", {"dp_shard": 2}, spec=ADAMW), ALL),
    (Cell("dp2-adamw-narrow-part", {"dp_shard": 2}, spec=ADAMW | BF16_GRADIENTS), PART),
    (Cell("ddp2-adamw", {"dp_replicate": 2}, spec=ADAMW | {"sharding.mode": "ddp"}), ALL),
    (Cell("dp3-muon-uneven", {"dp_shard": 3}, spec=TWO_EXPERTS, num_microbatches=6), ALL),
    (Cell("pp2-tied", {"pp": 2}, spec=TIED), ALL),
    (Cell("ep2-tp2-muon", T2 | {"dp_shard": 2, "ep": 2}), PART),
]
"""Layouts, and the fraction of state in host memory."""
IN_CI = ("one-adamw", "dp2-muon", "dp2-adamw-narrow-part", "ep2-tp2-muon")
SAME = ("losses", "norms", "auxiliary", "held_out", "gradients", "parameters")


def moved(cell: Cell, offload: dict[str, Any]) -> Cell:
    return Cell(cell.name, cell.mesh, cell.schedule, cell.spec | offload, cell.num_microbatches)


@pytest.mark.parametrize(
    ("cell", "offload"), [pytest.param(*each, id=each[0].name, marks=() if each[0].name in IN_CI else pytest.mark.slow) for each in CELLS]
)
def test_steps_are_bitwise_equal(cell: Cell, offload: dict[str, Any], worlds: Worlds) -> None:
    kept, away = (worlds.train(each.case, cell.world_size) for each in (cell, moved(cell, offload)))
    assert_bitwise(away, kept, SAME)
    assert all(after["resident_bytes"] < before["resident_bytes"] for before, after in zip(kept, away, strict=True))


@pytest.mark.parametrize("matrix", ["muon", "adamw"])
@pytest.mark.parametrize("direction", ["onto the host", "onto the device", pytest.param("across layouts", marks=pytest.mark.slow)])
def test_a_checkpoint_resumes_bitwise(matrix: str, direction: str, worlds: Worlds, tmp_path: Path) -> None:
    """A run that moves state by a checkpoint continues as one that does not; under another layout the state is bitwise the saved one."""
    spec = GENTLE | {"optimizer.matrix": matrix}
    device, host = Cell("device", {"dp_shard": 2}, spec=spec), Cell("host", {"dp_shard": 2}, spec=spec | ALL)
    source, target = (host, device) if direction == "onto the device" else (device, host)
    if direction == "across layouts":
        source, target = host, Cell("split", {"pp": 2, "tp": 2}, spec=spec | PART)
    for name in ("saved", "loaded"):
        (tmp_path / name).mkdir()
    left = run(worlds, source, None, tmp_path / "saved", 2)
    right = run(worlds, target, tmp_path / "saved", tmp_path / "loaded", 0)
    saved, loaded = state(tmp_path / "saved"), state(tmp_path / "loaded")
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    if direction == "across layouts":
        assert right == pytest.approx(left[2:], rel=1e-4)
    else:
        assert right == left[2:]
