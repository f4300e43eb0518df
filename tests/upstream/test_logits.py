"""Imported models compute what transformers computes: logits of random weights, which round-trip and load again."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from hf_configs import random_config  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402
from upstream_checks import note, rms_ratio, use_plain_torch  # noqa: E402

from megaplan import split  # noqa: E402
from megaplan.exporters.hf_config import TYPES  # noqa: E402
from megaplan.importers.hf import import_hf  # noqa: E402
from megaplan.spec.models import LatentAttention, Spec  # noqa: E402
from megarun.checkpoint.full_tensors import full_tensors, tensor_names  # noqa: E402
from megarun.engine.build import build_stage, materialise  # noqa: E402
from megarun.huggingface.convert import export_weights, import_weights  # noqa: E402
from megarun.huggingface.names import NAMES  # noqa: E402
from megarun.job.run import read_job  # noqa: E402
from megarun.job.support import refuse_unbuilt  # noqa: E402
from megarun.model.step_sums import biases  # noqa: E402

SEEDS = range(4)
LENGTH = 40
FAITHFUL = {"text_config", "attention_dropout", "residual_dropout", "residual_in_fp32", "tie_word_embeddings", "num_nextn_predict_layers"}
"""Fields that an import tells of and that change no logit of an evaluation in fp32."""


def comparable(model_type: str, seed: int) -> dict[str, Any]:
    """A config whose widths both sides multiply: a grouped product of torch wants 16 bytes, and complex numbers even widths."""
    config, draw = random_config(model_type, seed), Random(seed)
    for key in ("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"):
        if key in config:
            config[key] = 8 * draw.randint(1, 4)
    if any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")):
        config["intermediate_size"] = 8 * draw.randint(1, 6)
        heads = config["num_attention_heads"]
        config["hidden_size"] = heads * 8 * draw.randint(1, 3)
    if model_type in GROUPED and draw.random() < 0.6:
        config |= {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 5}
        normalized = {"topk_method": "group_limited_greedy"} if model_type == "deepseek_v2" else {"norm_topk_prob": draw.random() < 0.5}
        config |= {"routed_scaling_factor": 2.5, **normalized}
    for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim"):
        if config.get(key):
            config[key] += config[key] % 2
    if "partial_rotary_factor" in config or model_type in PARTIAL:
        config["head_dim" if model_type not in ("bamba", "phi3") else "hidden_size"] = 8 * config["num_attention_heads"]
    if (
        "linear_key_head_dim" in config or model_type == "olmo_hybrid"
    ):  # of a few dims keys are near to parallel, and fp32 does not know what is written over them
        config |= {"linear_key_head_dim": 8 * draw.randint(2, 4), "linear_value_head_dim": 8 * draw.randint(1, 3)}
    if "index_n_heads" in config:  # of a few heads many scores are all zero, and which of equal keys is chosen is not stated
        config["index_n_heads"] = 24
    if model_type in ("gemma2", "gemma3_text"):  # caps that scores and logits come near to
        config |= {"attn_logit_softcapping": draw.choice([0.5, 2.0]), "final_logit_softcapping": draw.choice([None, 0.8])}
    if model_type == "bamba":
        config |= {"mamba_d_head": "auto", "mamba_n_heads": 2 * config["num_attention_heads"]}
    return config | (_carried(config, draw) if model_type == "falcon_h1" else {})


def _carried(config: dict[str, Any], draw: Random) -> dict[str, Any]:
    """Fields of Falcon-H1 that an import carries: factors of what a bias is added to, and a norm before its gate, are reported."""
    plain = {"attention_in_multiplier": config["attention_bias"], "ssm_in_multiplier": config["mamba_proj_bias"]}
    found = {"mamba_norm_before_gate": False, "mamba_rms_norm": draw.random() < 0.4}
    return found | {key: 1.0 for key, biased in plain.items() if biased}


BUFFERS = ("e_score_correction_bias", "expert_bias")
GROUPED = ("deepseek_v2", "deepseek_v3", "glm4_moe", "nemotron_h")
PARTIAL = ("bamba", "glm", "glm4", "phi3")


def class_of(model_type: str) -> Any:
    """transformers' own class: other packages, once imported, register theirs for types of the same name."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def random_model(config: dict[str, Any], seed: int) -> Any:
    """transformers' model with weights of a trained model's sizes, norms and biases too."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    own = class_of(config["model_type"])
    torch.manual_seed(seed)
    model = own._from_config(own.config_class.from_dict(fields), attn_implementation="eager", experts_implementation="eager").eval().float()
    torch.manual_seed(seed)
    parameters_of_a_trained_model(model)
    return model


def parameters_of_a_trained_model(model: Any) -> None:
    """Random values of such sizes, of norms and biases too."""
    with torch.no_grad():
        buffers = [(name, bias) for name, bias in model.named_buffers() if name.endswith(BUFFERS)]
        for name, parameter in (*model.named_parameters(), *buffers):
            if name.endswith(("A_log", "dt_bias")):
                if (
                    name.endswith("A_log") and "attn" in name
                ):  # states of one token alone can be near zero, and their norm then magnifies rounding
                    parameter.uniform_(-4, -1)
                continue
            parameter.normal_(0, parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2)
            if parameter.dim() == 1 and "norm" in name and not name.endswith("bias"):
                parameter.add_(1)


def part_convolutions(folder: Path) -> None:
    """Convolutions as the model is published: transformers 5.23.0 writes three equal parts, whatever the widths of q, k and v."""
    tensors = tensors_of(folder)
    for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{each}_conv1d") for each in "qkv"]
        rows = [len(tensors[each.replace("conv1d", "proj")]) for each in names]
        parts = torch.cat([tensors[each] for each in names]).split(rows)
        tensors |= {each: part.contiguous() for each, part in zip(names, parts, strict=True)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def tensors_of(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("model_type", NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_are_those_of_transformers(model_type: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights go from several shards into a checkpoint, from there into a stage, and back into a folder that loads."""
    compare(comparable(model_type, seed), f"logits {model_type}", seed, tmp_path, monkeypatch)


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn whole": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False, "beta_fast": 8.0},
    "yarn given": {"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 16, "attention_factor": 0.7, "beta_slow": 0.2},
    "yarn weighed": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}
"""Rotary parameters of a context that was extended, with lengths of which LENGTH tokens pass the ends."""


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm4", "olmoe", "deepseek_v2"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(
    scaling: str, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config has `rope_parameters` of transformers 5; latent attention scales its scores too."""
    seed = len(scaling)
    config = comparable(model_type, seed)
    config["rope_parameters"] = SCALINGS[scaling] | {"rope_theta": 100.0}
    if model_type == "glm4":
        config["rope_parameters"]["partial_rotary_factor"] = 0.5
    spec = compare(config, f"logits {model_type}, {scaling}", seed, tmp_path, monkeypatch)
    assert spec.model.attention is not None
    assert spec.model.attention.rope_scaling is not None
    assert (spec.model.attention.softmax_scale is not None) == (model_type == "deepseek_v2" and scaling == "yarn weighed")


CHOICES: dict[str, dict[str, Any]] = {
    "listed": {"indexer_types": ["full", "shared", "full", "shared", "shared"]},
    "letters": {"index_topk_pattern": "FFSSS"},
    "by step": {"index_topk_freq": 3, "index_skip_topk_offset": 2},
}
"""Layers, of five, that have their own indexer."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("given", CHOICES)
def test_layers_that_share_a_choice_are_those_of_transformers(
    given: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few keys are chosen, so that other keys, or all, give other logits: by far more than the difference from transformers."""
    config = {key: value for key, value in comparable("glm_moe_dsa", seed).items() if key != "index_topk_freq"}
    config |= {"num_hidden_layers": 5, "first_k_dense_replace": seed % 3, "index_topk": 3, "mlp_layer_types": None} | CHOICES[given]
    spec = compare(config, f"logits glm_moe_dsa, {given}", seed, tmp_path, monkeypatch)
    attention = spec.model.attention
    assert isinstance(attention, LatentAttention)
    assert attention.indexer is not None
    assert attention.indexer.layers == {"listed": (0, 4), "letters": (0, 2), "by step": (0, 2, 8)}[given]
    assert attention.indexer.shared_layers == {"listed": (2, 6, 8), "letters": (4, 6, 8), "by step": (4, 6)}[given]
    (tmp_path / "run").rename(tmp_path / "first run")
    _, stage, _ = stage_of(tmp_path)
    tokens = torch.randint(0, config["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = stage(tokens)
        for layer in attention.indexer.shared_layers:
            stage.layers[str(layer)].reads_choice = False
        assert rms_ratio(stage(tokens), expected) > 1e-3


@pytest.mark.parametrize("model_type", [each.name for each in TYPES])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_config_that_is_derived_from_the_plan_loads(model_type: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export without the config's file: transformers computes the same logits, perhaps as an earlier type of the list."""
    config = comparable(model_type, seed)
    if config.get("first_k_dense_replace", 0) >= config.get("num_hidden_layers", 1):
        config["first_k_dense_replace"] = 0
    model = random_model(config, seed)
    use_plain_torch(model, monkeypatch)
    model.save_pretrained(tmp_path / "model")
    checkpoint, _, _ = stage_of(tmp_path)
    exported = export_weights(checkpoint, None, tmp_path / "export").path
    chosen = json.loads((exported / "config.json").read_text())["model_type"]
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    loaded, info = class_of(chosen).from_pretrained(exported, output_loading_info=True, **how)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    use_plain_torch(loaded, monkeypatch)
    tokens = torch.randint(0, config["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        note(
            f"derived config of {model_type}", chosen, {f"seed {seed}": rms_ratio(loaded.eval()(tokens, use_cache=False).logits, expected)}
        )


def stage_of(folder: Path) -> tuple[Path, Any, Spec]:
    """The checkpoint, stage and spec that `model` inside a folder becomes; the checkpoint is written beside it."""
    path = folder / "model" / "config.json"
    told = [item.detail for item in import_hf(path.read_text(), "config.json").loaded.diagnostics if item.code == "MP820"]
    assert {line.partition(" = ")[0] for detail in told for line in detail.splitlines()} <= FAITHFUL
    job, plan = read_job(split(str(path), batch__seq_length=LENGTH).plan, None)
    refuse_unbuilt(job.spec)
    checkpoint = import_weights((job, plan), folder / "model", folder / "run").path
    stage = build_stage(job.spec, job.inventory, job.layout.slots[0])
    materialise(stage, torch.device("cpu"))
    whole = dict(full_tensors(checkpoint, tensor_names(checkpoint)))
    with torch.no_grad():
        for name, parameter in (*stage.named_parameters(), *biases([stage])):
            parameter.copy_(whole[name].reshape(parameter.shape))
    return checkpoint, stage, job.spec


def compare(config: dict[str, Any], title: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spec:
    """Weights out of transformers, logits of both, weights back; the spec of the import."""
    model = random_model(config, seed)
    use_plain_torch(model, monkeypatch)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB" if config["model_type"] != "olmo_hybrid" else "1GB")
    if config["model_type"] == "olmo_hybrid":
        part_convolutions(tmp_path / "model")
    checkpoint, stage, spec = stage_of(tmp_path)
    tokens = torch.randint(0, config["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        note(title, f"transformers {type(model).__name__}", {f"seed {seed}": rms_ratio(stage(tokens), expected)})
    exported = export_weights(checkpoint, tmp_path / "model" / "config.json", tmp_path / "export").path
    also = NAMES[config["model_type"]].also or ("", "")
    stored, written = ({name.replace(*also): tensor for name, tensor in tensors_of(one).items()} for one in (tmp_path / "model", exported))
    assert stored.keys() == written.keys()
    assert [name for name in stored if not torch.equal(stored[name], written[name])] == []
    loaded, info = class_of(config["model_type"]).from_pretrained(
        exported, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens, use_cache=False).logits, expected)
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float32"
    return spec
