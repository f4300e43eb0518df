"""A checkpoint saved under one plan resumes under another: bitwise equal state, and the same losses."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_cells import MTP_TOO, SIDES
from parity_cells import C2, E2, FEW_WORDS, GENTLE, RESHARD, SELECTIVE, T2, TIED, TWO_EXPERTS, V2, V4, Cell, pattern
from parity_world import CellFailedError, Worlds
from tower_cells import DENSE, S2, TWO, images

from megarun.checkpoint.full_tensors import full_tensors, tensor_names
from megarun.checkpoint.manifest import list_checkpoints, read_manifest
from megarun.checkpoint.state import GENERATOR, OPTIMIZER
from megarun.checkpoint.storage import CheckpointReader

pytestmark = [pytest.mark.runtime, pytest.mark.jobs, pytest.mark.requirement("R-68")]
BEFORE, AFTER = 2, 10
HEADS = {"model.attention.num_kv_heads": 4}
MODEL = GENTLE | TIED | HEADS | {"model.features.mtp": {"depth": 1, "ffn_hidden_size": 40}}
SIDED = MODEL | SIDES | MTP_TOO | FEW_WORDS  # side embeddings, two further tokens, packed rows
FEW = MODEL | TWO_EXPERTS
BIASED = MODEL | {"model.moe.score": "sigmoid", "model.moe.expert_bias": True, "model.moe.expert_bias_rate": 0.01}
ADAPTED = GENTLE | TIED | pattern("AED", 6) | {"lora": {"rank": 3, "alpha": 6.0, "families": ["A", "D", "shared.up_proj"]}}
IN_FOUR_BITS = {"lora": {**ADAPTED["lora"], "base": "nf4", "base_block": 4}}
VALUED = GENTLE | pattern("AED") | {"model.attention_residuals": {"group_layers": 2}}
SHARED = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "shared_keys": [{"source": 0, "layers": [3, 6]}]}
LENT = GENTLE | pattern("AED", attention=SHARED)
CONNECTED = GENTLE | pattern("AED") | {"model.streams": {"count": 3}}
SEEN = GENTLE | DENSE | images() | TWO
LOW = GENTLE | pattern("AD", 4) | {"model.hidden_size": 64, "model.mlp.ffn_hidden_size": 272}
AGAIN = {"recompute": {"default": "full", "blocks": {"M": "none", "E": "selective"}}}


def low(name: str, **more: object) -> dict[str, Any]:
    """A recipe of linears and head."""
    return {"precision.recipe": {"name": name, "head": True, **more}}


DELAYED = LOW | low("fp8_delayed", amax_history=3)
PLANS = {
    "one": Cell("one", {}, spec=MODEL),
    "dp2": Cell("dp2", {"dp_shard": 2}, spec=MODEL),
    "dp4-reshard": Cell("dp4-reshard", {"dp_shard": 4}, spec=MODEL | RESHARD),
    "hsdp": Cell("hsdp", {"dp_replicate": 2, "dp_shard": 2}, spec=MODEL),
    "1f1b-pp4": Cell("1f1b-pp4", {"pp": 4}, spec=MODEL),
    "gpipe-pp2-uneven": Cell("gpipe-pp2-uneven", {"pp": 2}, "gpipe", MODEL, spans=[[0, 3], [3, 8]]),
    "interleaved-pp2": Cell("interleaved-pp2", V2, "interleaved_1f1b", MODEL),
    "zero-bubble-pp4": Cell("zero-bubble-pp4", V4, "interleaved_zero_bubble", MODEL),
    "zbv-pp2": Cell("zbv-pp2", V2, "zbv", MODEL),
    "zbv-pp2-dp2": Cell("zbv-pp2-dp2", V2 | {"dp_shard": 2}, "zbv", MODEL),
    "dualpipev-pp2": Cell("dualpipev-pp2", V2, "dualpipev", MODEL | SELECTIVE),
    "dualpipe-pp2": Cell("dualpipe-pp2", {"pp": 2}, "dualpipe", MODEL | SELECTIVE),
    "dualpipe-pp2-tp2": Cell("dualpipe-pp2-tp2", T2 | {"pp": 2}, "dualpipe", MODEL),
    "tp2": Cell("tp2", {"tp": 2}, spec=MODEL),
    "tp4-vocabulary": Cell("tp4-vocabulary", {"tp": 4, "vocab_parallel": True}, spec=MODEL),
    "tp2-dp2-pp2": Cell("tp2-dp2-pp2", {"pp": 2, "tp": 2, "dp_shard": 2}, spec=MODEL),
    "ep4": Cell("ep4", {"dp_shard": 4, "ep": 4}, spec=MODEL),
    "ep2-tp2-pp2": Cell("ep2-tp2-pp2", {"pp": 2, "tp": 2, "dp_shard": 2, "ep": 2}, spec=MODEL),
    "etp2-ep2": Cell("etp2-ep2", {"dp_shard": 4, "ep": 2, "etp": 2}, spec=MODEL),
    "etp4": Cell("etp4", {"dp_shard": 4, "etp": 4}, spec=MODEL | RESHARD),
    "cp2": Cell("cp2", C2, spec=MODEL),
    "looped-bfs-pp2": Cell("looped-bfs-pp2", V2, "looped_bfs", MODEL),
    "cp2-ep2-pp2": Cell("cp2-ep2-pp2", C2 | {"pp": 2, "ep": 2}, spec=MODEL | AGAIN),
    "ep2-kernels": Cell("ep2-kernels", E2, spec=MODEL | {"host.kernels": "triton"}),
    "ddp-ep2": Cell("ddp-ep2", E2, spec=MODEL | {"sharding.mode": "ddp"}),
    "ddp-pp2-dp2": Cell("ddp-pp2-dp2", {"pp": 2, "dp_replicate": 2}, spec=MODEL | {"sharding.mode": "ddp"}),
    "few-dp2": Cell("few-dp2", {"dp_shard": 2}, spec=FEW, num_microbatches=12),
    "few-dp3": Cell("few-dp3", {"dp_shard": 3}, spec=FEW, num_microbatches=12),
    "few-pp2-dp4": Cell("few-pp2-dp4", {"pp": 2, "dp_shard": 4}, spec=FEW, num_microbatches=12),
    "few-dp3-ep2-tp2": Cell("few-dp3-ep2-tp2", T2 | {"dp_shard": 3, "ep": 2}, spec=FEW, num_microbatches=12),
    "biased-one": Cell("biased-one", {}, spec=BIASED),
    "biased-ep2-pp2": Cell("biased-ep2-pp2", {"pp": 2, "dp_shard": 2, "ep": 2}, spec=BIASED),
    "lora-one": Cell("lora-one", {}, spec=ADAPTED),
    "lora-tp2": Cell("lora-tp2", T2, spec=ADAPTED),
    "lora-pp2-ep2-dp2": Cell("lora-pp2-ep2-dp2", E2 | {"pp": 2}, spec=ADAPTED),
    "base": Cell("base", {}, spec={key: value for key, value in ADAPTED.items() if key != "lora"}),
    "nf4-one": Cell("nf4-one", {}, spec=ADAPTED | IN_FOUR_BITS),
    "nf4-tp2-dp2": Cell("nf4-tp2-dp2", T2 | {"dp_shard": 2}, spec=ADAPTED | IN_FOUR_BITS),
    "nf4-pp2-ep2-dp2": Cell("nf4-pp2-ep2-dp2", E2 | {"pp": 2}, spec=ADAPTED | IN_FOUR_BITS),
    "low-packed-dp3": Cell("low-packed-dp3", {"dp_shard": 3}, spec=LOW | low("fp8_blockwise", param_gather=True), num_microbatches=12),
    "low-whole-dp3": Cell("low-whole-dp3", {"dp_shard": 3}, spec=LOW | low("fp8_blockwise"), num_microbatches=12),
    "low-attention-dp2": Cell("low-attention-dp2", {"dp_shard": 2}, spec=LOW | low("fp8_current", attention=True), num_microbatches=12),
    "low-delayed-dp2": Cell("low-delayed-dp2", {"dp_shard": 2}, spec=DELAYED, num_microbatches=12),
    "low-delayed-pp2-dp2": Cell("low-delayed-pp2-dp2", {"pp": 2, "dp_shard": 2}, spec=DELAYED, num_microbatches=12),
    "low-delayed-packed-dp2": Cell(
        "low-delayed-packed-dp2", {"dp_shard": 2}, spec=DELAYED | low("fp8_delayed", param_gather=True, amax_history=3), num_microbatches=12
    ),
    "sided-one": Cell("sided-one", {}, spec=SIDED),
    "sided-zbv-pp2-dp2": Cell("sided-zbv-pp2-dp2", V2 | {"dp_shard": 2}, "zbv", SIDED),
    "sided-cp2-pp2": Cell("sided-cp2-pp2", C2 | {"pp": 2}, spec=SIDED),
    "sided-tp2-ep2-dp2": Cell("sided-tp2-ep2-dp2", T2 | E2, spec=SIDED),
    "streams-pp4": Cell("streams-pp4", {"pp": 4}, spec=CONNECTED),
    "streams-zbv-pp2-tp2": Cell("streams-zbv-pp2-tp2", V2 | T2, "zbv", CONNECTED),
    "streams-cp2-dp2": Cell("streams-cp2-dp2", C2 | {"dp_shard": 2}, spec=CONNECTED | RESHARD),
    "keys-pp4": Cell("keys-pp4", {"pp": 4}, spec=LENT),
    "keys-zbv-pp2-tp2": Cell("keys-zbv-pp2-tp2", V2 | T2, "zbv", LENT),
    "keys-dp2": Cell("keys-dp2", {"dp_shard": 2}, spec=LENT | RESHARD),
    "depth-pp4": Cell("depth-pp4", {"pp": 4}, spec=VALUED),
    "depth-zbv-pp2-tp2": Cell("depth-zbv-pp2-tp2", V2 | T2, "zbv", VALUED),
    "towers-one": Cell("towers-one", {}, spec=SEEN),
    "towers-tp2": Cell("towers-tp2", T2, spec=SEEN),
    "towers-split-tp2-dp2": Cell("towers-split-tp2-dp2", S2 | {"dp_shard": 2}, spec=SEEN),
    "towers-cp2-pp2": Cell("towers-cp2-pp2", C2 | {"pp": 2}, spec=SEEN),
}
CI = [("tp2", "zbv-pp2"), ("low-delayed-dp2", "low-delayed-dp2")]
PAIRS = [
    ("biased-one", "biased-ep2-pp2"), ("biased-ep2-pp2", "biased-one"),
    ("one", "one"), ("tp2", "zbv-pp2-dp2"), ("dualpipe-pp2", "zbv-pp2-dp2"), ("hsdp", "dualpipe-pp2"), ("dualpipe-pp2-tp2", "dualpipe-pp2"),
    ("zbv-pp2-dp2", "one"),
    ("one", "dp2"), ("dp2", "one"), ("dp2", "dp2"), ("dp2", "tp2"), ("tp2", "dp4-reshard"), ("dp4-reshard", "1f1b-pp4"),
    ("1f1b-pp4", "1f1b-pp4"), ("1f1b-pp4", "gpipe-pp2-uneven"), ("gpipe-pp2-uneven", "interleaved-pp2"),
    ("interleaved-pp2", "zero-bubble-pp4"), ("zero-bubble-pp4", "zbv-pp2-dp2"), ("zbv-pp2-dp2", "dualpipev-pp2"),
    ("dualpipev-pp2", "hsdp"), ("hsdp", "ep4"), ("ep4", "tp4-vocabulary"), ("tp4-vocabulary", "ep2-tp2-pp2"),
    ("ep2-tp2-pp2", "ep4"), ("ep4", "one"), ("ep2-tp2-pp2", "ep2-tp2-pp2"), ("tp4-vocabulary", "tp2-dp2-pp2"),
    ("ep4", "etp2-ep2"), ("etp2-ep2", "etp4"), ("etp4", "ep2-tp2-pp2"),
    ("tp2-dp2-pp2", "hsdp"), ("tp2-dp2-pp2", "zbv-pp2-dp2"), ("zero-bubble-pp4", "tp4-vocabulary"),
    ("zbv-pp2-dp2", "cp2"), ("cp2", "cp2"), ("cp2", "tp2-dp2-pp2"), ("cp2", "cp2-ep2-pp2"), ("cp2-ep2-pp2", "looped-bfs-pp2"),
    ("looped-bfs-pp2", "hsdp"), ("tp2", "ep2-kernels"), ("ep2-kernels", "ep4"), ("sided-one", "sided-zbv-pp2-dp2"),
    ("sided-zbv-pp2-dp2", "sided-cp2-pp2"), ("sided-cp2-pp2", "sided-tp2-ep2-dp2"), ("sided-tp2-ep2-dp2", "sided-one"),
    ("low-packed-dp3", "low-packed-dp3"), ("low-packed-dp3", "low-whole-dp3"), ("low-attention-dp2", "low-attention-dp2"),
    ("low-delayed-dp2", "low-delayed-pp2-dp2"), ("low-delayed-dp2", "low-delayed-packed-dp2"),
    ("low-delayed-packed-dp2", "low-delayed-packed-dp2"), ("low-delayed-packed-dp2", "low-delayed-dp2"),
    ("lora-one", "lora-one"), ("lora-one", "lora-tp2"), ("lora-tp2", "lora-pp2-ep2-dp2"), ("lora-pp2-ep2-dp2", "lora-tp2"),
    ("nf4-one", "nf4-tp2-dp2"), ("nf4-tp2-dp2", "nf4-pp2-ep2-dp2"), ("nf4-pp2-ep2-dp2", "nf4-tp2-dp2"),
    ("dp2", "ddp-ep2"), ("ddp-ep2", "dp4-reshard"), ("ddp-ep2", "ddp-pp2-dp2"), ("ddp-pp2-dp2", "one"),
    ("towers-one", "towers-tp2"), ("towers-tp2", "towers-split-tp2-dp2"), ("towers-split-tp2-dp2", "towers-cp2-pp2"),
    ("towers-cp2-pp2", "towers-split-tp2-dp2"), ("towers-split-tp2-dp2", "towers-one"),
    ("streams-pp4", "streams-zbv-pp2-tp2"), ("streams-zbv-pp2-tp2", "streams-cp2-dp2"), ("streams-cp2-dp2", "streams-pp4"),
    ("keys-pp4", "keys-zbv-pp2-tp2"), ("keys-zbv-pp2-tp2", "keys-dp2"), ("keys-dp2", "keys-pp4"),
    ("depth-pp4", "depth-zbv-pp2-tp2"), ("depth-zbv-pp2-tp2", "depth-pp4"),
    ("few-dp2", "few-dp3"),
    ("few-dp3", "few-dp3"), ("few-dp3", "few-pp2-dp4"), ("few-pp2-dp4", "few-dp3-ep2-tp2"), ("few-dp3-ep2-tp2", "few-dp2"),
]  # fmt: skip


def run(worlds: Worlds, plan: Cell, source: Path | None, target: Path, before: int) -> list[float]:
    """Losses of `before` steps, a save, and AFTER steps more."""
    case: dict[str, Any] = {
        **plan.case,
        "run": "resume",
        "from": source and str(source),
        "to": str(target),
        "before": before,
        "after": AFTER,
    }
    losses = [record["losses"] for record in worlds.train(case, plan.world_size)]
    assert all(of_rank == losses[0] for of_rank in losses)
    return list(losses[0])


def state(run_folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a run's newest checkpoint, whole; generators left out."""
    path = list_checkpoints(run_folder)[0]
    return dict(full_tensors(path, [name for name in tensor_names(path) if not name.startswith(GENERATOR)]))


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of each plan after BEFORE steps and its later losses; trained once."""
    found: dict[str, tuple[Path, list[float], dict[str, torch.Tensor]]] = {}

    def of(name: str) -> tuple[Path, list[float], dict[str, torch.Tensor]]:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            losses = run(worlds, PLANS[name], None, folder, BEFORE)
            found[name] = folder, losses, state(folder)
        return found[name]

    return of


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(*pair, id="→".join(pair)) for pair in CI]
    + [pytest.param(*pair, id="→".join(pair), marks=pytest.mark.slow) for pair in PAIRS],
)
def test_a_checkpoint_resumes_under_another_plan(source: str, target: str, saved: Any, worlds: Worlds, tmp_path: Path) -> None:
    folder, losses, expected = saved(source)
    again = run(worlds, PLANS[target], folder, tmp_path, 0)
    found = state(tmp_path)
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    assert not different
    assert read_manifest(list_checkpoints(tmp_path)[0]).step == BEFORE
    if source == target:
        assert again == losses[BEFORE:]
    assert again == pytest.approx(losses[BEFORE:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.requirement("R-70")
def test_a_tensor_on_two_stages_is_saved_once(saved: Any) -> None:
    """A tied embedding under a V schedule is twice on rank 0, and on each of its data ranks."""
    folder, _, tensors = saved("zbv-pp2-dp2")
    newest = list_checkpoints(folder)[0]
    index = CheckpointReader(newest, read_manifest(newest)).read_metadata().state_dict_metadata
    written = {name: sum(prod(chunk.sizes) for chunk in index[name].chunks) for name in tensors}
    assert written == {name: tensor.numel() for name, tensor in tensors.items()}
    assert len(index["embedding.weight"].chunks) == 2


REFUSALS = {
    "another model": (MODEL | {"model.mlp.ffn_hidden_size": 48}, "MP641 model.mlp.ffn_hidden_size = 48, the checkpoint's = 40"),
    "other experts": (MODEL | {"model.moe.num_experts": 4}, "MP647 model.moe.num_experts = 4, the checkpoint's = 8"),
    "another optimizer": (MODEL | {"optimizer.matrix": "adamw"}, "MP642 .*optimizer.layers.0.k_proj.weight.exp_avg"),
    "other batches": (
        MODEL | {"batch.micro_batch_size": 1},
        "MP648 the plan's global batch is 4 sequences of 16 tokens, the checkpoint's 8",
    ),
    "another seed": (MODEL | {"training.seed": 3}, "MP648 training.seed = 3, the checkpoint's = 0"),
}


@pytest.mark.requirement("R-69")
@pytest.mark.parametrize("what", REFUSALS)
def test_what_does_not_fit_is_refused(what: str, saved: Any, worlds: Worlds, tmp_path: Path) -> None:
    folder, _, _ = saved("one")
    overrides, message = REFUSALS[what]
    with pytest.raises(CellFailedError, match=message):
        run(worlds, Cell(what, {}, spec=overrides), folder, tmp_path, 0)


@pytest.mark.slow
def test_weights_alone_start_at_step_0(saved: Any, worlds: Worlds, tmp_path: Path) -> None:
    """Another optimizer, other batches: bitwise equal parameters, no step done."""
    folder, _, expected = saved("one")
    plan = Cell("weights", {"dp_shard": 2}, spec=MODEL | {"optimizer.matrix": "adamw", "training.seed": 3})
    case = {**plan.case, "run": "resume", "from": str(folder), "to": str(tmp_path), "before": 0, "after": 0, "weights_only": True}
    worlds.train(case, plan.world_size)
    found = state(tmp_path)
    assert read_manifest(list_checkpoints(tmp_path)[0]).step == 0
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if not name.startswith(OPTIMIZER))
    assert all(not tensor.any() for name, tensor in found.items() if name.startswith(OPTIMIZER))


@pytest.mark.slow
def test_packed_weights_of_a_base_are_the_same_under_every_layout(saved: Any, worlds: Worlds, tmp_path: Path) -> None:
    """A base's weights that two tensor ranks and two data ranks load, each its own rows and columns, are those that one rank packs."""
    folder, _, base = saved("base")
    found = []
    for name in ("nf4-one", "nf4-tp2-dp2"):
        plan, target = PLANS[name], tmp_path / name
        case = {**plan.case, "run": "resume", "from": str(folder), "to": str(target), "before": 0, "after": 0, "weights_only": True}
        worlds.train(case, plan.world_size)
        found.append(state(target))
    one, two = found
    packed = [name for name in one if name.endswith(".codes")]
    assert packed
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(name.removesuffix(".codes") in base for name in packed)
