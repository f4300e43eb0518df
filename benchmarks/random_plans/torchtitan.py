"""Specs of host torchtitan: dense models of whole blocks, the meshes, dtypes and policies that it has."""

from typing import Any

from random_plans.choices import Draw

TORCHTITAN_SHARE = 0.06


def torchtitan_document(draw: Draw, name: str) -> dict[str, Any]:
    """Plain values of one spec, legal by construction in most cases."""
    tp, pp, cp = (draw.weighted({1: 4, 2: 2, 4: 1}) for _ in range(3))
    vpp = draw.choice([1, 2]) if pp > 1 else 1
    shard = draw.weighted({1: 1, 2: 3, 4: 2, 3: 1})
    blocks = pp * vpp * draw.choice([1, 2, 3])
    kv_heads, per_group, head_dim = tp * draw.choice([1, 2]), draw.choice([1, 2, 4]), 8 * draw.choice([2, 4, 8])
    model: dict[str, Any] = {
        "pattern": "AD",
        "num_layers": 2 * blocks,
        "hidden_size": tp * 16 * draw.wide(2, 40),
        "vocab_size": tp * draw.wide(32, 20000),
        "attention": {"kind": "gqa", "num_heads": kv_heads * per_group, "num_kv_heads": kv_heads, "head_dim": head_dim},
        "mlp": {"ffn_hidden_size": tp * 16 * draw.wide(2, 100), "activation": "swiglu"},
    }
    if pp == 1:
        draw.maybe(model, 0.2, tie_embeddings=True)
    kinds = ["interleaved_1f1b", "interleaved_zero_bubble"] if vpp > 1 else ["1f1b", "gpipe"] if pp > 1 else ["1f1b"]
    sections: dict[str, Any] = {
        "format": "megaplan.spec/1",
        "name": name,
        "model": model,
        "mesh": {"pp": pp, "vpp": vpp, "tp": tp, "cp": cp, "dp_shard": shard, "vocab_parallel": tp > 1},
        "batch": {"micro_batch_size": draw.choice([1, 2]), "seq_length": 2 * cp * tp * draw.wide(8, 256)},
        "schedule": {"kind": draw.choice(kinds), "num_microbatches": pp * draw.choice([1, 2, 3])},
        "precision": {"params": draw.choice(["bf16", "fp32"]), **dict.fromkeys(("grads", "master", "moments", "reduce"), "fp32")},
        "optimizer": {"matrix": "adamw"},
        "host": host_section(draw),
    }
    if shard * cp > 1:
        draw.maybe(sections["mesh"], 0.2, dp_replicate=2)
    draw.maybe(
        sections, 0.5, recompute={"default": draw.choice(["selective", "full"])}, sharding={"reshard_after_forward": draw.chance(0.5)}
    )
    if "recompute" in sections:
        draw.maybe(sections["host"], 0.4, checkpoint_every=draw.choice([2, 3]))
        draw.maybe(sections["host"], 0.4, checkpoints="halves")
    return sections


def add_state_dtypes(draw: Draw, sections: dict[str, Any]) -> None:
    """Dtypes of parameters with their state, and of the reduction; and the part of experts that is not compiled."""
    precision = sections["precision"]
    if draw.chance(0.4):
        precision |= dict.fromkeys(("grads", "master", "moments"), "bf16")
    draw.maybe(precision, 0.4, reduce="bf16")
    draw.maybe(sections["host"], 0.3, eager_combine=True)


def host_section(draw: Draw) -> dict[str, Any]:
    """The host and how it was launched."""
    section: dict[str, Any] = {"name": "torchtitan"}
    for key in ("compile_model", "compile_loss", "repeat_kv", "async_tensor_parallel", "keep_pipeline_outputs", "foreach_optimizer"):
        draw.maybe(section, 0.3, **{key: True})
    draw.maybe(section, 0.3, fsdp_ends="root")
    draw.maybe(section, 0.3, reserved_percent=draw.choice([0, 5, 12]))
    return section
