"""The tensor names of each `model_type`: one table, read in both directions.

A table maps megarun's modules (ours) to Hugging Face's (theirs), by letter; `.weight` and `.bias` follow. A tuple of ours is one module of
theirs, concatenated by rows or in groups of rows (`Names.groups`); a tuple of theirs has equal parts of ours. `{expert}` in a name means
one tensor for each expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

Module: TypeAlias = str | tuple[str, ...]
Modules: TypeAlias = dict[Module, Module]
ROWS = "rows"
"""Groups of one row of each of ours."""


@dataclass(frozen=True, slots=True)
class Depths:
    """Names of the depths of multi-token prediction, which transformers does not build.

    Attributes:
        modules: Our modules to theirs, without the blocks' modules; their projection reads [embedding; hidden], ours [hidden; embedding].
        prefix: Prefix of these names; `{layer}` counts on from the decoder layers.
        block: Prefix of the blocks' names; the rest of a name is as in a decoder layer.
        count: Field of the config with the number of depths; absent means one.
        copies: Tensors of each of their depths that are copies of tensors which our depth shares with the model.
        most: Largest number of depths with names; None for any number.
    """

    modules: Modules
    prefix: str = "model.layers.{layer}."
    block: str = ""
    count: str = "num_nextn_predict_layers"
    copies: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one model type.

    Attributes:
        blocks: Letter to its modules, ours to theirs, inside a decoder layer.
        layer: Prefix of these names; `{layer}` is the decoder layer.
        letters: Our layers in a decoder layer.
        outside: Modules outside the layers.
        pairs: True if rotary embedding rotates neighbouring dims; ours rotates the two halves. A permutation of rows, equal for queries and
            keys, changes no score.
        index_pairs: True if rotary embedding of indexers does.
        transposed: The other side's modules with weights [in, out].
        groups: The other side's modules whose rows are groups with rows of each of our modules, and the key of `model` with the number of
            groups, or `ROWS`.
        shapes: Shapes of their tensors that differ from ours; -1 is all of the elements.
        depths: Names of multi-token prediction; None if no names are public.
        also: A part of their names, and how transformers writes it; both are read.
        constants: Buffers that their files have in every decoder layer, each of one value, which an export writes.
    """

    blocks: Mapping[str, Modules]
    layer: str = "model.layers.{layer}."
    letters: int = 2
    outside: Modules = field(default_factory=lambda: {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"})
    pairs: bool = False
    index_pairs: bool = False
    transposed: frozenset[str] = frozenset()
    groups: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    depths: Depths | None = None
    also: tuple[str, str] | None = None
    constants: Mapping[str, float] = field(default_factory=dict)


def _in(module: str, *names: str, **renamed: str) -> Modules:
    """Modules with equal names on both sides, inside `module`, then modules with different names."""
    same: Modules = {name: f"{module}.{name}" for name in names}
    return same | {ours: f"{module}.{theirs}" for ours, theirs in renamed.items()}


_BEFORE: Modules = {"norm": "input_layernorm"}
_AFTER: Modules = {"norm": "post_attention_layernorm"}
_HEADS: Modules = _in("self_attn", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "gate_proj", "sinks")
_GATED = ("gate_proj", "up_proj", "down_proj")
_MLP: Modules = _in("mlp", *_GATED)
_ONE_GATE_UP: Modules = {("gate_proj", "up_proj"): "mlp.gate_up_proj", "down_proj": "mlp.down_proj"}
_EXPERTS: Modules = {"router": "mlp.gate", **{f"experts.{name}": f"mlp.experts.{{expert}}.{name}.weight" for name in _GATED}}
_MATRICES = tuple(zip(_GATED, ("w1", "w3", "w2"), strict=True))
_NUMBERED: Modules = {f"experts.{ours}": f"block_sparse_moe.experts.{{expert}}.{theirs}.weight" for ours, theirs in _MATRICES}
_MIXTRAL: Modules = {**_NUMBERED, "router": "block_sparse_moe.gate", "expert_bias": "block_sparse_moe.e_score_correction_bias"}
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_MIXER = ("in_proj", "conv1d", "dt_bias", "A_log", "D", "out_proj")


def _shared(module: str) -> Modules:
    return {f"shared.{name}": f"{module}.{name}" for name in _GATED}


def _decoder(
    attention: Modules = _HEADS, mlp: Modules = _MLP, moe: Modules | None = None, *, before: Modules = _BEFORE, after: Modules = _AFTER
) -> Names:
    """Attention, then an MLP or experts, a norm before each."""
    experts: dict[str, Modules] = {} if moe is None else {"E": {**after, **moe}}
    return Names({"A": {**before, **attention}, "D": {**after, **mlp}, **experts})


LLAMA = _decoder()
_POST = _decoder(
    before={"post_norm": "post_attention_layernorm"},
    after={"post_norm": "post_feedforward_layernorm"},
)
_PARALLEL = Names({"A": {**_BEFORE, **_HEADS}, "D": _MLP}, pairs=True)
"""Attention and MLP on one norm."""
_SIGMOID_EXPERTS: Modules = {**_EXPERTS, "expert_bias": "mlp.gate.e_score_correction_bias", **_shared("mlp.shared_experts")}
_HUNYUAN: Modules = {**_in("self_attn", "q_proj", "k_proj", "v_proj", "o_proj", q_norm="query_layernorm", k_norm="key_layernorm")}
_LATENT: Modules = {
    **_in("self_attn", "q_proj", "o_proj", q_down="q_a_proj", q_latent_norm="q_a_layernorm", q_up="q_b_proj"),
    **_in("self_attn", kv_down="kv_a_proj_with_mqa", kv_latent_norm="kv_a_layernorm", kv_up="kv_b_proj"),
}
_INDEXED: Modules = {
    **_LATENT,
    **{f"indexer.{ours}": f"self_attn.indexer.{theirs}" for ours, theirs in (("q_up", "wq_b"), ("k_proj", "wk"), ("k_norm", "k_norm"))},
    "indexer.head_weights": "self_attn.indexer.weights_proj",
}
_NEXT_LAYERS = Depths(
    {"proj": "eh_proj", "hidden_norm": "hnorm", "embedding_norm": "enorm", "output_norm": "shared_head.norm"},
    copies={"embed_tokens.weight": "embedding.weight", "shared_head.head.weight": "head.weight"},
)
"""A depth as a further decoder layer, with copies of the embedding and the head."""
_MTP_MODULE = Depths(
    {"proj": "fc", "hidden_norm": "pre_fc_norm_hidden", "embedding_norm": "pre_fc_norm_embedding", "output_norm": "norm"},
    prefix="mtp.",
    block="layers.0.",
    count="mtp_num_hidden_layers",
    most=1,
)
"""A separate module, next to the model, with its one layer."""
_DEEPSEEK = replace(_decoder(_LATENT, moe=_SIGMOID_EXPERTS), pairs=True)
_GLM_BEFORE = _decoder(_HEADS, _ONE_GATE_UP)
_FEED_FORWARD: Modules = {"norm": "pre_ff_layernorm", **_in("feed_forward", *_GATED)}
_FEED_FORWARD_ENDS: Modules = {"embedding": "model.embed_tokens", "final_norm": "model.final_layernorm", "head": "lm_head"}
_LFM2_BEFORE: Modules = {"norm": "operator_norm"}
_LFM2_NORMS = {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj"}
_LFM2_CONV: Modules = {
    ("input_gate_proj", "output_gate_proj", "value_proj"): "conv.in_proj",
    "conv": "conv.conv",
    "out_proj": "conv.out_proj",
}
_LFM2_MLP: Modules = {"gate_proj": "feed_forward.w1", "up_proj": "feed_forward.w3", "down_proj": "feed_forward.w2"}
_LFM2_EXPERTS: Modules = {f"experts.{ours}": f"feed_forward.experts.{{expert}}.{theirs}.weight" for ours, theirs in _MATRICES}
_LFM2 = Names(
    {
        "A": {**_LFM2_BEFORE, **_in("self_attn", "q_proj", "k_proj", "v_proj", **_LFM2_NORMS)},
        "C": {**_LFM2_BEFORE, **_LFM2_CONV},
        "D": {"norm": "ffn_norm", **_LFM2_MLP},
        "E": {"norm": "ffn_norm", **_LFM2_EXPERTS, **_in("feed_forward", router="gate", expert_bias="expert_bias")},
    },
    outside={"embedding": "model.embed_tokens", "final_norm": "model.embedding_norm", "head": "lm_head"},
)
_KIMI_DELTA: Modules = {
    "qk_proj": ("self_attn.q_proj", "self_attn.k_proj"),
    "conv_qk": ("self_attn.q_conv1d", "self_attn.k_conv1d"),
    "latent_proj": ("self_attn.f_a_proj", "self_attn.g_a_proj"),
    **_in("self_attn", "v_proj", "dt_bias", "A_log", conv_v="v_conv1d", beta_proj="b_proj", decay_up="f_b_proj", gate_up="g_b_proj"),
    **_in("self_attn", gated_norm="o_norm", out_proj="o_proj"),
}
_GATED_HEADS: Modules = {("q_proj", "gate_proj"): "self_attn.q_proj", **_in("self_attn", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
_QWEN_DELTA = _in("linear_attn", "A_log", "dt_bias", "out_proj", gated_norm="norm")
_QWEN_EXPERTS: Modules = {**_EXPERTS, **_shared("mlp.shared_expert"), "shared_gate": "mlp.shared_expert_gate"}
_QWEN_FEEDS: dict[str, Modules] = {"D": {**_AFTER, **_MLP}, "E": {**_AFTER, **_QWEN_EXPERTS}}
_QWEN_CONVOLUTION: Modules = {("conv_qk", "conv_v"): "linear_attn.conv1d"}
_BY_HEAD = {"self_attn.q_proj": "attention.num_heads"}
_QWEN35_DELTA: Modules = {
    ("qk_proj", "v_proj"): "linear_attn.in_proj_qkv",
    **_in("linear_attn", gate_proj="in_proj_z", beta_proj="in_proj_b", decay_proj="in_proj_a"),
}
_QWEN35 = Names(
    {"A": {**_BEFORE, **_GATED_HEADS}, "G": {**_BEFORE, **_QWEN_DELTA, **_QWEN_CONVOLUTION, **_QWEN35_DELTA}, **_QWEN_FEEDS},
    groups=_BY_HEAD,
)
_QWEN_NEXT_DELTA: Modules = {
    ("qk_proj", "v_proj", "gate_proj"): "linear_attn.in_proj_qkvz",
    ("beta_proj", "decay_proj"): "linear_attn.in_proj_ba",
}
_BY_KEY_HEAD = dict.fromkeys(("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), "linear_attention.num_key_heads")
_OLMO_DELTA: Modules = {
    "qk_proj": ("linear_attn.q_proj", "linear_attn.k_proj"),
    "conv_qk": ("linear_attn.q_conv1d", "linear_attn.k_conv1d"),
    **_in("linear_attn", "v_proj", "A_log", "dt_bias", conv_v="v_conv1d", beta_proj="b_proj", decay_proj="a_proj", gate_proj="g_proj"),
    **_in("linear_attn", gated_norm="o_norm", out_proj="o_proj"),
}
_SANDWICH: dict[str, Modules] = {
    "before": {**_BEFORE, "post_norm": "post_attention_layernorm"},
    "after": {"norm": "pre_feedforward_layernorm", "post_norm": "post_feedforward_layernorm"},
}
_MAMBA_LAYER: Modules = {**_BEFORE, **_in("mamba", *_MIXER, gated_norm="norm")}
_SELECTIVE = ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj")
_JAMBA_NORMS = {"dt_norm": "dt_layernorm", "B_norm": "b_layernorm", "C_norm": "c_layernorm", "dt_bias": "dt_proj.bias"}
_JAMBA_EXPERTS: Modules = {f"experts.{name}": f"feed_forward.experts.{{expert}}.{name}.weight" for name in _GATED}
_BACKBONE: Modules = {"embedding": "backbone.embeddings", "final_norm": "backbone.norm_f", "head": "lm_head"}
_ALONE: Modules = {"norm": "norm", **_in("mixer", *_MIXER, gated_norm="norm")}
_MAMBA1 = Names({"M": {"norm": "norm", **_in("mixer", *_SELECTIVE, dt_bias="dt_proj.bias")}}, "backbone.layers.{layer}.", 1, _BACKBONE)

NAMES: dict[str, Names] = {
    "apertus": replace(
        _decoder(
            _HEADS,
            _in("mlp", "up_proj", "down_proj") | {"alphas": ("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n")},
            before={"norm": "attention_layernorm"},
            after={"norm": "feedforward_layernorm"},
        ),
        constants={"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6},
    ),
    "arcee": LLAMA,
    "bamba": Names({"A": {**_BEFORE, **_HEADS}, "M": _MAMBA_LAYER, "D": _FEED_FORWARD}, outside=_FEED_FORWARD_ENDS),
    "bitnet": _decoder(_HEADS | _in("self_attn", o_norm="attn_sub_norm"), _MLP | _in("mlp", inner_norm="ffn_sub_norm")),
    "cohere": _PARALLEL,
    "cohere2": _PARALLEL,
    "cohere2_moe": replace(_PARALLEL, blocks={**_PARALLEL.blocks, "E": {**_EXPERTS, **_shared("mlp.shared_experts")}}),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": replace(_DEEPSEEK, depths=_NEXT_LAYERS),
    "deepseek_v32": replace(_decoder(_INDEXED, moe=_SIGMOID_EXPERTS), pairs=True),
    "ernie4_5": replace(LLAMA, pairs=True),
    "ernie4_5_moe": replace(
        _decoder(moe={**_EXPERTS, "router.correction": "mlp.moe_statics.e_score_correction_bias", **_shared("mlp.shared_experts")}),
        pairs=True,
    ),
    "exaone4": _POST,
    "falcon_mamba": _MAMBA1,
    "falcon_h1": Names(
        {
            "M": _MAMBA_LAYER,
            "A": _in("self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
            "D": {"norm": "pre_ff_layernorm", **_in("feed_forward", *_GATED)},
        },
        letters=3,
        outside=_FEED_FORWARD_ENDS,
    ),
    "gemma": LLAMA,
    "gemma2": _decoder(**_SANDWICH),
    "gemma3_text": _decoder(**_SANDWICH),
    "glm": replace(_GLM_BEFORE, pairs=True),
    "glm4": replace(
        _decoder(
            _HEADS,
            _ONE_GATE_UP,
            before={**_BEFORE, "post_norm": "post_self_attn_layernorm"},
            after={**_AFTER, "post_norm": "post_mlp_layernorm"},
        ),
        pairs=True,
    ),
    "jamba": Names(
        {
            "A": {**_BEFORE, **_HEADS},
            "M": {**_BEFORE, **_in("mamba", *_SELECTIVE, **_JAMBA_NORMS)},
            "D": _FEED_FORWARD,
            "E": {"norm": "pre_ff_layernorm", **_JAMBA_EXPERTS, "router": "feed_forward.router"},
        },
        outside=_FEED_FORWARD_ENDS,
    ),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "glm4_moe": replace(_decoder(moe=_SIGMOID_EXPERTS), depths=_NEXT_LAYERS),
    "glm_moe_dsa": replace(_decoder(_INDEXED, moe=_SIGMOID_EXPERTS), pairs=True, index_pairs=True),
    "gpt_oss": replace(
        _decoder(
            moe={
                "router": "mlp.router",
                ("experts.gate_proj", "experts.up_proj"): _GATE_UP,
                "experts.down_proj": _DOWN,
                ("experts.gate_proj_bias", "experts.up_proj_bias"): f"{_GATE_UP}_bias",
                "experts.down_proj_bias": f"{_DOWN}_bias",
            }
        ),
        transposed=frozenset({_GATE_UP, _DOWN}),
        groups={_GATE_UP: ROWS, f"{_GATE_UP}_bias": ROWS},
    ),
    "kimi_linear": Names(
        {
            "A": {**_BEFORE, **_LATENT},
            "G": {**_BEFORE, **_KIMI_DELTA},
            "D": {**_AFTER, **_MLP},
            "E": {
                **_AFTER,
                **_NUMBERED,
                **_in("block_sparse_moe", router="gate", expert_bias="gate.e_score_correction_bias"),
                **_shared("block_sparse_moe.shared_experts"),
            },
        },
        shapes={"self_attn.A_log": (1, 1, -1, 1), "self_attn.dt_bias": (-1,)},
        also=(".mlp.", ".block_sparse_moe."),
    ),
    "llama": LLAMA,
    "mamba": _MAMBA1,
    "mamba2": Names({"M": _ALONE}, "backbone.layers.{layer}.", 1, _BACKBONE),
    "minimax_m2": _decoder(moe=_MIXTRAL),
    "ministral": LLAMA,
    "mistral": LLAMA,
    "mixtral": _decoder(moe=_MIXTRAL),
    "nemotron_h": Names(
        {
            "A": {"norm": "norm", **_in("mixer", "q_proj", "k_proj", "v_proj", "o_proj")},
            "M": _ALONE,
            "D": {"norm": "norm", **_in("mixer", "up_proj", "down_proj")},
            "E": {
                "norm": "norm",
                **_in("mixer", router="gate", expert_bias="gate.e_score_correction_bias"),
                **_in("mixer", latent_down="fc1_latent_proj", latent_up="fc2_latent_proj"),
                **{f"experts.{name}": f"mixer.experts.{{expert}}.{name}.weight" for name in ("up_proj", "down_proj")},
                **_shared("mixer.shared_experts"),
            },
        },
        "backbone.layers.{layer}.",
        1,
        _BACKBONE,
    ),
    "olmo2": _POST,
    "olmo3": _POST,
    "olmo_hybrid": Names(
        {
            "A": {"post_norm": "post_attention_layernorm", **_HEADS},
            "G": {"norm": "attention_layer_norm", **_OLMO_DELTA},
            "D": {"norm": "feedforward_layer_norm", "post_norm": "post_feedforward_layernorm", **_MLP},
        },
        also=("post_attention_layernorm", "feedforward_layer_norm"),
    ),
    "olmoe": _decoder(moe=_EXPERTS),
    "phi3": _decoder({("q_proj", "k_proj", "v_proj"): "self_attn.qkv_proj", "o_proj": "self_attn.o_proj"}, _ONE_GATE_UP),
    "qwen2": LLAMA,
    "qwen2_moe": _decoder(moe=_QWEN_EXPERTS),
    "qwen3": LLAMA,
    "qwen3_moe": _decoder(moe=_EXPERTS),
    "qwen3_5_moe_text": _QWEN35,
    "qwen3_5_text": replace(_QWEN35, depths=_MTP_MODULE),
    "qwen3_next": replace(
        _QWEN35,
        blocks={**_QWEN35.blocks, "G": {**_BEFORE, **_QWEN_DELTA, **_QWEN_CONVOLUTION, **_QWEN_NEXT_DELTA}},
        groups={**_BY_HEAD, **_BY_KEY_HEAD},
        depths=_MTP_MODULE,
    ),
    "seed_oss": LLAMA,
    "smollm3": LLAMA,
    "starcoder2": _decoder(mlp={"up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"}),
}
"""The model types whose weights move, in both directions."""
