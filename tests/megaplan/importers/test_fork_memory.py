"""Arguments of forks that change what is counted: each is planned, refused, or named; none is passed over."""

import pytest
from recorded_launches import PLAIN

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.megatron.spec import import_megatron
from megaplan.importers.structure import Policy
from megaplan.inventory.build import build_inventory

RUN = f"torchrun --nproc_per_node 1 pretrain_gpt.py {PLAIN}"
FRONT = f"torchrun --nproc_per_node 1 pretrain_vlm.py {PLAIN} --vocab-size 256"


@pytest.mark.parametrize(("words", "length"), [("--decoder-seq-length 96", 96), ("--dataloader-seq-length 64", 64), ("", 128)])
def test_sequences_of_a_decoder_behind_encoders_are_its_own(words: str, length: int) -> None:
    assert import_megatron(f"{FRONT} {words}", "x.sh").loaded.spec.batch.seq_length == length
    plain = f"{RUN} --vocab-size 256 {words}"
    assert import_megatron(plain, "x.sh").loaded.spec.batch.seq_length == 128  # without encoders the argument has no effect


@pytest.mark.parametrize("switch", ["freeze-LM", "freeze-llm", "freeze-all-layers"])
def test_a_frozen_decoder_is_refused_and_can_be_planned_as_trained(switch: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"{FRONT} --{switch}", "x.sh")
    found = caught.value.diagnostics[0]
    assert (found.code, found.hints[0].split("   ")[0]) == ("MP914", f"--ignore {switch}")
    ignored = Policy(ignored=frozenset({switch.replace("-", "_")}))
    assert import_megatron(f"{FRONT} --{switch}", "x.sh", policy=ignored).loaded.spec.model.num_layers == 4
    assert import_megatron(f"{FRONT} --freeze-ViT", "x.sh").loaded.spec.model.num_layers == 4


def test_a_model_that_a_config_makes_is_refused_whatever_its_sizes() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"{FRONT} --use-bridge --bridge-hf-model org/model --micro-batch-size 2", "x.sh")
    (found,) = caught.value.diagnostics
    assert (found.code, "--bridge-hf-model" in found.detail) == ("MP926", True)
    assert found.hints[0].startswith("megaplan estimate org/model --gpus")
    assert "batch.micro_batch_size=2" in found.hints[0]


NEEDED = "--vocab-size 256 --make-vocab-size-divisible-by 1"
STAGES = "--pipeline-model-parallel-size 2 --pp-partition-method 'type:transformer|embedding'"


@pytest.mark.parametrize(
    ("words", "said"), [("", "128 parameters"), ("--pipeline-model-parallel-size 2", "128 parameters on the first stage and on the last")]
)
def test_parameters_of_a_norm_of_embeddings_are_named(words: str, said: str) -> None:
    found = import_megatron(f"{RUN.replace('node 1', 'node 2')} {NEEDED} {words} --embed-layernorm", "x.sh").loaded
    assert [each.severity for each in found.diagnostics if each.detail.endswith(said)] == [Severity.WARNING]
    assert build_inventory(found.spec).parameters == build_inventory(import_megatron(f"{RUN} {NEEDED}", "x.sh").loaded.spec).parameters


@pytest.mark.parametrize(("tied", "sizes"), [("", [2, 2]), ("--untie-embeddings-and-output-weights", [2, 3])])
def test_stages_of_deepspeed_count_embeddings(tied: str, sizes: list[int]) -> None:
    layers = sum(sizes)
    text = RUN.replace("--num-layers 2", f"--num-layers {layers}").replace("node 1", "node 2")
    spec = import_megatron(f"{text} {NEEDED} {STAGES} {tied}", "x.sh").loaded.spec
    assert [stage.count("A") for stage in spec.model.pattern.split("|")] == sizes


def test_sequence_parallelism_of_deepspeed_divides_the_sequence() -> None:
    text = f"{RUN.replace('node 1', 'node 4')} {NEEDED} --deepspeed --ds-sequence-parallel-size 4"
    mesh = import_megatron(text, "x.sh").loaded.spec.mesh
    assert (mesh.cp, mesh.dp_shard) == (4, 1)


def test_biases_of_forks_are_not_passed_over() -> None:
    with pytest.raises(MegaplanError, match="--add-dense-bias"):
        import_megatron(f"{RUN} {NEEDED} --add-dense-bias", "x.sh")
    assert import_megatron(f"{RUN} {NEEDED} --no-add-dense-bias", "x.sh").loaded.spec.model.num_layers == 4


@pytest.mark.parametrize("words", ["--use-lf-gate", "--lf-conv2d-group 1"])
def test_gates_and_convolutions_of_forks_are_not_passed_over(words: str) -> None:
    with pytest.raises(MegaplanError, match="decides the size of a tensor"):
        import_megatron(f"{RUN} {NEEDED} {words}", "x.sh")


def test_experts_of_megablocks_are_over_all_data_ranks() -> None:
    words = "--moe-num-experts=16 --moe-capacity-factor=1 --moe-loss-weight=0.1 --moe-top-k=1 --moe-expert-model-parallelism"
    text = f"{RUN.replace('node 1', 'node 8')} {NEEDED} {words}"
    spec = import_megatron(text, "x.sh").loaded.spec
    assert spec.model.moe is not None
    assert (spec.mesh.ep, spec.model.moe.num_experts, spec.model.moe.top_k, spec.model.moe.capacity_factor) == (8, 16, 1, 1.0)
    assert spec.model.moe.balance_loss_coefficient == 0.1


def test_a_norm_by_the_name_of_a_fork_is_read() -> None:
    assert import_megatron(f"{RUN} {NEEDED} --norm-dtype RMSNorm", "x.sh").loaded.spec.model.norm == "rmsnorm"


@pytest.mark.parametrize(
    ("words", "severity"),
    [
        ("--own-activation-offload", Severity.WARNING),
        ("--prefetch-layers 2", Severity.WARNING),
        ("--outer-optimizer nesterov", Severity.WARNING),
        ("--use-ema", Severity.WARNING),
        ("--adaptive-recompute-device-size -1", Severity.NOTE),
        ("--rollout-offload", Severity.NOTE),
        ("--own-switch", Severity.NOTE),
    ],
)
def test_an_unknown_name_of_memory_is_a_warning(words: str, severity: Severity) -> None:
    found = import_megatron(f"{RUN} {NEEDED} {words}", "x.sh").loaded.diagnostics
    assert [each.severity for each in found if each.code == "MP913"] == [severity]


@pytest.mark.parametrize("switch", ["--reuse-fp32-param", "--swap-optimizer", "--swap-attention", "--o2-optimizer", "--moe-fb-overlap"])
def test_switches_of_forks_that_change_memory_are_warned_of(switch: str) -> None:
    found = import_megatron(f"{RUN} {NEEDED} {switch}", "x.sh").loaded.diagnostics
    assert [each.severity for each in found if each.detail.startswith(f"{switch}: ")] == [Severity.WARNING]


def test_conditions_on_arguments_that_are_not_read_decide_nothing() -> None:
    text = f"if [ -f /lib/provider.so ]; then MORE='--volume /lib'; fi\n{RUN} {NEEDED} $MORE\n"
    found = import_megatron(text, "x.sh").loaded
    assert any("it decides --volume" in each.detail for each in found.diagnostics)
    with pytest.raises(MegaplanError, match="MP922"):
        import_megatron(text.replace("--volume /lib", "--num-layers 8"), "x.sh")


@pytest.mark.parametrize("place", ["<path to data>", "<path/to/data>", "<DATA>"])
def test_places_of_a_template_are_variables(place: str) -> None:
    text = f"srun --container-image {place} \\\n  bash -c 'x'\n{RUN} {NEEDED} --data-path {place}\n"
    assert import_megatron(text, "x.sh").loaded.spec.model.num_layers == 4


def test_the_command_of_a_front_end_with_adapters_has_them() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron("megatron sft --model a/b --tuner_type lora --lora_alpha 32", "x.sh")
    assert caught.value.diagnostics[0].hints[0].endswith("--set lora.rank=8 --set lora.alpha=32")


@pytest.mark.parametrize(
    ("switch", "ignored"),
    [
        ("--schedules-method dualpipev", "schedules-method"),
        ("--schedule-method ripipe", "schedule-method"),
        ("--use-dualpipev", "use-dualpipev"),
        ("--enable-zero-bubble", "enable-zero-bubble"),
        ("--enable-zbh1-pipeline", "enable-zbh1-pipeline"),
        ("--patch-primus-pipeline --pp-algorithm zbv-formatted", "pp-algorithm"),
        ("--patch-zero-bubble --enable-zero-bubble", "enable-zero-bubble"),
    ],
)
def test_a_schedule_of_a_fork_is_refused_where_there_are_stages(switch: str, ignored: str) -> None:
    staged = f"{RUN.replace('node 1', 'node 2')} {NEEDED} --pipeline-model-parallel-size 2"
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"{staged} {switch}", "x.sh")
    (found,) = caught.value.diagnostics
    assert (found.code, found.hints[0].split("   ")[0]) == ("MP914", f"--ignore {ignored}")
    left_out = Policy(ignored=frozenset({ignored.replace("-", "_")}))
    plain = import_megatron(staged, "x.sh").loaded.spec
    assert import_megatron(f"{staged} {switch}", "x.sh", policy=left_out).loaded.spec == plain
    assert import_megatron(f"{RUN} {NEEDED} {switch}", "x.sh").loaded.spec.mesh.pp == 1


@pytest.mark.parametrize(
    "switch",
    [
        "--schedules-method vanilla",
        "--pp-algorithm zbv-formatted",
        "--enable-zero-bubble --no-patch --patch-zero-bubble=False",
        "--patch-primus-pipeline --pp-algorithm 1f1b-interleaved",
    ],
)
def test_a_schedule_that_is_not_another_is_planned(switch: str) -> None:
    staged = f"{RUN.replace('node 1', 'node 2')} {NEEDED} --pipeline-model-parallel-size 2 {switch}"
    assert import_megatron(staged, "x.sh").loaded.spec.schedule.kind == "1f1b"


def test_meshes_of_several_devices_are_refused_with_one_rank_too() -> None:
    with pytest.raises(MegaplanError, match="--enable-hetero"):
        import_megatron(f"{RUN} {NEEDED} --enable-hetero", "x.sh")


@pytest.mark.parametrize(("word", "fewer"), [("adamw-bnb-8bit", True), ("adam_4bit", True), ("my-adam", False), ("adam64", False)])
def test_an_optimizer_with_narrow_state_says_so(word: str, fewer: bool) -> None:
    found = import_megatron(f"{RUN} {NEEDED} --optimizer {word}", "x.sh").loaded.diagnostics
    (said,) = [each.detail for each in found if each.detail.startswith(f"--optimizer {word}")]
    assert ("fewer bits" in said) is fewer
