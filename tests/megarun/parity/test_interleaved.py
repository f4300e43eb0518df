"""Pairs that take turns at the experts' exchanges (`host.moe_overlap`) train bit by bit as pairs one after the other."""

from typing import Any

import pytest
from parity_cells import BF16, C2, E2, E4, EXPERTS, KERNELS, LIMITED, RECOMPUTED, ROUTED, T2, TIED, V2, Cell
from parity_world import Worlds, assert_bitwise

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
DDP = {"sharding.mode": "ddp"}
UNITS = {"sharding.wrap": 2}
DEPTHS = {"model.features.mtp": {"depth": 2, "ffn_hidden_size": 40, "experts": True}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "v": ("dualpipev", V2 | E2, EXPERTS),
    "v-ddp-tied": ("dualpipev", V2 | E2, EXPERTS | DDP | TIED),
    "v-recompute": ("dualpipev", V2 | E2, EXPERTS | RECOMPUTED),
    "v-losses-capacity": ("dualpipev", V2 | E2, EXPERTS | ROUTED | LIMITED),
    "v-bf16-gathering": ("dualpipev", V2 | E2, EXPERTS | BF16 | KERNELS),
    "v-tp2": ("dualpipev", V2 | E2 | T2, EXPERTS),
    "v-cp2": ("dualpipev", V2 | C2 | {"ep": 2}, EXPERTS),
    "v-ep4": ("dualpipev", V2 | E4, EXPERTS),
    "v-depths": ("dualpipev", V2 | E2, EXPERTS | DEPTHS),
    "v-units": ("dualpipev", V2 | E2, EXPERTS | UNITS),
    "line-units": ("paired_1f1b", {"pp": 2} | E2, EXPERTS | UNITS),
    "line": ("paired_1f1b", {"pp": 2} | E2, EXPERTS),
    "line-tied-recompute": ("paired_1f1b", {"pp": 2} | E2, EXPERTS | TIED | RECOMPUTED),
    "loop-ddp-losses": ("paired_1f1b", V2 | E2, EXPERTS | DDP | ROUTED),
    "mirrored": ("dualpipe", {"pp": 2} | E2, EXPERTS),
    "mirrored-ddp-losses": ("dualpipe", {"pp": 2} | E2, EXPERTS | DDP | ROUTED),
}
IN_CI = ("v", "line", "mirrored")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in CASES])
def test_pairs_in_turns_train_as_pairs_in_sequence(name: str, worlds: Worlds) -> None:
    kind, mesh, spec = CASES[name]
    count = 4 * (4 if mesh.get("dp_shard") == 4 else 2)
    turns, sequence = (Cell(name, mesh, kind, {**spec, "host.moe_overlap": overlaps}, num_microbatches=count) for overlaps in (True, False))
    assert_bitwise(*(worlds.train(cell.case, cell.world_size) for cell in (turns, sequence)))
