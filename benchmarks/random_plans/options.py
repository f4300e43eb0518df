"""Options of blocks that imported models have: norms and their places, biases, gates. A separate draw, after all others.

Of plans for the runtime those that megarun builds alone; of others few, since a plan with one that it does not build is not traced.
"""

from collections.abc import Callable, Collection
from copy import deepcopy
from typing import Any

from megaplan.scalars import GATED
from megaplan.spec.models import SIDES, GroupedQueryAttention, LatentAttention, Mamba2, MixtureOfExperts, Mlp, Model
from megaplan.spec.not_built_yet import BUILT_OPTIONS
from random_plans.choices import Draw
from random_plans.model import Shape
from random_plans.towers import add_counted

SHARE, RUNTIME_SHARE, MEGATRON_SHARE = 0.06, 0.4, 0.3


def add_options(draw: Draw, model: dict[str, Any], shape: Shape, slots: int, seq_length: int, *, runtime: bool) -> None:
    """Write options into the sections of a drawn model.

    Args:
        draw: The stream.
        model: The section `model`.
        shape: Shape for which the options are drawn.
        slots: Stage slots; layers that share their input are drawn for one, since no cut may part them.
        seq_length: Sequence length of the batch, which learned positions cover.
        runtime: True if options that megarun does not build are left out.
    """
    if not draw.chance(RUNTIME_SHARE if runtime else SHARE):
        return
    if not runtime:
        _add(draw, model, shape, slots, seq_length)
        return
    plain, drawn = deepcopy(model), deepcopy(model)
    _add(draw, drawn, shape, slots, seq_length)
    model |= drawn
    for name, section in (("", model), *((f"{name}.", model[name]) for name in _SECTIONS if name in model)):
        before = plain[name[:-1]] if name else plain
        for key in [key for key in section if f"model.{name}{key}" in _OPTIONS - BUILT_OPTIONS and section[key] != before.get(key)]:
            del section[key]
            section.update({key: before[key]} if key in before else {})


def _add(draw: Draw, model: dict[str, Any], shape: Shape, slots: int, seq_length: int) -> None:
    if "mtp" not in model.get("features", {}):
        draw.maybe(model, 0.4, norm="layernorm")
        if not model.get("tie_embeddings"):
            draw.maybe(model, 0.3, head_bias=True, learned_positions=lambda: seq_length + draw.randint(0, 9))
        draw.maybe(model, 0.5, norm_placement=lambda: draw.choice(["post", "both"]))
    if slots == 1 and len(shape.letters) > 1 and "norm_placement" not in model:
        draw.maybe(model, 0.5, parallel_layers=lambda: draw.some(list(range(1, len(shape.letters)))) or [1])
    for name, add in _SECTIONS.items():
        if name in model:
            add(draw, model[name], shape)
    features = model.get("features", {})
    if "mtp" in features and not features.keys().isdisjoint(SIDES):
        draw.maybe(features["mtp"], 0.5, side_embeddings=True)


def _attention(draw: Draw, section: dict[str, Any], _shape: Shape) -> None:
    if section["kind"] == "mla":
        draw.maybe(section, 0.4, bias=True)
        return
    draw.maybe(section, 0.4, output_bias=True, gate=True, sinks=True)
    draw.maybe(section, 0.4, rotary_dim=lambda: 2 * draw.randint(1, section["head_dim"] // 2))
    if draw.chance(0.4):
        section |= {"qk_norm": True, "qk_norm_width": "all_heads"}


def _mamba(draw: Draw, section: dict[str, Any], _shape: Shape) -> None:
    if section["kind"] == "mamba2":
        draw.maybe(section, 0.4, bias=True, gated_norm=False)


def _experts(draw: Draw, section: dict[str, Any], shape: Shape) -> None:
    draw.maybe(section, 0.4, bias=True, router_bias=True, score_correction=True, activation="geglu")
    draw.maybe(section, 0.4, latent_size=lambda: draw.wide(4, shape.size.width))
    if section.get("shared_ffn_hidden_size"):
        draw.maybe(section, 0.4, shared_gate=True)


def _short_convolution(draw: Draw, section: dict[str, Any], _shape: Shape) -> None:
    draw.maybe(section, 0.5, bias=True)


def _mlp(draw: Draw, section: dict[str, Any], _shape: Shape) -> None:
    draw.maybe(section, 0.4, bias=True, activation="geglu")


_OPTIONS = frozenset(
    {f"model.{key}" for key in Model.options}
    | {f"model.attention.{key}" for key in (*GroupedQueryAttention.options, *LatentAttention.options)}
    | {f"model.mamba.{key}" for key in Mamba2.options}
    | {f"model.moe.{key}" for key in (*MixtureOfExperts.options, "activation")}
    | {f"model.mlp.{key}" for key in (*Mlp.options, "activation")}
)
_SECTIONS = {"attention": _attention, "mamba": _mamba, "moe": _experts, "mlp": _mlp, "short_convolution": _short_convolution}


def add_values(stream: Callable[[str], Draw], model: dict[str, Any], cuts: Collection[int], *, towers: bool, parted: bool) -> None:
    """Routing, factors, caps and blocks of prediction depths of a drawn model, each of its own stream.

    `parted` is true if cuts may part a choice of keys from its readers.
    """
    _add_routing(stream("routing"), model)
    _add_factors(stream("factors"), model, cuts)
    _add_caps(stream("caps"), model)
    _add_depths(stream("depths"), model)
    if "mtp" in model.get("features", {}):
        stream("normed depths").maybe(model["features"]["mtp"], 0.5, normed_input=True)
        _add_depth_pattern(stream("depth pattern"), model)
    _add_choices(stream("choices"), model, () if parted else cuts)
    if towers:
        add_counted(stream("towers"), model)


ROUTING_SHARE = 0.2


def _add_routing(draw: Draw, model: dict[str, Any]) -> None:
    """Scoring and selection of a drawn model's experts."""
    if "moe" not in model or not draw.chance(ROUTING_SHARE):
        return
    moe = model["moe"]
    draw.maybe(moe, 0.7, score="sigmoid")
    draw.maybe(moe, 0.4, routed_scale=lambda: draw.choice([2.5, 1.8]))
    if not moe.get("score_correction") and draw.chance(0.7):
        moe["expert_bias"] = True
        draw.maybe(moe, 0.7, expert_bias_rate=0.001)
    if moe["activation"] == "swiglu":
        draw.maybe(moe, 0.3, swiglu_limit=7.0)
    experts = moe["num_experts"]
    groups = draw.choice([count for count in range(1, experts // 2 + 1) if experts % count == 0] or [1])
    least = -(-moe["top_k"] * groups // experts)
    if groups > 1:
        moe |= {"num_groups": groups, "top_groups": draw.randint(least, groups)}


SCORES_SHARE = 0.2


def add_scores(draw: Draw, model: dict[str, Any], scales: Draw, *, megatron: bool) -> None:
    """Scaled rotary frequencies and scores of the attention of a drawn model, whatever its host; constants, of their own stream."""
    if "attention" in model:
        draw.maybe(model["attention"], SCORES_SHARE, rope_scaling=lambda: _scaling(draw))
        draw.maybe(model["attention"], SCORES_SHARE, softmax_scale=lambda: draw.choice([0.05, 0.125, 0.5]))
    _add_scales(scales, model)
    if not megatron and model.get("norm_placement", "pre") == "pre" and "parallel_layers" not in model:
        layers = range(model["num_layers"])
        scales.maybe(model, SCALES_SHARE, post_norm_layers=lambda: scales.some(layers) or [0])


def with_layer_skew(draw: Draw | None, model: dict[str, Any], letters: str) -> dict[str, Any]:
    """A drawn model, maybe with routing skews of single layers in place of one for all: a list, or those of the first ones and the rest."""
    moe, number = model.get("moe"), letters.upper().count("E")
    if draw is None or moe is None or not number or not draw.chance(LAYER_SKEW_SHARE):
        return model
    most = moe["num_experts"] / moe["top_k"]

    def one() -> float:
        return float(min(round(1 + draw.random() * min(11.0, most - 1), 2), most))

    if draw.chance(0.4):
        moe["routing_skew"] = [one() for _ in range(number)]
    else:
        moe["routing_skew"] = {"first": one() if draw.chance(0.5) else [one() for _ in range(draw.randint(1, 3))]}
        draw.maybe(moe["routing_skew"], 0.7, rest=one)
    return model


def _scaling(draw: Draw) -> dict[str, Any]:
    kind = draw.choice(["linear", "llama3", "yarn"])
    found: dict[str, Any] = {"kind": kind, "factor": draw.choice([1.5, 8.0, 40.0])}
    if kind == "linear":
        return found
    found["original_seq_length"] = draw.choice([16, 4096, 8192])
    if kind == "llama3":
        draw.maybe(found, 0.5, low_freq_factor=lambda: draw.choice([0.5, 2.0]), high_freq_factor=lambda: draw.choice([3.0, 8.0]))
    else:
        draw.maybe(found, 0.5, beta_fast=lambda: draw.choice([8.0, 64.0]), beta_slow=lambda: draw.choice([0.5, 2.0]))
        draw.maybe(found, 0.5, truncate=False, attention_factor=lambda: draw.choice([0.7, 1.2]))
    return found


LAYER_SKEW_SHARE = 0.2
"""Share of models with experts whose layers have their own skews."""
SCALES_SHARE = 0.04


def _add_scales(draw: Draw, model: dict[str, Any]) -> None:
    """Constants of norms, embeddings and rotary angles of a drawn model."""
    attention, mtp = model.get("attention", {}), "mtp" in model.get("features", {})
    if model.get("norm", "rmsnorm") == "rmsnorm" and attention.get("qk_norm_width") != "all_heads":
        draw.maybe(model, SCALES_SHARE, zero_centered_norm=True)
    if not mtp:
        draw.maybe(model, SCALES_SHARE, embedding_multiplier=lambda: draw.choice([2.0, 5.5]))
    if model.get("linear_attention", {}).get("kind") == "gated_delta":
        draw.maybe(model["linear_attention"], 2 * SCALES_SHARE, gated_norm_eps=1e-4)
    if attention.get("kind") == "mla":
        draw.maybe(attention, SCALES_SHARE, latent_norm_eps=1e-4)
    elif attention.get("window_size"):
        draw.maybe(attention, 2 * SCALES_SHARE, window_rope_theta=500.0)


def _add_caps(draw: Draw, model: dict[str, Any]) -> None:
    """Caps of scores and of logits of a drawn model."""
    if model.get("attention", {}).get("kind") == "gqa":
        draw.maybe(model["attention"], SCALES_SHARE, score_cap=lambda: draw.choice([2.0, 50.0]))
    if "mtp" not in model.get("features", {}):
        draw.maybe(model, SCALES_SHARE, logits_cap=lambda: draw.choice([3.0, 30.0]))


def _add_depths(draw: Draw, model: dict[str, Any]) -> None:
    """Block after the attention of prediction depths: an MLP of another kind, or experts."""
    mtp = model.get("features", {}).get("mtp")
    if mtp is None:
        return
    if "moe" in model and draw.chance(0.5):
        mtp["experts"] = True
        return
    draw.maybe(mtp, 0.4, activation=lambda: draw.choice(["swiglu", "gelu"]), bias=True)


def _add_depth_pattern(draw: Draw, model: dict[str, Any]) -> None:
    """Blocks of prediction depths: those of the layers, an MLP, and one bank of experts at most."""
    mtp = model["features"]["mtp"]
    if not draw.chance(0.5):
        return
    letters = sorted({*model["pattern"].upper(), "D"} - {"|"})
    drawn = "".join(draw.choice(letters) for _ in range(draw.randint(1, 4)))
    first, bank, rest = drawn.partition("E")
    mtp.pop("experts", None)
    mtp["pattern"] = first + bank + rest.replace("E", "D")


FACTORS = [0.25, 0.8, 1.5]


def _add_factors(draw: Draw, model: dict[str, Any], cuts: Collection[int]) -> None:
    """Factors of projections and logits of a drawn model, and layers that share the norm of the one before, which no cut parts."""
    if not draw.chance(2 * SCALES_SHARE):
        return

    def factor() -> float:
        return draw.choice(FACTORS)

    mtp = "mtp" in model.get("features", {})
    if not mtp and not model.get("head_bias"):
        draw.maybe(model, 0.5, logits_multiplier=factor)
    if model.get("attention", {}).get("kind") == "gqa" and not mtp:
        draw.maybe(model["attention"], 0.5, output_multiplier=factor)
    if "mamba" in model and model["mamba"]["kind"] == "mamba2":
        draw.maybe(model["mamba"], 0.5, part_multipliers=lambda: [factor() for _ in range(5)], output_multiplier=factor)
    if "mlp" in model:
        draw.maybe(model["mlp"], 0.5, output_multiplier=factor)
        if model["mlp"].get("activation", "swiglu") in GATED:
            draw.maybe(model["mlp"], 0.5, gate_multiplier=factor)
    inside = [layer for layer in range(1, model["num_layers"]) if layer not in cuts]
    if inside and not model.keys() & {"norm_placement", "post_norm_layers", "parallel_layers"}:
        draw.maybe(model, 0.5, parallel_layers=lambda: draw.some(inside) or inside[:1])


WINDOWS_SHARE = 0.2
CHOICES_SHARE = 0.5


def add_windows(draw: Draw, model: dict[str, Any]) -> None:
    """Windows of single layers; none where layers share a choice of keys, which needs equal ones."""
    attention = model.get("attention")
    if attention is None or attention.get("indexer", {}).get("shared_layers") or not draw.chance(WINDOWS_SHARE):
        return
    letters = model["pattern"].upper().replace("|", "")
    letters = (letters * model["num_layers"])[: model["num_layers"]]
    free = [layer for layer, letter in enumerate(letters) if letter == "A" and layer not in attention.get("full_layers", [])]
    windows = []
    for _ in range(2):
        if layers := draw.some(free):
            windows.append({"size": draw.wide(2, 1500), "layers": layers})
            free = [layer for layer in free if layer not in layers]
    if windows:
        attention["windows"] = windows


def _add_choices(draw: Draw, model: dict[str, Any], cuts: Collection[int]) -> None:
    """Layers that attend to what an earlier one chose: others than those with an indexer, or some of these. `cuts` part none from it."""
    attention = model.get("attention", {})
    indexer = attention.get("indexer")
    if indexer is None or not draw.chance(CHOICES_SHARE):
        return
    letters = model["pattern"].upper().replace("|", "")
    letters = (letters * model["num_layers"])[: model["num_layers"]]
    full = attention.get("full_layers", [])
    source, layers, shared = -1, [], []
    for layer in [index for index, letter in enumerate(letters) if letter == "A"]:
        together = source >= 0 and not any(source < cut <= layer for cut in cuts)
        same_window = (source in full) == (layer in full)
        if together and same_window and draw.chance(0.7):
            shared.append(layer)
        elif layer in indexer["layers"]:
            layers.append(layer)
            source = layer
    if shared:
        indexer |= {"layers": layers, "shared_layers": shared}


def add_megatron_options(draw: Draw, sections: dict[str, Any], letters: str, *, gpt: bool) -> None:
    """Write into a drawn plan what Megatron-Core alone is priced with: of the model, the host and the precision."""
    if not draw.chance(MEGATRON_SHARE):
        return
    model, host = sections["model"], sections["host"]
    draw.maybe(model, 0.4, norm="layernorm")
    attention = model.get("attention") or {"kind": ""}
    if draw.chance(0.4):
        attention |= {"bias": True, "output_bias": True} if attention["kind"] == "gqa" else {"output_bias": True}
        for part in (model.get("mlp"), model.get("moe"), model.get("features", {}).get("mtp")):
            if part is not None:
                part["bias"] = True
    if attention["kind"] == "mla":
        draw.maybe(attention, 0.4, latent_norm=False)
    elif attention["kind"] == "gqa" and draw.chance(0.5):
        model["learned_positions"] = draw.wide(8, 4096)
        attention["nope_layers"] = [index for index, letter in enumerate(letters) if letter == "A"]
    if "attention" not in model:
        attention.clear()
    mtp = model.get("features", {}).get("mtp")
    if mtp is not None and "E" in letters and (not gpt or letters.endswith("E")) and draw.chance(0.6):
        mtp["experts"] = True
        mtp.pop("bias", None)
    if mtp is not None:
        parts = [model[name] for name in ("mlp", "moe") if name in model]
        activation = draw.choice(["swiglu", "relu2", "gelu"])
        for part in (*parts, mtp):
            part["activation"] = activation
    _implementation(draw, sections, host, letters)


def _implementation(draw: Draw, sections: dict[str, Any], host: dict[str, Any], letters: str) -> None:
    if "window_size" not in sections["model"].get("attention", {}) and draw.chance(0.3):
        host |= {"transformer_impl": "local", "attention_backend": "unfused", "moe_grouped_gemm": False}
    _switches(draw, host, letters)
    if "E" not in letters:
        draw.maybe(host, 0.4, sequence_parallel=False)
    else:
        host["moe_load_balancing"] = draw.choice(["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"])
        draw.maybe(host, 0.5, moe_router_dtype=lambda: draw.choice(["fp32", "fp64"]))
    if "recompute_num_layers" in host:
        draw.maybe(host, 0.6, recompute_method="block")
    if sections["optimizer"].get("matrix") == "adamw" and draw.chance(0.4):
        grads = draw.choice(["fp16", "fp32"])
        sections["precision"] |= {"params": "fp16", "grads": grads, "reduce": grads}


def _switches(draw: Draw, host: dict[str, Any], letters: str) -> None:
    """Graphs, offload, delayed gradients and buffers of experts."""
    draw.maybe(host, 0.3, cuda_graphs=lambda: draw.choice(["layers", "iteration"]))
    if host.get("cuda_graphs") == "layers":
        modules = ["attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess"]
        draw.maybe(host, 0.6, cuda_graph_modules=lambda: draw.some(modules))
    inputs = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"]
    draw.maybe(host, 0.35, offload_modules=lambda: draw.sample(inputs, draw.randint(1, 3)))
    draw.maybe(host, 0.2, delayed_wgrad=True, fsdp_double_buffer=True)
    others = Draw(f"{letters} {host}")  # a separate random stream: it changes no later draw
    others.maybe(host, 0.2, fsdp_max_pool=True, fsdp_persistent_buffers=True, fsdp_keeps_transposes=True)
    draw.maybe(host, 0.2, offloaded_layers=lambda: draw.choice([1, 2]), fsdp_unit_elements=lambda: draw.choice([10**6, 10**9]))
    draw.maybe(host, 0.2, deferred_head_microbatches=lambda: draw.choice([1, 4]))
    if "E" in letters:
        draw.maybe(host, 0.2, moe_rank_capacity=lambda: draw.choice([1.0, 1.5]))
        draw.maybe(host, 0.2, moe_paged_stash=lambda: draw.choice([1.1, 1.2]))
