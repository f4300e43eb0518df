"""A newcomer's first inputs: configs of types that few have, several plans at once, and a limit on throughput."""

import json
from pathlib import Path

import pytest

import megaplan
from megaplan.cli.main import run

MIMO = {
    "model_type": "mimo", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 11008, "vocab_size": 151680, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 640000,
    "max_position_embeddings": 32768,
}  # fmt: skip
GLM = {
    "model_type": "glm_moe_dsa", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 192, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "q_lora_rank": 128, "kv_lora_rank": 64,
    "intermediate_size": 512, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "vocab_size": 1024, "index_topk": 64, "index_head_dim": 64, "index_n_heads": 2,
}  # fmt: skip
SMALL = "plans/tiny-hybrid-pp2.yaml"


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (MIMO, 7_622_619_136),  # Qwen2 with these sizes in transformers 5.24
        (GLM, 6_008_320),  # transformers 5.24, whose class replaces head_dim by qk_rope_head_dim
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_totals_of_configs(config: dict[str, object], parameters: int) -> None:
    found = megaplan.estimate(config, "batch.seq_length=1024", "device.name=b200", **{"mesh.dp_shard": 8}).to_dict()
    assert found["totals"]["parameters"] == parameters


def test_an_unknown_type_has_no_hint_by_spelling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MIMO, "model_type": "mimoo"}), encoding="utf-8")
    assert run(["estimate", str(path)]) == 2
    said = capsys.readouterr().err
    assert "error[MP802]" in said
    assert "did you mean" not in said


@pytest.fixture
def plans(tmp_path: Path) -> tuple[str, str]:
    """A plan, and one with a quarter of its batch."""
    found = (str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    for path, count in zip(found, (8, 2), strict=True):
        assert run(["split", SMALL, "--set", f"schedule.num_microbatches={count}", "-o", path]) == 0
    return found


def test_several_plans_are_checked_at_once(plans: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["check", *plans]) == 0
    said = capsys.readouterr().out
    assert all(path in said for path in plans)
    changed = Path(plans[1])
    changed.write_text(changed.read_text(encoding="utf-8").replace('"vocab_size": ', '"vocab_size": 1'), encoding="utf-8")
    assert run(["check", *plans]) != 0
    assert plans[1] in "".join(capsys.readouterr())


def test_a_shorter_step_of_a_smaller_batch_is_slower(plans: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["diff", *plans, "--fail-on", "step>+5%"]) == 1  # they differ, and the condition does not hold
    headline = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step: "))
    assert "tokens/s per device (-" in headline
    assert run(["diff", *plans, "--fail-on", "tokens<-5%"]) == 3
