"""Launches of older Megatron's hybrid models, of scripts that ask for the machine's GPUs, and of forks' optimizers and shared layers."""

import pytest
from recorded_launches import PLAIN

from megaplan.errors import MegaplanError, Severity
from megaplan.hosts.megatron.pattern import spread_pattern
from megaplan.importers.megatron.spec import import_megatron

PATTERNS = {
    (28, 0.07, 0.5): "M-M-M--M-*M-M-M-M-*M--M-M-M-",
    (4, 0, 0.5): "M-M-",
    (56, 0.08, 0.5): "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-",
    (10, 0.3, 0.0): "MM*MM*M*MM",
    (24, 0.0, 0.0): "M" * 24,
}
"""Layers and shares of attention and MLP, with the pattern that Megatron's `pattern_from_ratios` at d98e8a64 gives."""
MAMBA = PLAIN.replace("--num-layers 2 --hidden-size 64", "--num-layers 4 --hidden-size 512")


@pytest.mark.parametrize("shares", PATTERNS)
def test_a_pattern_of_shares_is_megatrons(shares: tuple[int, float, float]) -> None:
    assert spread_pattern(*shares) == PATTERNS[shares]


@pytest.mark.parametrize(
    ("program", "words", "pattern"),
    [
        ("pretrain_mamba.py", "--hybrid-attention-ratio 0 --hybrid-mlp-ratio 0.5", "MDMD"),
        ("pretrain_mamba.py", "", "MMMM"),
        ("pretrain_hybrid.py", "--hybrid-attention-ratio 0.25", "MMAM"),
        ("pretrain_mamba.py", "--hybrid-override-pattern M-M*", "MDMA"),
        ("pretrain_gpt.py", "", "ADADADAD"),
    ],
)
def test_a_program_of_hybrid_models_has_mamba_layers_without_a_pattern(program: str, words: str, pattern: str) -> None:
    model = import_megatron(f"torchrun {program} {MAMBA} {words}", "launch.sh").loaded.spec.model
    assert (model.pattern * model.num_layers)[: model.num_layers] == pattern
    assert (model.mamba is None) is ("M" not in pattern)


@pytest.mark.parametrize(
    "words", ["--hybrid-attention-ratio 0.8 --hybrid-mlp-ratio 0.5", "--hybrid-mlp-ratio 1.5", "--hybrid-mlp-ratio half"]
)
def test_shares_above_the_whole_are_refused(words: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"torchrun pretrain_mamba.py {MAMBA} {words}", "launch.sh")
    assert {found.code for found in caught.value.diagnostics if found.severity is Severity.ERROR} == {"MP916"}


@pytest.mark.parametrize(
    "asks",
    [
        "nvidia-smi -L 2>/dev/null | wc -l",
        "nvidia-smi --list-gpus | wc -l",
        "nvidia-smi --query-gpu=name --format=csv,noheader | wc -l",
    ],
)
def test_a_script_that_counts_the_machines_gpus_is_of_a_whole_node(asks: str) -> None:
    text = f"GPUS=$({asks})\ntorchrun --nproc_per_node $GPUS pretrain_gpt.py {PLAIN} --global-batch-size $((4 * GPUS))"
    loaded = import_megatron(text, "launch.sh").loaded
    assert (loaded.spec.mesh.world_size, loaded.spec.global_batch_size) == (8, 32)
    assert any("taken to be 8, one node" in found.detail for found in loaded.diagnostics)


def test_other_questions_to_nvidia_smi_are_for_a_run_alone() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(
            f"W=$(nvidia-smi --query-gpu=memory.total --format=csv)\ntorchrun pretrain_gpt.py {PLAIN} --micro-batch-size $W", "launch.sh"
        )
    assert "MP922" in {found.code for found in caught.value.diagnostics}


@pytest.mark.parametrize(
    ("word", "matrix", "sharded"), [("muon_ball_dist", "muon", True), ("normuon", "muon", False), ("fused_adamw", "adamw", False)]
)
def test_an_optimizer_of_a_fork_is_read_by_its_name_with_a_warning(word: str, matrix: str, sharded: bool) -> None:
    loaded = import_megatron(f"torchrun pretrain_gpt.py {PLAIN} --optimizer {word}", "launch.sh").loaded
    assert (loaded.spec.optimizer.matrix, loaded.spec.host.distributed_optimizer) == (matrix, sharded)
    assert any(f"--optimizer {word} of a fork" in found.detail for found in loaded.diagnostics if found.severity is Severity.WARNING)


def test_an_optimizer_of_another_name_is_refused() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"torchrun pretrain_gpt.py {PLAIN} --optimizer soap", "launch.sh")
    assert caught.value.diagnostics[0].code == "MP914"


def test_a_mode_in_which_layers_share_experts_is_refused_by_its_name() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"torchrun pretrain_gpt.py {PLAIN} --moe-expert-pool-mode hyper", "launch.sh")
    assert "unknown, and its name suggests that it decides the size of a tensor" in caught.value.diagnostics[0].detail
    import_megatron(f"torchrun pretrain_gpt.py {PLAIN} --share-mode none", "launch.sh")


def test_a_comment_about_another_front_end_does_not_make_a_launch_its() -> None:
    text = f"#!/bin/bash\n# as nemo_run writes it: ~/.nemo_run/experiments\nMS=mindspeed\ntorchrun pretrain_gpt.py {PLAIN}"
    assert import_megatron(text, "launch.sh").loaded.spec.model.num_layers == 4


@pytest.mark.parametrize("columns", [29, 48])
def test_rows_of_long_names_have_no_dots(columns: int) -> None:
    rows = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "max_position_embeddings": 128, "fp16": True,
        "model_parallel_size": 2, "checkpoint_activations": True, "batch_size": 4, "vocab_size": 256, "world_size": 2,
        "distribute_checkpointed_activations": True, "accumulate_allreduce_grads_in_fp32": True,
    }  # fmt: skip
    table = "".join(f"  {name} {'.' * (columns - len(name))} {value}\n" for name, value in rows.items())
    spec = import_megatron(f"---- arguments ----\n{table}---- end of arguments ----\n", "log.txt").loaded.spec
    assert (spec.mesh.tp, spec.host.distribute_saved_activations, spec.precision.grads) == (2, True, "fp32")


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("--DDP-impl local", ("local", "unfused")),
        ("--data-impl mmap --use-flash-attn", ("local", "flash")),
        ("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 1", ("local", "unfused")),
        ("--tokenizer-type PretrainedFromHF --vocab-size 256", ("local", "unfused")),
        ("--tokenizer-type PretrainedFromHF --vocab-size 256 --use-mcore-models", ("transformer_engine", "auto")),
        ("--data-impl mmap --transformer-impl transformer_engine", ("transformer_engine", "auto")),
        ("", ("transformer_engine", "auto")),
    ],
)
def test_arguments_of_releases_before_megatron_core_have_its_own_modules(words: str, read: tuple[str, str]) -> None:
    host = import_megatron(f"torchrun --nproc_per_node 1 pretrain_gpt.py {PLAIN} --bf16 {words}", "launch.sh").loaded.spec.host
    assert (host.transformer_impl, host.attention_backend) == read


def test_arguments_pasted_with_their_fences_are_read() -> None:
    words = f"{PLAIN} --vocab-size 256"
    assert import_megatron(f"```shell\n{words}\n```\n", "x.txt").loaded.spec == import_megatron(words, "x.txt").loaded.spec
