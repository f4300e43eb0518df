"""Specs of host maxtext: models of its decoder blocks, the meshes, slices, dtypes and remat policies that it has."""

from typing import Any, get_args

from megaplan.hosts.maxtext.policies import TENSORS
from megaplan.spec.host_words import RematPolicy
from random_plans.choices import Draw

MAXTEXT_SHARE = 0.05
DEVICES = ("tpu-v5p", "tpu-v6e", "tpu-v7", "h100-sxm")
CYCLE = 4
"""Layers of a hybrid for one with attention."""


def maxtext_document(draw: Draw, name: str) -> dict[str, Any]:
    """Plain values of one spec, legal by construction."""
    tp, cp = (draw.weighted({1: 4, 2: 2, 4: 1}) for _ in range(2))
    kind = draw.choice(["dense", "dense", "experts", "latent", "hybrid"])
    pp = draw.weighted({1: 4, 2: 1}) if kind in ("dense", "experts") else 1
    vpp, ep = (draw.choice([1, 2]) if pp > 1 else 1), (draw.weighted({1: 2, 2: 1, 4: 1}) if kind != "dense" else 1)
    shard, copies = ep * draw.weighted({1: 1, 2: 3, 4: 2}), draw.weighted({1: 3, 2: 1})
    layers = pp * vpp * draw.choice([1, 2, 3]) * (CYCLE if kind == "hybrid" else 1)
    updates = draw.choice([1, 2, 3])
    schedule = {"num_microbatches": updates}
    if pp > 1:
        schedule = {"kind": "interleaved_1f1b" if vpp > 1 else "gpipe", "num_microbatches": 2 * pp, "steps_per_update": updates}
    dtype, state = draw.choice(["bf16", "bf16", "fp32"]), draw.choice(["fp32", "bf16"])
    world, device = pp * copies * shard * cp * tp, draw.choice(DEVICES)
    section: dict[str, Any] = {"name": device, "domain": draw.choice([world, max(1, world // 2)])}
    if device == "tpu-v5p":
        draw.maybe(section, 0.3, peak_flops={"int8": 900 * 10**12})
    return {
        "format": "megaplan.spec/1",
        "name": name,
        "model": _model(draw, kind, layers, tp, ep),
        "mesh": {
            **{"pp": pp, "vpp": vpp, "tp": tp, "cp": cp, "ep": ep, "dp_shard": shard, "dp_replicate": copies},
            **({"vocab_parallel": True} | ({"etp": tp} if kind != "dense" else {}) if tp > 1 else {}),
        },
        "sharding": {"reshard_after_forward": shard * cp > 1 and (pp == 1 or draw.chance(0.5))},
        "batch": {"micro_batch_size": draw.choice([1, 2]), "seq_length": 8 * cp * tp * draw.wide(8, 256)},
        "schedule": schedule,
        "split": {"mode": "equal"},
        "precision": {"params": dtype, "master": state, "grads": draw.choice(["fp32", "bf16"]), "moments": draw.choice(["fp32", "bf16"]),
                      "reduce": dtype},
        "optimizer": {"matrix": "adamw"},
        "device": section,
        **_policies(draw, shard // ep, cycle=CYCLE if kind == "hybrid" else 1, low=dtype == "bf16" and device in ("tpu-v5p", "tpu-v6e")),
    }  # fmt: skip


def _model(draw: Draw, kind: str, layers: int, tp: int, ep: int) -> dict[str, Any]:
    kv_heads, head_dim = tp * draw.choice([1, 2]), 8 * draw.choice([2, 4, 8])
    attention: dict[str, Any] = {
        "kind": "gqa",
        "num_heads": kv_heads * draw.choice([1, 2, 4]),
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    draw.maybe(attention, 0.4, qk_norm=True)
    ffn = tp * 16 * draw.wide(2, 100)
    model: dict[str, Any] = {
        "pattern": {"dense": "AD", "experts": "AE", "latent": "AE", "hybrid": "GE" * (CYCLE - 1) + "AE"}[kind],
        "num_layers": 2 * layers,
        "hidden_size": tp * 16 * draw.wide(2, 40),
        "vocab_size": tp * draw.wide(32, 20000),
        "attention": attention,
    }
    if kind == "dense":
        model["mlp"] = {"ffn_hidden_size": ffn, "activation": "swiglu"}
        draw.maybe(model, 0.2, tie_embeddings=True)
        return model
    experts = ep * draw.choice([2, 4, 8])
    model["moe"] = {"num_experts": experts, "top_k": draw.choice([1, 2]), "ffn_hidden_size": ffn, "activation": "swiglu"}
    if experts > 1.25 * model["moe"]["top_k"]:
        draw.maybe(model["moe"], 0.3, capacity_factor=1.25)
    draw.maybe(model["moe"], 0.3, balance_loss_coefficient=0.01)
    if kind == "latent":
        ranks = {
            "q_lora_rank": draw.choice([None, 32]),
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
        }
        model["attention"] = {"kind": "mla", "num_heads": 2 * tp, **ranks}
        draw.maybe(model["moe"], 0.6, shared_ffn_hidden_size=ffn)
        model["moe"]["normalize_top_k"] = False
    if kind == "hybrid":
        attention |= {"qk_norm": True, "gate": True, "rotary_dim": head_dim // 4}
        heads = tp * draw.choice([1, 2])
        model["linear_attention"] = {
            "kind": "gated_delta",
            "num_key_heads": heads,
            "num_value_heads": 2 * heads,
            "key_dim": 16,
            "value_dim": 32,
        }
        model["moe"] |= {"shared_ffn_hidden_size": ffn, "shared_gate": True}
        model["zero_centered_norm"] = True
    return model


def _policies(draw: Draw, shards: int, *, cycle: int, low: bool) -> dict[str, Any]:
    host: dict[str, Any] = {"name": "maxtext", "attention_backend": draw.choice(["auto", "flash", "fused"])}
    draw.maybe(host, 0.3, num_vocab_tiling=draw.choice([2, 4]))
    draw.maybe(host, 0.2, optimizer_offload=1.0)
    if cycle > 1:
        draw.maybe(host, 0.6, layers_per_block=cycle)
    if low:
        draw.maybe(host, 0.2, int8=True)
    if shards % 2 == 0:
        draw.maybe(host, 0.3, fsdp_transpose=2)
    policy = draw.choice(["none", "selective", "selective", "selective", "full"])
    if policy == "selective":
        host["remat_policy"] = "custom" if draw.chance(0.4) else draw.choice(get_args(RematPolicy))
        if host["remat_policy"] == "custom":
            host["remat_tensors"] = {name: draw.choice(["device", "offload"]) for name in TENSORS if draw.chance(0.5)}
    return {"recompute": {"default": policy}, "host": host}
