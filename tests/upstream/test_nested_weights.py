"""Weights of the text model inside a model of several parts: read from its folder, and written as the text model alone."""

import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from test_logits import LENGTH, class_of, parameters_of_a_trained_model, stage_of  # noqa: E402
from upstream_checks import note, rms_ratio, use_plain_torch  # noqa: E402

from megarun.huggingface.convert import export_weights  # noqa: E402

HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 120}
GEMMA = {
    "text_config": {**HEADS, "num_hidden_layers": 3, "intermediate_size": 40, "sliding_window": 16, "pad_token_id": 0},
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    },
    "mm_tokens_per_image": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
QWEN = {
    "text_config": {**HEADS, **EXPERTS, **DELTA, "num_hidden_layers": 4},
    "vision_config": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 8,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [],
    },
    "image_token_id": 115, "video_token_id": 116, "vision_start_token_id": 117, "vision_end_token_id": 118,
}  # fmt: skip
CASES = {"Gemma3": ("gemma3_text", GEMMA), "Qwen3_5Moe": ("qwen3_5_moe_text", QWEN)}


@pytest.mark.parametrize("name", CASES)
def test_the_text_model_of_several_parts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of tokens are those of the whole model, and what is exported loads as a language model."""
    family, fields = CASES[name]
    own: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    torch.manual_seed(0)
    model = own._from_config(
        own.config_class(**fields), attn_implementation="eager", experts_implementation="eager"
    ).eval().float()  # fmt: skip
    use_plain_torch(model, monkeypatch)
    parameters_of_a_trained_model(model)
    model.save_pretrained(tmp_path / "model")
    checkpoint, stage, _ = stage_of(tmp_path)
    tokens = torch.randint(8, 100, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        note(f"logits {family}, nested", f"transformers {type(model).__name__}", {"tokens": rms_ratio(stage(tokens), expected)})
    exported = export_weights(checkpoint, tmp_path / "model" / "config.json", tmp_path / "export").path
    assert json.loads((exported / "config.json").read_text())["model_type"] == family
    loaded = class_of(family).from_pretrained(exported, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        note(f"logits {family}, exported", "the whole model", {"tokens": rms_ratio(loaded(tokens, use_cache=False).logits, expected)})
