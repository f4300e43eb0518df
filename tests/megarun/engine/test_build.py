"""The modules of every stage are the inventory's tensors, by name, shape and dtype."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, differences, materialise

pytestmark = pytest.mark.runtime
PLANS = Path(__file__).parents[3] / "plans"
BUILDABLE = ("llama-3.1-8b", "mixtral-8x7b", "mamba-codestral-7b", "tiny-hybrid", "tiny-hybrid-pp2")


def check(spec: Spec, num_slots: int) -> None:
    """Cut into `num_slots` equal stages and compare each with the inventory, and their sum with the total."""
    inventory = build_inventory(spec)
    cuts = [round(i * spec.model.num_layers / num_slots) for i in range(num_slots + 1)]
    layout = build_layout(spec, inventory, list(pairwise(cuts)))
    elements = 0
    for slot in layout.slots:
        stage = build_stage(spec, inventory, slot)
        assert all(parameter.is_meta for parameter in stage.parameters())
        assert differences(stage, inventory, slot, spec) == []
        elements += sum(parameter.numel() for parameter in stage.parameters())
        elements -= sum(inventory.block(name).elements for name in slot.copies)
    assert elements == inventory.parameters


@pytest.mark.parametrize("name", BUILDABLE)
def test_committed_specs(name: str) -> None:
    """Public models and the demo, on the mesh they are planned for and on one stage."""
    document = yaml.safe_load((PLANS / f"{name}.yaml").read_text())
    for pp in {1, document.get("mesh", {}).get("pp", 1)}:
        document["mesh"] = {"pp": pp}
        document["schedule"] = {"kind": "1f1b", "num_microbatches": 8}
        check(Spec.model_validate(document), pp)


def random_overrides(rng: random.Random) -> dict[str, Any]:
    """One choice of every dimension that shapes a module."""
    head_dim, num_layers, hidden = rng.choice([4, 8]), rng.randint(2, 9), 8 * rng.randint(2, 6)
    kv_heads = rng.choice([1, 2, 4])
    nope = rng.sample(range(num_layers), rng.randint(0, 1))
    gqa = {"kind": "gqa", "num_heads": kv_heads * rng.choice([1, 3]), "num_kv_heads": kv_heads, "head_dim": head_dim}
    gqa |= {"qk_norm": rng.random() < 0.5, "bias": rng.random() < 0.5, "nope_layers": nope, "window_size": rng.choice([None, 5])}
    mla = {"kind": "mla", "num_heads": rng.randint(1, 4), "q_lora_rank": rng.choice([None, 6]), "kv_lora_rank": rng.randint(2, 9)}
    mla |= {"qk_nope_head_dim": head_dim, "qk_rope_head_dim": rng.choice([2, 4]), "v_head_dim": rng.randint(2, 7), "nope_layers": nope}
    groups = rng.choice([1, 2])
    mamba = {"kind": "mamba2", "head_dim": 8, "state_dim": rng.randint(2, 6), "num_groups": groups, "conv_kernel": rng.randint(2, 4)}
    mamba |= {"num_heads": groups * rng.randint(1, 3), "conv_bias": rng.random() < 0.5, "chunk_size": rng.choice([4, 8])}
    experts = rng.randint(1, 6)
    moe = {"num_experts": experts, "top_k": rng.randint(1, experts), "ffn_hidden_size": rng.randint(3, 20)}
    moe |= {"shared_ffn_hidden_size": rng.choice([0, 12]), "activation": rng.choice(["swiglu", "relu2", "gelu"])}
    recurrent = {"kind": "m2rnn", "num_heads": rng.randint(1, 5), "key_dim": rng.randint(1, 6), "value_dim": rng.randint(1, 6)}
    recurrent |= {"conv_kernel": rng.randint(2, 4), "save_every": rng.choice([3, 8])}
    return {
        "model.pattern": "".join(rng.choice("AMERD") for _ in range(num_layers)),
        "model.num_layers": num_layers,
        "model.hidden_size": hidden,
        "model.vocab_size": rng.randint(20, 90),
        "model.tie_embeddings": rng.random() < 0.5,
        "model.attention": rng.choice([gqa, mla]),
        "model.mamba": mamba,
        "model.moe": moe,
        "model.recurrent": recurrent,
        "model.mlp": {"ffn_hidden_size": rng.randint(3, 50), "activation": rng.choice(["swiglu", "relu2", "gelu"])},
        "precision.master": rng.choice(["fp32", "bf16"]),
        "mesh.pp": rng.randint(1, min(3, num_layers)),
        "schedule.num_microbatches": 4,
    }


@pytest.mark.parametrize("seed", range(20))
def test_random_specs(seed: int, spec_with: Any) -> None:
    """Twenty random architectures, cut into up to three stages."""
    overrides = random_overrides(random.Random(seed))
    check(Spec.model_validate(spec_with(overrides)), overrides["mesh.pp"])


@pytest.mark.requirement("R-8")
def test_a_difference_is_found(spec_with: Any) -> None:
    """The comparison names a missing, a surplus and a misshapen tensor."""
    spec = Spec.model_validate(spec_with())
    inventory = build_inventory(spec)
    slot = build_layout(spec, inventory, [(0, 5)]).slots[0]
    stage = build_stage(spec, inventory, slot)
    del stage.layers["0"].k_proj
    stage.final_norm.weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    stage.register_buffer("extra", torch.empty(1, device="meta"))
    found = differences(stage, inventory, slot, spec)
    assert [line.split(":")[0] for line in found] == ["extra", "final_norm.weight", "layers.0.k_proj.weight"]


@pytest.mark.requirement("R-11")
def test_every_attending_stage_has_the_rotary_table(spec_with: Any) -> None:
    """One fp32 table per stage that attends, out of the checkpoint, equal on all of them; none elsewhere."""
    spec = Spec.model_validate(
        spec_with({"model.pattern": "ADAMD", "mesh.pp": 3, "schedule.num_microbatches": 4, "precision.master": "bf16"})
    )
    inventory = build_inventory(spec)
    stages = [build_stage(spec, inventory, slot) for slot in build_layout(spec, inventory, [(0, 2), (2, 4), (4, 5)]).slots]
    for stage in stages:
        materialise(stage, torch.device("cpu"))
    assert [sorted(dict(stage.named_buffers())) for stage in stages] == [["rope_cos", "rope_sin"], ["rope_cos", "rope_sin"], []]
    assert stages[0].rope_cos.dtype == torch.float32
    assert torch.equal(stages[0].rope_cos, stages[1].rope_cos)
    assert not any("rope" in key for key in stages[0].state_dict())
