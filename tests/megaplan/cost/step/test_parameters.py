"""The time model's parameters and FLOPs are those that the inventory and the cost model count."""

import math

import pytest

from megaplan.cost.step.from_spec import model_shape
from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger
from megaplan.cost.step.parameters import held, model_flops
from megaplan.cost.step.scan import BACKWARD_WORK, scan
from megaplan.cost.step.workload import BatchShape, Machine, MambaShape, MeshShape, Recomputed, Software, StageShape, StepWorkload
from megaplan.devices import load_device
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec

GROUPED = {"kind": "gqa", "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
LATENT = {
    "kind": "mla",
    "num_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 192,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 112,
}
MODELS = {
    "grouped": {"pattern": "AD", "attention": GROUPED, "mlp": {"ffn_hidden_size": 4096}},
    "latent": {"pattern": "AD", "attention": LATENT, "mlp": {"ffn_hidden_size": 4096}},
    "latent, whole queries": {"pattern": "AD", "attention": {**LATENT, "q_lora_rank": None}, "mlp": {"ffn_hidden_size": 4096}},
    "experts": {
        "pattern": "AE",
        "attention": GROUPED,
        "moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 768, "shared_ffn_hidden_size": 512, "activation": "relu2"},
    },
}


def spec_of(model: dict) -> Spec:
    return Spec.model_validate(
        {
            "format": "megaplan.spec/1",
            "name": "m",
            "model": {"num_layers": 24, "hidden_size": 1024, "vocab_size": 32000, "tie_embeddings": False, **model},
            "batch": {"micro_batch_size": 1, "seq_length": 2048},
        }
    )


def work_of(spec: Spec, **degrees: int) -> StepWorkload:
    mesh = MeshShape(**{"world": 1, "dp": 1, **degrees})
    return StepWorkload(
        model_shape(spec),
        mesh,
        BatchShape(1, spec.batch.seq_length, 1),
        Software("megatron-bridge", "26.04"),
        Machine.of(load_device("h100-sxm")),
        (StageShape(1.0, {}, True, True),),
        Recomputed(),
    )


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_are_the_inventorys(model):
    """To a hundredth: norms, biases and routers are left out."""
    spec = spec_of(model)
    found = held(work_of(spec))
    assert found.dense + found.experts == pytest.approx(build_inventory(spec).parameters, rel=0.01)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_flops_are_six_a_parameter_and_attention(model):
    """To a hundredth, at two lengths: a token meets the active parameters but the embedding, and half of the positions."""
    spec, head = spec_of(model), 32000 * 1024
    inventory, attention = build_inventory(spec), model["attention"]
    widths = 128 if attention["kind"] == "gqa" else 96 + 32 + 112
    for seq in (2048, 16384):
        pairs = 6 * 12 * 16 * widths * seq / 2
        assert model_flops(model_shape(spec), seq) == pytest.approx(6 * (inventory.active_parameters - head) + pairs, rel=0.01)


def test_a_rank_holds_its_share():
    spec = spec_of(MODELS["experts"])
    whole, part = held(work_of(spec)), held(work_of(spec, world=32, tp=2, pp=4, ep=4, dp=4))
    assert part.experts == pytest.approx(whole.experts / 4 / 4)
    table = 32000 * 1024
    assert part.dense == pytest.approx((whole.dense - 2 * table) / 2 / 4 + table / 2)  # embedding or head, whichever the stage has


@pytest.mark.parametrize("again", [0.0, 1.0])
def test_a_scan_runs_backward_two_and_a_half_times_and_what_is_run_again(again):
    work, ledger = work_of(spec_of(MODELS["grouped"]), world=2, tp=2), Ledger()
    scan(ledger, work, MambaShape(64, 64, 128, 8), again)
    (forward, backward) = ledger.scans
    assert (forward[0], backward[0]) == (FORWARD, BACKWARD)
    inner, states, tokens = 64 * 64, 8 * 128, 2048 / 2
    assert forward[1] == tokens * (2 * 128 * states + 2 * 128 * inner + 4 * inner * 128)
    for one, other in zip(forward[1:], backward[1:], strict=True):
        assert math.isclose(other, (BACKWARD_WORK + again) * one)
