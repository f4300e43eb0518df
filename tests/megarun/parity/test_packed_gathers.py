"""Weights that are gathered packed (`precision.recipe.param_gather`) train bit by bit as those that are quantised after a gather."""

from typing import Any

import pytest
from parity_cells import BF16, RECOMPUTED, RESHARD, T2, Cell, pattern
from parity_world import Worlds, assert_bitwise

from megaplan.spec.local import packed_gather
from megaplan.spec.models import Spec

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
WIDE = {"model.hidden_size": 64, "model.mlp.ffn_hidden_size": 128}
PARTS = RESHARD | {"sharding.reshard_size": 2}
TWO, FOUR, HYBRID = {"dp_shard": 2}, {"dp_shard": 4}, {"dp_shard": 2, "dp_replicate": 2}
BANKS = {"model.moe.ffn_hidden_size": 64}
UNEVEN = {"model.mlp.ffn_hidden_size": 176}  # over three ranks in shards of 59 rows, whose last is short
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "current": ("fp8_current", TWO, pattern("AMDR", 4) | BF16, {}),
    "current-uneven": ("fp8_current", {"dp_shard": 3}, pattern("AD", 2) | UNEVEN | RESHARD, {}),
    "current-parts-tp": ("fp8_current", FOUR | T2, pattern("AD", 2) | PARTS | BF16, {}),
    "rows": ("fp8_rowwise", TWO, pattern("AMDR", 4) | RESHARD | BF16, {}),
    "rows-kept": ("fp8_rowwise", FOUR, pattern("AD", 2), {}),
    "rows-uneven": ("fp8_rowwise", {"dp_shard": 3}, pattern("AD", 2) | UNEVEN | RESHARD, {}),
    "rows-parts-tp": ("fp8_rowwise", FOUR | T2, pattern("AD", 2) | PARTS | BF16, {}),
    "rows-pp": ("fp8_rowwise", TWO | {"pp": 2}, pattern("AMDR", 4) | RESHARD | BF16, {"first_last_bf16": (1, 0)}),
    "rows-recomputed": ("fp8_rowwise", HYBRID, pattern("AD", 4) | RESHARD | RECOMPUTED, {}),
    "rows-experts": ("fp8_rowwise", TWO | {"ep": 2}, pattern("AE", 2) | {"model.moe.ffn_hidden_size": 48} | RESHARD, {}),
    "mx": ("mxfp8", TWO, pattern("AMDR", 4) | RESHARD, {}),
    "mx-ends": ("mxfp8", TWO, pattern("AD", 4) | RESHARD | BF16, {"first_last_bf16": (1, 1)}),
    "mx-kept-pp": ("mxfp8", TWO | {"pp": 2}, pattern("AMDR", 4) | BF16, {}),
    "mx-pp": ("mxfp8", TWO | {"pp": 2}, pattern("AMDR", 4) | RESHARD, {}),
    "mx-recomputed": ("mxfp8", HYBRID, pattern("AD", 4) | RESHARD | RECOMPUTED, {}),
    "mx-parts": ("mxfp8", FOUR, pattern("AD", 2) | PARTS | {"model.mlp.ffn_hidden_size": 256}, {}),
    "current-experts": ("fp8_current", FOUR | {"ep": 2}, pattern("AE", 2) | BANKS | RESHARD | BF16, {}),
    "rows-banks": ("fp8_rowwise", FOUR, pattern("AE", 2) | BANKS | RESHARD | BF16, {}),
    "rows-banks-uneven": ("fp8_rowwise", {"dp_shard": 3}, pattern("AE", 2) | BANKS, {}),
    "rows-banks-pp": ("fp8_rowwise", FOUR | {"pp": 2, "ep": 2}, pattern("AEDE", 4) | BANKS | BF16, {}),
    "mx-banks": ("mxfp8", FOUR | {"ep": 2}, pattern("AE", 2) | BANKS | RESHARD | BF16, {}),
    "mx-banks-parts": ("mxfp8", FOUR, pattern("AE", 2) | BANKS | PARTS, {}),
    "nv-banks": ("nvfp4", FOUR | {"ep": 2}, pattern("AE", 2) | BANKS | RESHARD | BF16, {}),
    "nv-banks-tp": ("nvfp4", TWO | T2, pattern("AE", 2) | BANKS | RESHARD | BF16, {}),
    "nv": ("nvfp4", TWO, pattern("AMDR", 4) | RESHARD | BF16, {}),
    "nv-parts": ("nvfp4", FOUR, pattern("AD", 2) | PARTS, {}),
    "blocks": (
        "fp8_blockwise",
        FOUR,
        pattern("AMDR", 4) | RESHARD | BF16 | {"model.hidden_size": 160, "model.mlp.ffn_hidden_size": 176},
        {},
    ),
    "blocks-uneven": ("fp8_blockwise", {"dp_shard": 3}, pattern("AD", 2) | {"model.mlp.ffn_hidden_size": 272}, {}),
    "blocks-eight": ("fp8_blockwise", {"dp_shard": 8}, pattern("AD", 2) | {"model.mlp.ffn_hidden_size": 272} | RESHARD | BF16, {}),
    "blocks-parts-tp": ("fp8_blockwise", FOUR | T2, pattern("AD", 2) | PARTS | BF16 | {"model.mlp.ffn_hidden_size": 320}, {}),
    "blocks-recomputed": ("fp8_blockwise", HYBRID, pattern("AD", 4) | RESHARD | RECOMPUTED | {"model.mlp.ffn_hidden_size": 272}, {}),
    "blocks-pp": ("fp8_blockwise", TWO | {"pp": 2}, pattern("AMDR", 4) | RESHARD | BF16, {"first_last_bf16": (1, 0)}),
    "blocks-banks": ("fp8_blockwise", FOUR | {"ep": 2}, pattern("AE", 2) | BANKS | {"model.moe.ffn_hidden_size": 176} | RESHARD | BF16, {}),
    "blocks-banks-uneven": ("fp8_blockwise", {"dp_shard": 3}, pattern("AE", 2) | BANKS | {"model.moe.ffn_hidden_size": 144}, {}),
    "blocks-banks-tp": ("fp8_blockwise", TWO | T2, pattern("AE", 2) | BANKS | RESHARD | BF16, {}),
    "delayed": ("fp8_delayed", TWO, pattern("AMDR", 4) | RESHARD | BF16, {"amax_history": 2}),
    "delayed-uneven": ("fp8_delayed", {"dp_shard": 3}, pattern("AD", 2) | UNEVEN | RESHARD, {}),
    "delayed-parts-tp": ("fp8_delayed", FOUR | T2, pattern("AD", 2) | PARTS | BF16, {}),
    "delayed-recomputed": ("fp8_delayed", HYBRID, pattern("AD", 4) | RESHARD | RECOMPUTED, {}),
    "delayed-banks-pp": ("fp8_delayed", FOUR | {"pp": 2, "ep": 2}, pattern("AEDE", 4) | BANKS | BF16, {}),
    "nv-experts": ("nvfp4", TWO | {"ep": 2}, pattern("AE", 2) | {"model.moe.ffn_hidden_size": 48}, {"families": ("A", "E")}),
}
IN_CI = ("current-parts-tp", "rows-parts-tp", "mx-ends", "nv")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in CASES])
def test_packed_weights_train_as_gathered_ones(name: str, worlds: Worlds) -> None:
    scaling, mesh, spec, recipe = CASES[name]
    count = 2 * mesh["dp_shard"] * mesh.get("dp_replicate", 1)
    packed, plain = (
        Cell(
            name,
            mesh,
            spec={**WIDE, **spec, "precision.recipe": {"name": scaling, "param_gather": packed, **recipe}},
            num_microbatches=count,
        )
        for packed in (True, False)
    )
    packs, settings = packed_gather(Spec.model_validate(packed.case["spec"])), WIDE | BANKS | spec
    hidden, width, of_expert = (settings[f"model.{key}"] for key in ("hidden_size", "mlp.ffn_hidden_size", "moe.ffn_hidden_size"))
    assert packs is not None
    assert packs.shard_bytes("D", "up_proj.weight", (width // mesh.get("tp", 1), hidden)) is not None
    if "banks" in name:
        assert packs.shard_bytes("E", "experts.up_proj", (8 // mesh.get("ep", 1), of_expert, hidden)) is not None
    assert_bitwise(*(worlds.train(cell.case, cell.world_size) for cell in (packed, plain)))
