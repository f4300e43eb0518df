"""Published recipes: each becomes a spec and a verdict, and the page of the documentation is of the rows last judged."""

import json
from typing import Any

import pytest
from bridge_recipes.document import TABLE, bridge_document
from bridge_recipes.page import PAGE, RESULT, text
from bridge_recipes.rows import Row, estimate_of, judge, result

NAME = "llama3_8b_pretrain_8gpu_h100_{}_config"
RECIPE: dict[str, Any] = {
    "_module": "megatron.bridge.perf_recipes.llama.h100.llama3",
    "model.context_parallel_size": 2,
    "model.seq_length": 8192,
    "model.cross_entropy_loss_fusion": True,
    "model.cross_entropy_fusion_impl": "te",
    "train.micro_batch_size": 1,
    "train.global_batch_size": 128,
    "optimizer.optimizer": "adam",
    "optimizer.exp_avg_dtype": "torch.float32",
    "optimizer.use_distributed_optimizer": True,
    "mixed_precision.grad_reduce_in_fp32": False,
    "env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}


def rows() -> list[Row]:
    return [Row(**row) for row in json.loads(RESULT.read_text(encoding="utf-8"))]


def test_the_page_is_of_the_rows_last_judged() -> None:
    assert PAGE.read_text(encoding="utf-8") == text(rows())


def test_the_bars_hold() -> None:
    found = result(rows())
    judged = found["fit"] + len(found["not_fit"])
    assert found["fit"] >= 0.98 * judged
    assert set(found["not_fit"][0]) == {"recipe", "peak", "usable", "reason", "narrow"}


def test_a_recipe_takes_its_architecture_from_its_name() -> None:
    found = judge(NAME.format("bf16"), RECIPE)
    assert found.verdict == "fit"
    model = estimate_of(NAME.format("bf16"), RECIPE)
    assert model.parameters == 8_030_261_248
    assert model.job.spec.host.expandable_segments is True


def test_what_a_recipe_states_of_its_model_stands() -> None:
    stated = bridge_document(NAME.format("bf16"), {**RECIPE, "model.num_layers": 4})
    assert (stated["model"]["num_layers"], stated["model"]["hidden_size"]) == (4, 4096)


@pytest.mark.parametrize(
    ("suffix", "recipe"), [("fp8cs", "fp8_current"), ("fp8ds", "fp8_delayed"), ("fp8sc", "fp8_blockwise"), ("bf16", None)]
)
def test_the_end_of_a_name_is_its_precision(suffix: str, recipe: str | None) -> None:
    changed = {**RECIPE, **({"mixed_precision.first_last_layers_bf16": False} if suffix == "fp8cs" else {})}
    found = estimate_of(NAME.format(suffix), changed).job.spec.precision.recipe
    assert (None if found is None else found.name) == recipe


def test_low_precision_is_less_than_sixteen_bits_and_far_from_half() -> None:
    wide, narrow = (judge(NAME.format(suffix), RECIPE).peak for suffix in ("bf16", "fp8cs"))
    assert wide is not None
    assert narrow is not None
    assert 0.85 * wide < narrow < wide


@pytest.mark.parametrize(
    ("name", "changes", "verdict", "reason"),
    [
        (NAME.format("bf16"), {"train.micro_batch_size": 8}, "not_fit", "activations"),
        ("gpt5_1t_pretrain_8gpu_h100_bf16_config", {}, "not_expressed", "the architecture of gpt5_1t is neither in the recipe nor"),
        ("llama3_8b", {}, "not_expressed", "the name is not MODEL_TASK_Ngpu_DEVICE_PRECISION"),
        (NAME.format("fp8mx"), {}, "not_expressed", "MP507 "),
        (NAME.format("bf16"), {"model.tensor_model_parallel_size": 3}, "invalid", "MP914 --world-size 8: 8 GPUs, and tp"),
        (NAME.format("bf16"), {"train.global_batch_size": 127}, "fit", "activations"),  # it runs, with a batch that is rounded
    ],
)
def test_others_are_counted_with_their_reason(name: str, changes: dict[str, Any], verdict: str, reason: str) -> None:
    found = judge(name, {**RECIPE, **changes})
    assert (found.verdict, found.reason[: len(reason)]) == (verdict, reason)


def test_every_base_of_the_table_is_used() -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert {base for model in table["models"].values() for base in model["base"]} == set(table["bases"])
