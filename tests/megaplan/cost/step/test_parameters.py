"""The time model's parameters and scans equal the counts of the inventory and the operation's facts."""

import pytest

from megakernels.ops.ssd.facts import Ssd
from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger
from megaplan.cost.step.parameters import held
from megaplan.cost.step.scan import scan
from megaplan.cost.step.workload import BatchShape, Machine, MeshShape, Software, StageShape, TimedStep
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


def work_of(spec: Spec, **degrees: int) -> TimedStep:
    mesh, machine = MeshShape(**{"world": 1, "dp": 1, **degrees}), Machine.of(load_device("h100-sxm"))
    batch, software = BatchShape(1, spec.batch.seq_length, 1), Software("megatron-bridge", "26.04")
    return TimedStep(spec, build_inventory(spec), mesh, batch, software, machine, (StageShape(1.0, {}, True, True),))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_are_the_inventorys(model):
    """All except the final norm."""
    spec = spec_of(model)
    found = held(work_of(spec))
    assert found.dense + found.experts == build_inventory(spec).parameters - 1024


def test_a_rank_holds_its_share():
    spec = spec_of(MODELS["experts"])
    whole, part = held(work_of(spec)), held(work_of(spec, world=32, tp=2, pp=4, ep=4, dp=4))
    assert part.experts == pytest.approx(whole.experts / 4 / 4)
    table, norms, router = 32000 * 1024, 24 * 1024, 12 * 8 * 1024  # embedding or head, whichever the stage has
    cut = whole.dense - 2 * table - norms - router
    assert part.dense == pytest.approx((cut / 2 + norms + router) / 4 + table / 2)


@pytest.mark.parametrize("again", [0.0, 1.0])
def test_a_scan_is_counted_in_chunks_of_the_frameworks_kernels(again):
    """Backward has each product of forward twice, and C Bᵀ once more."""
    ledger, sizes = Ledger(), Ssd(1, 2048, 32, 4, 64, 128, 256, 2)
    scan(ledger, sizes, 2048, again)
    (forward, backward) = ledger.scans
    assert (forward.run, backward.run) == (FORWARD, BACKWARD)
    inner, states, tokens = 32 * 64, 4 * 128, 2048
    assert forward.flops == tokens * (2 * 128 * states + 2 * 128 * inner + 4 * inner * 128)
    assert backward.flops == (2 + again) * forward.flops + tokens * 2 * 128 * states
