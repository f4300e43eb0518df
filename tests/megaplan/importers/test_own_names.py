"""Classes under their own names: each field of another class renamed, and counts by hand of those that no other class has."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megaplan.errors import MegaplanError
from megaplan.importers.hf import ImportedConfig, import_hf
from megaplan.importers.registry import RENAMED
from megaplan.inventory.build import build_inventory

SMALL: dict[str, Any] = json.loads((Path(__file__).parent / "small_models.json").read_text(encoding="utf-8"))
_FACTORS = (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
NAMES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "RefinedWebModel": ("falcon", {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}, {}),
    "stablelm_epoch": ("stablelm", {"layer_norm_eps": "norm_eps", "partial_rotary_factor": "rope_pct"}, {}),
    "minimax_text_01": (
        "minimax",
        {f"{name}_{part}_factor": f"layernorm_{own}_{part}" for own, name in _FACTORS for part in ("alpha", "beta")},
        {"postnorm": True, "shared_intermediate_size": 0},
    ),
    "minimax_m1": ("minimax", {}, {"shared_moe_mode": "sigmoid"}),
    "mimo_v2": ("mimo_v2_flash", {}, {"attention_projection_layout": "fused_qkv", "moe_router_dtype": "bfloat16"}),
    **{name: ("llama", {}, {}) for name in ("Yi", "aquila", "skywork", "xverse")},
    "phi3_v": ("phi3", {}, {"img_processor": {"name": "clip_vision_model"}}),
}
"""Model type whose class has other names: the type of the same class, its fields under these names, and fields that change no tensor."""
_GROK: dict[str, Any] = {
    "model_type": "grok-1", "architectures": ["Grok1ModelForCausalLM"], "attn_output_multiplier": 0.088, "embedding_multiplier_scale": 78.4,
    "hidden_size": 6144, "intermediate_size": 32768, "max_attn_value": 30.0, "num_attention_heads": 48, "num_experts": 8,
    "num_experts_per_tok": 2, "num_hidden_layers": 64, "num_key_value_heads": 8, "output_multiplier_scale": 0.577,
    "rope_theta": 10000, "tie_word_embeddings": True, "vocab_size": 131072,
}  # fmt: skip
"""The sizes of grok-1, whose total is published without the embedding's 0.8 billion."""
PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "Hunyuan-Large": (
        {"model_type": "hunyuan", "attention_head_dim": 80, "cla_share_factor": 2, "hidden_size": 6400, "intermediate_size": 18304,
         "moe_topk": 1, "num_attention_heads": 80, "num_experts": 16, "num_hidden_layers": 64, "num_key_value_heads": 8,
         "num_shared_expert": 1, "tie_word_embeddings": True, "use_cla": True, "use_mixed_mlp_moe": True, "use_qk_norm": True,
         "vocab_size": 128512, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
        389, 51,
    ),
    "LongCat-Flash-Lite": (
        {"model_type": "longcat_flash_ngram", "vocab_size": 131072, "hidden_size": 3072, "ffn_hidden_size": 6144, "num_layers": 14,
         "expert_ffn_hidden_size": 1024, "num_attention_heads": 32, "n_routed_experts": 256, "moe_topk": 12, "zero_expert_num": 128,
         "ngram_vocab_size_ratio": 78, "emb_neighbor_num": 4, "emb_split_num": 4},
        69, 36,  # with the whole tables of n-grams, of which a token reads a row each
    ),
    "MiniMax-Text-01": (
        {"model_type": "minimax_text_01", "attn_type_list": ([0] * 7 + [1]) * 10, "head_dim": 128, "hidden_size": 6144,
         "intermediate_size": 9216, "num_attention_heads": 64, "num_experts_per_tok": 2, "num_hidden_layers": 80,
         "num_key_value_heads": 8, "num_local_experts": 32, "rotary_dim": 64, "vocab_size": 200064},
        456, 48,
    ),
    "grok-1": (_GROK, 316, 84),
    "grok-2": (
        _GROK | {"model_type": "git", "architectures": ["Grok1ForCausalLM"], "hidden_size": 8192, "num_attention_heads": 64,
                 "moe_intermediate_size": 16384, "residual_moe": True, "tie_word_embeddings": False, "head_dim": 128},
        270, 115,
    ),
    "Step3": ({"model_type": "step3_text", "moe_layers_enum": ",".join(map(str, range(4, 60)))}, 316, 39),
    "DBRX": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352, "attn_config": {"kv_n_heads": 8},
         "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
        132, 36,
    ),
    "falcon-40b": ({"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60}, 41, 41),
    "mamba2-2.7b": ({"d_model": 2560, "n_layer": 64, "ssm_cfg": {"layer": "Mamba2"}, "pad_vocab_size_multiple": 16}, 3, 3),
}  # fmt: skip
"""Fields that are not the class's default, and billions of parameters in all and for a token."""


def imported(fields: dict[str, Any]) -> ImportedConfig:
    return import_hf(json.dumps(fields, indent=1), "config.json")


def parameters(fields: dict[str, Any]) -> int:
    return build_inventory(imported(fields).loaded.spec).parameters


def model(fields: dict[str, Any]) -> dict[str, Any]:
    return imported(fields).loaded.spec.as_document()["model"]


@pytest.mark.parametrize("name", NAMES)
def test_a_class_under_other_names_is_built_as_the_same(name: str) -> None:
    other, names, more = NAMES[name]
    for config, total in SMALL[other]:
        fields = {names.get(key, key): value for key, value in config.items()} | {"model_type": name} | more
        assert model(fields) == model(config)
        assert parameters(fields) == total


def test_every_renamed_type_is_another_class_s() -> None:
    """The types that differ by their name alone import as the class that the table gives."""
    for name, other in RENAMED.items():
        config = next(iter(SMALL.get(other, [[None]])))[0]
        if config is not None:
            assert model({**config, "model_type": name}) == model(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    fields, total, active = PUBLISHED[name]
    inventory = build_inventory(imported(fields).loaded.spec)
    assert (round(inventory.parameters / 1e9), round(inventory.active_parameters / 1e9)) == (total, active)


def _stack(hidden: int, layers: int, rows: int, *, tied: bool = False, norm: int = 1) -> int:
    """Parameters outside of the blocks' products: embedding, head, and norms with `norm` vectors each."""
    return rows * hidden * (1 if tied else 2) + (2 * layers + 1) * norm * hidden


def _hunyuan(draw: Random) -> tuple[dict[str, Any], int]:
    heads, width, layers, rows = draw.choice([2, 4]), draw.choice([8, 12]), draw.randint(1, 7), 60
    hidden, inner, count, share, together = (
        2 * heads * width,
        draw.randint(5, 30),
        draw.randint(2, 5),
        draw.randint(1, 3),
        draw.randint(1, 2),
    )
    groups, normed, mixed, listed = draw.choice([1, heads]), draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.5
    fields = {
        "model_type": "hunyuan", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": width,
        "num_key_value_heads": groups, "intermediate_size": inner, "vocab_size": rows, "use_cla": share > 1, "cla_share_factor": share,
        "num_experts": count, "moe_topk": [1] * layers if listed else 1, "num_shared_expert": [together] * layers if listed else together,
        "use_mixed_mlp_moe": mixed, "use_qk_norm": normed,
    }  # fmt: skip
    own = len(range(0, layers, share))
    attention = 2 * heads * width * hidden * layers + 2 * groups * width * hidden * own + normed * width * (layers + own)
    experts = layers * (hidden * count + 3 * hidden * inner * (count + mixed * together))
    return fields, _stack(hidden, layers, rows) + attention + experts


def _step3(draw: Random) -> tuple[dict[str, Any], int]:
    heads, width, hidden, layers, rank = (
        draw.choice([2, 4]),
        2 * draw.randint(2, 9),
        draw.randint(10, 40),
        draw.randint(2, 6),
        draw.randint(5, 20),
    )
    inner, routed, shared, count = (draw.randint(3, 30) for _ in range(4))
    sparse = sorted(draw.sample(range(layers), draw.randint(1, layers)))
    fields = {
        "model_type": "step3_text", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": width,
        "share_q_dim": rank, "intermediate_size": inner, "moe_intermediate_size": routed, "share_expert_dim": shared, "vocab_size": 50,
        "moe_num_experts": count, "moe_top_k": 2, "moe_layers_enum": ",".join(map(str, sparse)),
    }  # fmt: skip
    attention = hidden * rank + rank + rank * heads * width + 2 * hidden * width + heads * width * hidden
    dense = (layers - len(sparse)) * 3 * hidden * inner
    experts = len(sparse) * (hidden * count + 3 * hidden * (count * routed + shared))
    return fields, _stack(hidden, layers, 50) + layers * attention + dense + experts


def _codeshell(draw: Random) -> tuple[dict[str, Any], int]:
    heads, layers, inner = draw.choice([2, 4]), draw.randint(1, 5), draw.choice([None, draw.randint(9, 60)])
    hidden, grouped = heads * 8, draw.random() < 0.5
    fields = {
        "model_type": "codeshell", "n_embd": hidden, "n_head": heads, "n_layer": layers, "n_inner": inner, "vocab_size": 70,
        "num_query_groups": 1, "group_query_attention": grouped, "position_embedding_type": "rope", "tie_word_embeddings": True,
    }  # fmt: skip
    joined, wide = hidden + 16 * (1 if grouped else heads), inner or 4 * hidden
    attention, mlp = (hidden + 1) * (joined + hidden), 2 * hidden * wide + wide + hidden
    return fields, _stack(hidden, layers, 70, tied=True, norm=2) + layers * (attention + mlp)


def _phi3_small(draw: Random) -> tuple[dict[str, Any], int]:
    heads, layers, inner = draw.choice([2, 4]), draw.randint(1, 5), draw.randint(9, 60)
    hidden = heads * 8
    fields = {
        "model_type": "phi3small", "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 1, "vocab_size": 70,
        "num_hidden_layers": layers, "ff_intermediate_size": inner, "dense_attention_every_n_layers": 2, "blocksparse_block_size": 64,
    }  # fmt: skip
    attention, mlp = (hidden + 1) * (hidden + 16) + hidden * hidden + hidden, 3 * hidden * inner + 2 * inner + hidden
    return fields, _stack(hidden, layers, 70, tied=True, norm=2) + layers * (attention + mlp)


def _phi_msft(draw: Random) -> tuple[dict[str, Any], int]:
    heads, layers, inner = draw.choice([2, 4]), draw.randint(1, 5), draw.choice([None, draw.randint(9, 60)])
    hidden, wide = heads * 8, inner or 32 * heads
    fields = {
        "model_type": "phi-msft", "n_embd": hidden, "n_head": heads, "n_layer": layers, "n_inner": inner, "rotary_dim": 4, "vocab_size": 70,
    }  # fmt: skip
    one_norm = (layers + 1) * 2 * hidden
    return fields, 70 * (2 * hidden + 1) + one_norm + layers * (4 * hidden * (hidden + 1) + 2 * hidden * wide + wide + hidden)


def _ngram(draw: Random) -> tuple[dict[str, Any], int]:
    config, total = draw.choice(SMALL["longcat_flash"])
    ratio, order, split = draw.randint(2, 9), draw.randint(2, 4), draw.randint(1, 3)
    tables, hidden = split * (order - 1), config["hidden_size"]
    fields = {
        **config,
        "model_type": "longcat_flash_ngram",
        "ngram_vocab_size_ratio": ratio,
        "emb_neighbor_num": order,
        "emb_split_num": split,
    }
    rows = sum(ratio * config["vocab_size"] + 2 * table + 1 for table in range(tables))
    return fields, total + hidden // tables * (rows + tables * hidden)


@pytest.mark.parametrize("draw", [_hunyuan, _step3, _codeshell, _phi3_small, _phi_msft, _ngram], ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("seed", range(12))
def test_parameters_by_hand(draw: Any, seed: int) -> None:
    fields, total = draw(Random(seed))
    assert parameters(fields) == total


def test_the_first_name_of_phi_2_s_class() -> None:
    fields, total = _phi_msft(Random(1))
    built = {"block_cls": "parallel", "mlp": {"mlp_cls": "fused_mlp"}}
    assert parameters(fields | {"model_type": "mixformer-sequential", "architecture": built}) == total


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_the_first_name_of_the_stream_s_width(family: str) -> None:
    config, total = SMALL[family][0]
    assert parameters({{"hidden_size": "n_embed"}.get(key, key): value for key, value in config.items()}) == total


def test_layers_read_the_keys_of_the_first_of_their_group() -> None:
    fields, _ = _hunyuan(Random(3))
    shared = model(fields | {"num_hidden_layers": 5, "use_cla": True, "cla_share_factor": 2, "moe_topk": 1, "num_shared_expert": 1})
    assert shared["attention"]["shared_keys"] == [{"source": 0, "layers": [2]}, {"source": 4, "layers": [6]}]


def test_gpt2_with_shared_keys_is_gpt_bigcode() -> None:
    """SantaCoder has the type of gpt2 and its own class, which a warning names."""
    config = SMALL["gpt2"][0][0]
    code = {"AutoModelForCausalLM": "modeling_gpt2_mq.GPT2LMHeadCustomModel"}
    found = imported(config | {"architectures": ["GPT2LMHeadCustomModel"], "auto_map": code, "attention_head_type": "multiquery"})
    assert found.loaded.spec.as_document()["model"] == model({**config, "model_type": "gpt_bigcode", "multi_query": True})
    assert any("GPT2LMHeadCustomModel" in each.detail and each.code == "MP820" for each in found.loaded.diagnostics)


@pytest.mark.parametrize(("kind", "cfg"), [("mamba", {}), ("mamba2", {"layer": "Mamba2", "headdim": 8, "d_state": 16, "ngroups": 2})])
def test_configs_of_mamba_ssm_have_no_type(kind: str, cfg: dict[str, Any]) -> None:
    fields = {"d_model": 32, "n_layer": 3, "ssm_cfg": cfg, "vocab_size": 90, "pad_vocab_size_multiple": 16, "rms_norm": True}
    ours = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "tie_word_embeddings": True, "model_type": kind}
    ours |= {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2} if cfg else {"state_size": 16, "time_step_rank": 2}
    assert parameters(fields) == parameters(ours)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"model_type": "persimmon"}, "qk_layernorm"),
        ({"model_type": "mixformer-sequential", "architecture": {"block_cls": "sequential"}}, "architecture"),
        ({"model_type": "hunyuan", "use_mla": True}, "use_mla"),
        ({"model_type": "codeshell", "position_embedding_type": "learned_absolute"}, "position_embedding_type"),
        ({"model_type": "minimax_text_01", "shared_intermediate_size": 512}, "shared_intermediate_size"),
        ({"model_type": "dbrx", "ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_config"),
        ({"d_model": 32, "n_layer": 2, "ssm_cfg": {}, "attn_layer_idx": [1]}, "attn_layer_idx"),
        ({"model_type": "rwkv5", "attention_hidden_size": 2560}, "attention_hidden_size"),
        ({"model_type": "jetmoe", "kv_channels": 128}, "kv_channels"),
    ],
)
def test_what_a_spec_lacks_is_refused_by_its_field(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        imported(fields)
    (found,) = caught.value.diagnostics
    assert (found.code, found.location.key) == ("MP805", key)
