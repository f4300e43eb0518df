"""Small random specs of what megarun builds, one block family at a time, from a seed."""

import random
from typing import Any

LETTERS = {
    "gqa": "A", "mla": "A", "indexed": "A", "mamba2": "M", "mamba3": "M", "moe": "E", "gathering_moe": "E", "m2rnn": "R", "mlp": "D",
    "gated_delta": "G", "kda": "G", "short_convolution": "C", "mamba1": "M",
}  # fmt: skip
FP32 = dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32")
BF16 = dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "bf16")


def random_spec(kind: str, seed: int, policy: str = "none") -> dict[str, Any]:
    """Plain values of a spec with two layers of one kind, the first recomputed by `policy`; sizes are odd wherever they may be."""
    draw = random.Random(f"{kind}/{seed}")
    hidden = draw.choice([24, 40, 48])
    return {
        "format": "megaplan.spec/1",
        "name": f"{kind}-{seed}",
        "model": {
            "pattern": LETTERS[kind],
            "num_layers": 2,
            "hidden_size": hidden,
            "vocab_size": draw.randint(30, 70),
            "tie_embeddings": draw.random() < 0.5,
            **_later(kind, hidden, draw),
        },
        "batch": {"micro_batch_size": draw.randint(1, 3), "seq_length": draw.randint(5, 40)},
        "precision": draw.choice([FP32, BF16]),
        "recompute": {"default": policy},
        "host": {"kernels": "triton" if kind == "gathering_moe" else "reference"},
    }


def _heads(draw: random.Random, heads: dict[str, int], window: int | None) -> dict[str, Any]:
    """Values of their own width, a gate of one value a head, and other heads in the second layer."""
    if draw.random() < 0.5:
        return {}
    found: dict[str, Any] = {"value_head_dim": heads["head_dim"] + draw.randint(-1, 3), "gate": True, "gate_width": "head"}
    if random.Random(f"gate {heads}").random() < 0.5:
        found |= {"gate_width": "channel", "gate_bias": True}
    if window is not None:
        found |= {"window_rope_theta": 300.0, "window_rotary_dim": 2}
    groups = draw.randint(1, 3)
    own: dict[str, Any] = {
        "num_heads": groups * draw.randint(1, 3),
        "num_kv_heads": groups,
        "head_dim": heads["head_dim"] + 2,
        "sinks": draw.random() < 0.5,
    }
    found["value_norm"] = draw.random() < 0.6
    return found | {"layer_heads": [{"layers": [1], **own}]}


def _latent_gate(draw: random.Random, kind: str) -> dict[str, Any]:
    """A gate of latent attention, and sinks where no indexer chooses keys."""
    found: dict[str, Any] = {"gate": True, "gate_width": draw.choice(["channel", "head"])} if draw.random() < 0.6 else {}
    return found | ({"sinks": True} if kind == "mla" and draw.random() < 0.4 else {})


def _later(kind: str, hidden: int, draw: random.Random) -> dict[str, Any]:
    """The section of a family that came after the first five, or of one of those."""
    match LETTERS[kind]:
        case "G":
            return _linear_attention(kind, draw)
        case "C":
            return {"short_convolution": {"conv_kernel": draw.randint(1, 5), "bias": draw.random() < 0.5}}
        case "M" if kind == "mamba1":
            sizes = {"expand": draw.randint(1, 3), "state_dim": draw.randint(2, 9), "save_every": draw.randint(3, 16)}
            options = {
                "bias": draw.random() < 0.5,
                "conv_bias": draw.random() < 0.5,
                "inner_norm": draw.choice(["none", "plain", "scaled"]),
            }
            return {"mamba": {"kind": "mamba1", **sizes, **options, "dt_rank": draw.choice([None, 7])}}
        case _:
            return _section(kind, hidden, draw)


def _section(kind: str, hidden: int, draw: random.Random) -> dict[str, Any]:
    activation = draw.choice(["swiglu", "relu2", "gelu"])
    nope = draw.choice([(), (1,), (0, 1)])
    window = draw.choice([None, 4])
    match kind:
        case "gqa":
            key_heads = draw.randint(1, 3)
            flags = {name: draw.random() < 0.5 for name in ("qk_norm", "bias")}
            heads = {"num_heads": key_heads * draw.randint(1, 3), "num_kv_heads": key_heads, "head_dim": 2 * draw.randint(1, 6)}
            flags["sinks"] = random.Random(f"{heads} {hidden}").random() < 0.4
            flags["score_cap"] = 2.0 if random.Random(f"cap {heads} {hidden}").random() < 0.3 else None
            more = _heads(random.Random(f"heads {heads} {hidden}"), heads, window)
            norms = random.Random(f"norms {heads} {hidden}")
            flags |= {"output_norm": norms.random() < 0.3, "qk_norm_scale": not flags["qk_norm"] or norms.random() < 0.5}
            if more.get("value_norm") and flags["qk_norm"]:
                more["layer_heads"][0] |= {"values_from_keys": True, "value_head_dim": heads["head_dim"] + 2}
            return {"attention": {"kind": "gqa", **heads, **flags, "window_size": window, "nope_layers": nope, **more}}
        case "mla" | "indexed":
            ranks = {"q_lora_rank": draw.choice([None, 7]), "kv_lora_rank": draw.randint(3, 12)}
            heads = {"num_heads": draw.randint(1, 4), "qk_nope_head_dim": draw.randint(3, 9), "qk_rope_head_dim": 2 * draw.randint(1, 4)}
            heads["v_head_dim"] = draw.randint(3, 9)
            if kind == "indexed":
                ranks["q_lora_rank"] = draw.randint(3, 9)
                width = heads["qk_rope_head_dim"] + draw.randint(0, 3)
                heads["indexer"] = {"num_heads": draw.randint(1, 4), "head_dim": width, "layers": [0, 1], "top_k": draw.randint(1, 9)}
            more = _latent_gate(random.Random(f"gate {heads} {hidden}"), kind)
            return {"attention": {"kind": "mla", **ranks, **heads, "window_size": window, "nope_layers": nope, **more}}
        case "mamba2" | "mamba3":
            return {"mamba": _mamba2(draw) if kind == "mamba2" else _mamba3(hidden, draw)}
        case "moe" | "gathering_moe":
            experts = draw.randint(2, 7)
            sizes = {"num_experts": experts, "top_k": draw.randint(1, experts), "ffn_hidden_size": 8 * draw.randint(1, 4)}
            sizes["shared_ffn_hidden_size"] = draw.choice([0, 16])
            losses = {name: draw.choice([0.0, 0.5]) for name in ("balance_loss_coefficient", "z_loss_coefficient")}
            options = _moe_options(random.Random(f"{kind} options {experts}/{hidden}/{draw.random()}"), sizes)
            if options.get("swiglu_limit"):
                activation = "swiglu"
            return {"moe": {**sizes, "activation": activation, **losses, **options}}
        case "m2rnn":
            sizes = {"num_heads": draw.randint(1, 4), "key_dim": draw.randint(2, 6), "value_dim": draw.randint(2, 6)}
            return {"recurrent": {"kind": "m2rnn", **sizes, "save_every": draw.randint(3, 16), "conv_kernel": draw.randint(2, 4)}}
        case _:
            width = draw.randint(8, 60)
            ends = random.Random(f"ends {hidden} {width}")
            norm = {"norm": ends.choice(["rmsnorm", "rmsnorm_no_scale"]), "embedding_norm": ends.random() < 0.5}
            section = {"ffn_hidden_size": width, "activation": draw.choice([activation, "geglu", "xielu"])}
            return {"mlp": section | {"inner_norm": ends.random() < 0.4}, **norm}


def _moe_options(draw: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    """Options of the router and of the experts' rows; the dense blocks' kinds have none of them."""
    options: dict[str, Any] = {name: draw.random() < 0.5 for name in ("router_bias", "score_correction")}
    options["score"] = draw.choice(["softmax", "sigmoid"])
    if not options["score_correction"]:
        options["expert_bias"] = draw.random() < 0.5
    if draw.random() < 0.5:
        options["latent_size"] = 8 * draw.randint(1, 3)
    if sizes["num_experts"] % 2 == 0 and sizes["num_experts"] > 2 and sizes["top_k"] <= sizes["num_experts"] // 2:
        options["num_groups"] = 2
    if draw.random() < 0.5:
        options["bias"] = True
        options |= draw.choice([{"activation": "geglu"}, {"swiglu_limit": 7.0}, {}])
    if draw.random() < 0.4:
        options["capacity_factor"] = round(draw.uniform(0.4, 1.0) * sizes["num_experts"] / sizes["top_k"], 3)
        options["capacity_drop"] = draw.choice(["score", "position"])
    if draw.random() < 0.2 and "num_groups" not in options:
        options["null_experts"] = draw.randint(1, 3)
    elif draw.random() < 0.2 and not options.keys() & {"num_groups", "expert_bias", "score_correction"}:
        options |= {"expert_choice": True, "capacity_drop": "score"}
    return options if draw.random() < 0.8 else {}


def _linear_attention(kind: str, draw: random.Random) -> dict[str, Any]:
    numbers = {"save_every": draw.randint(3, 16), "chunk_size": draw.randint(2, 9), "conv_kernel": draw.randint(2, 4)}
    if kind == "kda":
        sizes = {"num_heads": draw.randint(1, 4), "head_dim": draw.randint(2, 9)}
        sizes["full_gates"] = random.Random(f"gates {sizes}").random() < 0.5
    else:
        heads = draw.randint(1, 3)
        sizes = {"num_key_heads": heads, "num_value_heads": heads * draw.randint(1, 3)}
        sizes |= {"key_dim": draw.randint(2, 9), "value_dim": draw.randint(2, 9)}
    return {"linear_attention": {"kind": kind, **sizes, **numbers, "negative_eigenvalues": draw.random() < 0.5}}


def _mamba2(draw: random.Random) -> dict[str, Any]:
    groups = draw.randint(1, 2)
    heads = groups * draw.randint(1, 3)
    sizes = {"num_heads": heads, "head_dim": draw.randint(3, 9), "state_dim": draw.randint(3, 9), "num_groups": groups}
    found = {"kind": "mamba2", **sizes, "chunk_size": draw.randint(3, 16), "conv_bias": draw.random() < 0.5}
    return {**found, "gated_norm": random.Random(f"gated norm {found}").random() < 0.6}


def _mamba3(hidden: int, draw: random.Random) -> dict[str, Any]:
    """Heads are as many as fit into twice the hidden width; one rank in two specs of three."""
    head_dim = draw.choice([size for size in range(3, 17) if 2 * hidden % size == 0])
    heads = 2 * hidden // head_dim
    groups, state = draw.choice([count for count in range(1, 4) if heads % count == 0]), draw.randint(4, 9)
    sizes = {"expand": 2, "head_dim": head_dim, "state_dim": state, "num_groups": groups, "save_every": draw.randint(3, 16)}
    return {"kind": "mamba3", **sizes, "chunk_size": 5, "mimo_rank": draw.choice([1, 1, 3]), "num_angles": draw.randint(0, state // 2)}
