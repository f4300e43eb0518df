"""Depths of multi-token prediction compute what their published modules do, put together from transformers' layers.

transformers itself drops these weights. A depth is a decoder layer of the model behind a projection of [norm(embedding); norm(hidden)],
before a norm and the shared head (DeepSeek-V3, arXiv:2412.19437, section 2.2; names as in the published checkpoints).
"""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from test_logits import LENGTH, class_of, comparable, parameters_of_a_trained_model, random_model, tensors_of  # noqa: E402
from upstream_checks import note, rms_ratio, use_plain_torch  # noqa: E402

from megaplan import split  # noqa: E402
from megaplan.errors import MegaplanError  # noqa: E402
from megarun.checkpoint.full_tensors import full_tensors, tensor_names  # noqa: E402
from megarun.engine.build import build_stage, materialise  # noqa: E402
from megarun.huggingface.convert import export_weights, import_weights  # noqa: E402
from megarun.job.run import read_job  # noqa: E402
from megarun.model.step_sums import biases  # noqa: E402

LAYER, MODULE = "model.layers.{layer}.", "mtp."
FAMILIES = {  # decoder layer and norm of transformers, prefix of names, of the layer's, and the names of norms and projection
    "deepseek_v3": ("DeepseekV3", LAYER, "", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "glm4_moe": ("Glm4Moe", LAYER, "", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "qwen3_5_text": ("Qwen3_5", MODULE, "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "qwen3_next": ("Qwen3Next", MODULE, "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}
HYBRIDS = ("qwen3_5_text", "qwen3_next")
"""A depth has attention of these blocks, whatever the last layer has."""
SEEDS = range(3)


class Depth(torch.nn.Module):
    """The published composition."""

    def __init__(self, model: Any, model_type: str) -> None:
        super().__init__()
        family, *_ = FAMILIES[model_type]
        folder = model_type.removesuffix("_text")
        classes = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        config = model.config
        if model_type in HYBRIDS:
            config.layer_types = [*config.layer_types, "full_attention"]
        norm = getattr(classes, f"{family}RMSNorm")
        self.layer = getattr(classes, f"{family}DecoderLayer")(config, config.num_hidden_layers)
        self.embedding_norm, self.hidden_norm, self.norm = (norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        if model_type in HYBRIDS:
            config.layer_types = config.layer_types[:-1]

    def forward(self, model: Any, hidden: Any, following: Any) -> Any:
        """Logits of the tokens after the following ones, from hidden [B, T, h] and following ids [B, T]."""
        embedded = self.embedding_norm(model.model.embed_tokens(following))
        x = self.proj(torch.cat([embedded, self.hidden_norm(hidden)], -1))
        length = x.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(x.dtype).min).triu(1)[None, None]
        x = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=model.model.rotary_emb(x, positions))
        return model.lm_head(self.norm(x[0] if isinstance(x, tuple) else x))

    def named(self, model: Any, model_type: str) -> dict[str, Any]:
        """Tensors of a depth as checkpoints name them, the copies of embedding and head included where they have them."""
        _, prefix, inside, (embedding, hidden, proj, last) = FAMILIES[model_type]
        prefix = prefix.format(layer=model.config.num_hidden_layers)
        own = {"embedding_norm": embedding, "hidden_norm": hidden, "proj": proj, "norm": last}
        found = {f"{prefix}{theirs}.weight": getattr(self, ours).weight for ours, theirs in own.items()}
        found |= {f"{prefix}{inside}{name}": tensor for name, tensor in separate_experts(self.layer.state_dict()).items()}
        if prefix != MODULE:
            head, table = model.lm_head.weight, model.model.embed_tokens.weight
            found |= {f"{prefix}shared_head.head.weight": head, f"{prefix}embed_tokens.weight": table}
        return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def separate_experts(state: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 keeps the experts of a layer as stacks; checkpoints have a tensor for each."""
    found = dict(state)
    if "mlp.experts.down_proj" not in found:
        return found
    gate_up, down = found.pop("mlp.experts.gate_up_proj"), found.pop("mlp.experts.down_proj")
    for expert, (both, last) in enumerate(zip(gate_up, down, strict=True)):
        gate, up = both.chunk(2)
        for name, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", last)):
            found[f"mlp.experts.{expert}.{name}.weight"] = tensor
    return found


def config_with_depth(model_type: str, seed: int) -> dict[str, Any]:
    """A small config whose depth has experts where the published ones have."""
    config = comparable(model_type, seed) | {"tie_word_embeddings": False}
    if model_type in HYBRIDS:
        config |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []} if model_type == "qwen3_next" else {"mtp_num_hidden_layers": 1}
    else:
        config["num_nextn_predict_layers"] = 1
        config["first_k_dense_replace"] = min(config.get("first_k_dense_replace", 0), config["num_hidden_layers"] - 1)
    return config


@pytest.fixture
def published(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int, Any, Depth, Path]:
    """Model type, seed, transformers' model, its depth, and a folder `model` with the weights of both."""
    model_type, seed = request.param
    config = config_with_depth(model_type, seed)
    model = random_model(config, seed)
    with torch.device("cpu"):
        depth = Depth(model, model_type).eval().float()
    torch.manual_seed(seed + 100)
    parameters_of_a_trained_model(depth)
    use_plain_torch(model, monkeypatch)
    model.save_pretrained(tmp_path / "model")
    save_file(tensors_of(tmp_path / "model") | depth.named(model, model_type), tmp_path / "model" / "model.safetensors", {"format": "pt"})
    return model_type, seed, model, depth, tmp_path


CASES = [pytest.param((model_type, seed), id=f"{model_type}-{seed}") for model_type in FAMILIES for seed in SEEDS]


def planned(folder: Path, **changes: Any) -> Any:
    fields = json.loads((folder / "model" / "config.json").read_text())
    dense = fields["model_type"] == "qwen3_5_text"
    kind = {"ffn_hidden_size": fields["intermediate_size"], "activation": "swiglu"} if dense else {"ffn_hidden_size": 8, "experts": True}
    mtp = {"depth": 1, "normed_input": True} | kind | changes
    changes = {"batch__seq_length": LENGTH, "model__features": {"mtp": mtp}, "host__kernels": "reference"}
    return read_job(split(str(folder / "model" / "config.json"), **changes).plan, None)


@pytest.mark.parametrize("published", CASES, indirect=True)
def test_logits_of_a_depth_are_the_published_modules(published: tuple[str, int, Any, Depth, Path]) -> None:
    """Weights go into a checkpoint, into a stage, and back into a folder that has every tensor of the first one."""
    model_type, seed, model, depth, folder = published
    job, plan = planned(folder)
    moved = import_weights((job, plan), folder / "model", folder / "run")
    copies = 0 if model_type in HYBRIDS else 2
    assert len(moved.left) == copies  # of embedding and head, which a depth shares
    stage = build_stage(job.spec, job.inventory, job.layout.slots[0])
    materialise(stage, torch.device("cpu"))
    stage.add_buffers(torch.device("cpu"))
    whole = dict(full_tensors(moved.path, tensor_names(moved.path)))
    with torch.no_grad():
        for name, parameter in (*stage.named_parameters(), *biases([stage])):
            parameter.copy_(whole[name].reshape(parameter.shape))
    tokens = torch.randint(0, model.config.vocab_size, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    hidden: list[Any] = []
    handle = model.model.norm.register_forward_hook(lambda _, __, output: hidden.append(output))
    following, made = tokens[:, 1:], list[Any]()
    with torch.no_grad():
        model(tokens[:, :-1], use_cache=False)
        handle.remove()
        expected = depth(model, hidden[0], following)
    logits = stage.logits
    stage.logits = lambda normed: made.append(logits(normed)) or made[-1]
    stage(tokens[:, :-1], labels=following, following=(following,))
    of_depth, of_model = made
    note(f"depth {model_type}", "transformers' layer as published", {f"seed {seed}": rms_ratio(of_depth.detach(), expected)})
    assert not torch.equal(of_depth, of_model)
    exported = export_weights(moved.path, folder / "model" / "config.json", folder / "export").path
    stored, written = tensors_of(folder / "model"), tensors_of(exported)
    assert stored.keys() == written.keys()
    assert [name for name in stored if not torch.equal(stored[name], written[name])] == []
    loaded, info = class_of(model_type).from_pretrained(exported, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"]
    del loaded


@pytest.mark.parametrize("published", CASES[:1], indirect=True)
def test_a_copy_that_is_another_tensor_is_refused(published: tuple[str, int, Any, Depth, Path]) -> None:
    """A depth of megarun shares the model's head, and cannot hold a second one."""
    _, _, model, _, folder = published
    name = f"model.layers.{model.config.num_hidden_layers}.shared_head.head.weight"
    tensors = tensors_of(folder / "model")
    save_file({**tensors, name: tensors[name] + 1}, folder / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(MegaplanError, match=r"shared_head\.head\.weight is not lm_head\.weight"):
        import_weights(planned(folder), folder / "model", folder / "run")


@pytest.mark.parametrize("published", CASES[:1], indirect=True)
def test_another_number_of_depths_is_refused(published: tuple[str, int, Any, Depth, Path]) -> None:
    with pytest.raises(MegaplanError, match="num_nextn_predict_layers = 1 in the config"):
        import_weights(planned(published[-1], depth=2), published[-1] / "model", published[-1] / "run")


@pytest.mark.parametrize("published", CASES[:1], indirect=True)
def test_a_plan_whose_depths_read_the_residual_stream_is_refused(published: tuple[str, int, Any, Depth, Path]) -> None:
    with pytest.raises(MegaplanError, match=r"features\.mtp\.normed_input = false in the plan"):
        import_weights(planned(published[-1], normed_input=False), published[-1] / "model", published[-1] / "run")
