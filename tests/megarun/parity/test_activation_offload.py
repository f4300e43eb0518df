"""Layers whose kept tensors are in host memory (`host.activation_offload`) train bit by bit as those that keep them on the device."""

from typing import Any

import pytest
from parity_cells import BF16, C2, E2, EXPERTS, KERNELS, RESHARD, T2, TIED, V2, Cell
from parity_world import Worlds, assert_bitwise

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
DDP, S2 = {"sharding.mode": "ddp"}, {"dp_shard": 2}
FULL = {"recompute": {"default": "none", "blocks": {"A": "full"}}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "alone": ("1f1b", S2, EXPERTS | RESHARD),
    "alone-bf16-full": ("1f1b", S2, EXPERTS | BF16 | FULL),
    "line-tied": ("1f1b", {"pp": 2}, EXPERTS | TIED),
    "line-ep2": ("1f1b", {"pp": 2} | E2, EXPERTS),
    "line-ddp": ("gpipe", {"pp": 2} | S2, EXPERTS | DDP),
    "loop-tp2": ("interleaved_1f1b", V2 | T2, EXPERTS),
    "bfs-cp2-kernels": ("looped_bfs", V2 | C2, EXPERTS | BF16 | KERNELS),
}
IN_CI = ("alone", "line-ep2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in CASES])
def test_layers_in_host_memory_train_as_those_on_the_device(name: str, worlds: Worlds) -> None:
    kind, mesh, spec = CASES[name]
    letters = sorted(set("AE"))
    away, here = (Cell(name, mesh, kind, {**spec, "host.activation_offload": each}, num_microbatches=4) for each in (letters, []))
    assert_bitwise(*(worlds.train(cell.case, cell.world_size) for cell in (away, here)))
