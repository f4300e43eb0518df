"""Launches of forks: tokenizers that are here or only named, programs that train no decoder, and encoders in front of one."""

import json
from pathlib import Path

import pytest
from recorded_launches import PLAIN

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.megatron.spec import import_megatron
from megaplan.importers.megatron.tokenizer_files import counted_tokens
from megaplan.inventory.build import build_inventory

RUN = f"torchrun --nproc_per_node 1 pretrain_gpt.py {PLAIN} --make-vocab-size-divisible-by 1"
HUB = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"


def vocabulary(words: str, name: str = "launch.sh") -> int:
    return import_megatron(f"{RUN} {words}", name).loaded.spec.model.vocab_size


def warned(text: str, name: str = "launch.sh") -> list[str]:
    return [found.detail for found in import_megatron(text, name).loaded.diagnostics if found.severity is Severity.WARNING]


def piece(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2, len(data)]) + data


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("codellama/CodeLlama-7b-hf", 32_016),  # not of Llama-2, whose name it has a part of
        ("mistralai/Mistral-7B-v0.3", 32_768),
        ("mistralai/Mixtral-8x22B-v0.1", 32_000),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", 32_768),
        ("pile/20B_tokenizer.json", 50_277),
        ("HuggingFaceTB/SmolLM3-3B", 128_256),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 128_256),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 151_665),
        ("Qwen/Qwen-7B", 151_851),
        ("Qwen/Qwen3.5-35B-A3B", 248_077),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 151_669),
        ("tokyotech-llm/Llama-3.1-Swallow-8B-v0.1", 128_256),
        ("tokyotech-llm/Swallow-7b-hf", 43_176),
        ("mt_nlg_plus_multilingual_ja_zh_the_stack_frac_015_256k.model", 256_000),
        ("meta-llama/Llama-4-Scout-17B-16E", 201_135),
        ("allenai/OLMo-7B-hf", 50_280),
        ("allenai/OLMo-2-1124-7B", 100_278),
        ("deepseek-ai/deepseek-llm-7b-base", 100_015),
        ("cl100k_base", 100_277),
    ],
)
def test_tokens_of_public_tokenizers(name: str, tokens: int) -> None:
    assert vocabulary(f"{HUB} {name}") == tokens


@pytest.mark.parametrize("name", ["rinna/japanese-gpt-neox-small", "org/dolphin-2", "microsoft/Phi-4-mini-instruct", "google/gemma-3n-E4B"])
def test_names_that_only_resemble_public_tokenizers_are_asked_for(name: str) -> None:
    with pytest.raises(MegaplanError, match="MP916"):
        vocabulary(f"{HUB} {name}")


@pytest.mark.parametrize(
    ("words", "name", "tokens"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model org/qwen3-8b", "launch.sh", 151_669),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER", "jobs/train_qwen3_8B.sh", 151_669),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER", "jobs/train_qwen25_7B.sh", 151_665),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER", "jobs/qwen2/run.sh", 151_646),
        ("--tokenizer-type HuggingFaceTokenizer", "conf/Nemotron-H-8B.sh", 131_072),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $HOME/gemma-3-4b", "launch.sh", 262_145),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model $TOKENIZER", "launch.sh", 32_000),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model $MODELS/tokenizer.model", "launch.sh", 32_000),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model $MODELS/own_50176.model", "launch.sh", 50_176),
        ("--tokenizer-type TikTokenizer --tokenizer-model $TOKENIZER", "launch.sh", 131_072),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model EleutherAI/pythia-12b", "launch.sh", 50_277),
        ("--tokenizer-type TokenizerFromFile --tokenizer-file $DATA/starcoder/tokenizer.json", "launch.sh", 49_152),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model mistralai/Mistral-Nemo-Base-2407", "launch.sh", 131_072),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model facebook/opt-1.3b", "launch.sh", 50_265),
    ],
)
def test_tokens_of_a_tokenizer_by_its_name_or_the_scripts(words: str, name: str, tokens: int) -> None:
    assert vocabulary(words, name) == tokens


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model org/own", "train_qwen3_8B.sh"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /models/own.model", "train_llama2.sh"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model $MODELS/own_v4.model", "launch.sh"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER", "train_hunyuan_8B.sh"),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model $2", "launch.sh"),
    ],
)
def test_a_tokenizer_that_is_named_and_unknown_is_asked_for(words: str, name: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        vocabulary(words, name)
    found = caught.value.diagnostics[0]
    assert (found.code, found.hints[0]) == ("MP916", "--set model.vocab_size=…")


def test_a_guessed_vocabulary_is_a_warning() -> None:
    said = warned(f"{RUN} --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER", "jobs/train_qwen3_8B.sh")
    assert "HuggingFaceTokenizer $TOKENIZER is not known: 151,669 tokens, by the name jobs/train_qwen3_8B.sh" in said
    assert not any("tokens" in each for each in warned(f"{RUN} --tokenizer-type HuggingFaceTokenizer --tokenizer-model org/qwen3-8b"))


def test_tokenizers_that_are_here_are_counted(tmp_path: Path) -> None:
    fast = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>"}, {"id": 1, "content": "b"}]}
    configured = {"tokenizer_class": "X", "added_tokens_decoder": {"2": {"content": "<s>"}, "3": {"content": "</s>"}}}
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast/tokenizer.json").write_text(json.dumps(fast), encoding="utf-8")
    assert counted_tokens("fast", str(tmp_path / "launch.sh")) == 3
    (tmp_path / "fast/tokenizer_config.json").write_text(json.dumps(configured), encoding="utf-8")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}), encoding="utf-8")
    pieces = b"".join(piece(1, f"p{number}".encode()) for number in range(5))
    (tmp_path / "spm.model").write_bytes(pieces + piece(2, b"trainer") + bytes([3 << 3, 150, 1]))
    (tmp_path / "text.model").write_bytes(b"YQ== 0\nYg== 1\n")
    script = str(tmp_path / "launch.sh")
    assert vocabulary("--tokenizer-type HuggingFaceTokenizer --tokenizer-model ./fast", script) == 4
    assert vocabulary("--vocab-file vocab.json", script) == 2
    assert vocabulary("--tokenizer-type Llama2Tokenizer --tokenizer-model spm.model", script) == 5
    assert counted_tokens("text.model", script) is None
    assert counted_tokens("absent", script) is None


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("pretrain_bert.py", "BERT"),
        ("pretrain_t5.py", "T5"),
        ("tools/retro/main.py", "RETRO"),
        ("tasks/main.py", "a task of evaluation"),
        ("tools/run_text_generation_server.py", "inference"),
        ("tools/checkpoint/convert.py", "the conversion of a checkpoint"),
    ],
)
def test_programs_that_train_no_decoder(program: str, what: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"torchrun {program} {PLAIN}", "run.sh")
    (found,) = caught.value.diagnostics
    assert (found.code, f", {what}, but" in found.detail) == ("MP926", True)


@pytest.mark.parametrize(("program", "counts"), [("pretrain_vlm.py", 1), ("examples/multimodal/train.py", 1), ("pretrain_gpt.py", 0)])
def test_encoders_that_are_not_counted_are_named(program: str, counts: int) -> None:
    assert sum("builds encoders in front of the decoder" in each for each in warned(f"torchrun {program} {PLAIN}")) == counts


def test_heads_and_norms_by_their_earlier_names() -> None:
    """One key head takes h·d of each of keys and values, and a norm of each has d weights and biases."""

    def total(words: str) -> int:
        return build_inventory(import_megatron(f"{RUN} {words}", "launch.sh").loaded.spec).parameters

    spec = import_megatron(RUN, "launch.sh").loaded.spec
    attention, layers = spec.model.attention, spec.model.num_layers // 2
    hidden, width, heads = spec.model.hidden_size, attention.head_dim, attention.num_heads
    assert total("--attention-head-type multihead") == total("")
    removed = 2 * (heads - 1) * width
    assert total("") - total("--attention-head-type multiquery") == layers * removed * (hidden + attention.bias)
    plain = "--normalization RMSNorm"
    assert total(f"{plain} --use-qk-norm") - total(plain) == layers * 2 * width
    assert total("--softmax-type off-by-one") == total("")


def test_a_count_that_the_cluster_sets_is_that_of_whole_nodes_until_stated() -> None:
    script = f"""
    WORLD=$OMPI_COMM_WORLD_SIZE
    python pretrain_gpt.py {PLAIN} --tensor-model-parallel-size 2 --world-size $WORLD --global-batch-size $((WORLD * 4))
    """
    imported = import_megatron(script, "launch.sh")
    assert (imported.loaded.spec.mesh.world_size, imported.loaded.spec.global_batch_size) == (8, 32)
    assert any("OMPI_COMM_WORLD_SIZE; it is read as 8" in found.detail for found in imported.loaded.diagnostics)
    stated = import_megatron(script, "launch.sh", environment={"OMPI_COMM_WORLD_SIZE": "16"}).loaded.spec
    assert (stated.mesh.world_size, stated.global_batch_size) == (16, 64)


def test_a_job_that_queues_itself_again_is_read_once(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"sbatch --dependency=singleton $0 --resume\n{RUN}\n")
    assert import_megatron(script.read_text(), str(script)).loaded.spec.model == import_megatron(RUN, "launch.sh").loaded.spec.model


def test_a_pipeline_may_have_fewer_microbatches_than_stages() -> None:
    words = "--pipeline-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 16"
    spec = import_megatron(f"torchrun --nproc_per_node 8 pretrain_gpt.py {PLAIN} {words}", "launch.sh").loaded.spec
    assert (spec.schedule.num_microbatches, spec.mesh.pp) == (1, 2)


def test_positions_need_not_divide_over_tensor_ranks_without_sequence_parallelism() -> None:
    words = PLAIN.replace("--seq-length 128", "--seq-length 127")
    launch = f"torchrun --nproc_per_node 8 pretrain_gpt.py {words} --tensor-model-parallel-size 2"
    assert import_megatron(launch, "launch.sh").loaded.spec.batch.seq_length == 127
    with pytest.raises(MegaplanError, match="MP202"):
        import_megatron(f"{launch} --sequence-parallel", "launch.sh")


def test_places_that_a_template_leaves_are_no_redirections() -> None:
    words = PLAIN.replace("--bf16", "--vocab-file <PATH TO gpt-vocab.json> --tensorboard-dir <DIRECTORY>  --fp16")
    script = f'options=" {words} "\nsrun --output=log sh -c "python pretrain_gpt.py ${{options}}"\n'
    assert import_megatron(script, "launch.sh").loaded.spec.precision.params == "fp16"
    with pytest.raises(MegaplanError, match="--env NUMBER_OF_HEADS"):
        import_megatron(script.replace("--num-attention-heads 4", "--num-attention-heads <NUMBER OF HEADS>"), "launch.sh")


@pytest.mark.parametrize(
    ("words", "name", "rows"),
    [
        ("--patch-tokenizer-type LLama3Tokenizer --extra-vocab-size 256", "launch.sh", 128_256),
        ("--patch-tokenizer-type LLamaTokenizer --extra-vocab-size 0 --load /ckpts/Llama-2-7b", "launch.sh", 32_000),
        ("--patch-tokenizer-type LLamaTokenizer --extra-vocab-size 293", "qwen1_5/run.sh", 151_936),
        ("--patch-tokenizer-type Qwen2Tokenizer --extra-vocab-size 421", "launch.sh", 152_064),
        ("--patch-tokenizer-type DeepSeekV2Tokenizer --extra-vocab-size 2400", "deepseek_v2/run.sh", 102_400),
        ("--patch-tokenizer-type DeepSeekV2Tokenizer --extra-vocab-size 467 --load /ckpts/DeepSeek-V3/mcore", "launch.sh", 129_280),
    ],
)
def test_rows_that_a_fork_adds_to_a_tokenizers_words(words: str, name: str, rows: int) -> None:
    """The sum is the published vocabulary; Megatron's padding, here to 512 rows, does not apply to it."""
    text = f"torchrun --nproc_per_node 4 pretrain_gpt.py {PLAIN} --tensor-model-parallel-size 4 --sequence-parallel {words}"
    assert import_megatron(text, name).loaded.spec.model.vocab_size == rows


def test_a_fork_whose_tokenizer_is_not_known_is_asked_for_its_vocabulary() -> None:
    for words in (
        "--patch-tokenizer-type JiebaBPETokenizer --extra-vocab-size 8",
        "--patch-tokenizer-type Qwen2Tokenizer --extra-vocab-size X",
    ):
        with pytest.raises(MegaplanError) as caught:
            import_megatron(f"{RUN} {words}", "launch.sh")
        assert [found.code for found in caught.value.diagnostics if found.severity is Severity.ERROR] == ["MP916"]


def test_arguments_of_images_say_that_encoders_are_not_counted() -> None:
    text = RUN.replace("pretrain_gpt.py", "pretrain_qwen.py")
    assert warned(f"{text} --vocab-size 512") == []
    (said,) = warned(f"{text} --vocab-size 512 --patch-size 14")
    assert said.startswith("pretrain_qwen.py builds encoders in front of the decoder")


def test_widths_of_latent_attention_have_other_names_in_forks() -> None:
    latent = f"{RUN} --vocab-size 512 --multi-latent-attention --kv-lora-rank 16 --v-head-dim 16"
    theirs = import_megatron(f"{latent} --qk-nope-head-dim 16 --qk-rope-head-dim 8", "launch.sh").loaded.spec
    ours = f"{latent} --qk-head-dim 16 --qk-pos-emb-head-dim 8"
    assert theirs == import_megatron(ours, "launch.sh").loaded.spec
    switched = ours.replace("--multi-latent", "--multi-head-latent")
    assert theirs == import_megatron(switched, "launch.sh").loaded.spec
    biased = import_megatron(f"{ours} --disable-bias-linear --add-qkv-bias", "launch.sh").loaded
    assert biased.spec == import_megatron(f"{ours} --disable-bias-linear", "launch.sh").loaded.spec
    assert any(each.detail.startswith("--add-qkv-bias has no effect") for each in biased.diagnostics)


def test_a_file_that_is_not_here_is_guessed_by_the_script_then_by_the_type() -> None:
    named = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model data/tokenizer"
    assert vocabulary(named, "jobs/train_qwen3_8B.sh") == 151_669
    (said,) = warned(f"{RUN} --tokenizer-type Llama2Tokenizer --tokenizer-model data/tokenizer.model")
    assert "is not known: 32,000 tokens, as its type has as a rule" in said
    with pytest.raises(MegaplanError):
        vocabulary(named, "launch.sh")


def test_a_launch_that_only_blackwell_runs_has_its_device() -> None:
    low = f"{RUN} --vocab-size 512 --fp8-format e4m3 --fp8-recipe mxfp8"
    found = import_megatron(low, "launch.sh")
    assert found.loaded.spec.device.name == "b200"
    assert any("b200 until --set device.name" in each.detail for each in found.loaded.diagnostics)
    assert import_megatron(low, "launch.sh", ["device.name=gb200"]).loaded.spec.device.name == "gb200"
    assert import_megatron(f"{RUN} --vocab-size 512", "launch.sh").loaded.spec.device.name == "h200"


def test_arguments_of_deepspeeds_fork() -> None:
    run = f"{RUN} --vocab-size 512"
    own = "--transformer-impl local --no-gradient-accumulation-fusion"
    plain = import_megatron(f"{run} {own} --use-distributed-optimizer", "launch.sh").loaded.spec
    assert import_megatron(f"{run} --deepspeed --zero-stage 1", "launch.sh").loaded.spec == plain
    assert "whose buffers are not DeepSpeed's" in warned(f"{run} --deepspeed --zero-stage 1")[-1]
    assert import_megatron(f"{run} --deepspeed --zero-stage 2", "launch.sh").loaded.spec == plain
    with pytest.raises(MegaplanError):
        import_megatron(f"{run} --deepspeed --zero-stage 4", "launch.sh")
    dense = import_megatron(f"{run} {own}", "launch.sh").loaded.spec
    assert import_megatron(f"{run} --deepspeed --no-pipeline-parallel --num-experts 1", "launch.sh").loaded.spec == dense
    assert (
        import_megatron(f"{run} --glu-activation swiglu", "launch.sh").loaded.spec
        == import_megatron(f"{run} --swiglu", "launch.sh").loaded.spec
    )
    rotary = import_megatron(f"{run} --position-embedding-type rotary", "launch.sh").loaded.spec
    assert rotary == import_megatron(f"{run} --position-embedding-type rope", "launch.sh").loaded.spec
    none = import_megatron(f"{run} --position-embedding-type none", "launch.sh").loaded.spec
    assert import_megatron(f"{run} --position-embedding-type alibi", "launch.sh").loaded.spec == none
    assert warned(f"{run} --position-embedding-type alibi")[-1].startswith("ALiBi has no parameters")


def test_experts_of_deepspeeds_fork_are_in_every_second_layer() -> None:
    run = f"{RUN} --vocab-size 512 --deepspeed --num-experts 4"
    assert [layer for layer, letter in enumerate(layers_of(run)) if letter == "E"] == [1]
    assert [layer for layer, letter in enumerate(layers_of(f"{run} --expert-interval 1")) if letter == "E"] == [0, 1]
    spec = import_megatron(f"{run} --moe-expert-parallel-size 1 --topk 2", "launch.sh").loaded.spec
    assert (spec.model.moe.num_experts, spec.model.moe.top_k) == (4, 2)
    assert import_megatron(f"{run} --moe-loss-coeff 0.01", "launch.sh").loaded.spec.model.moe.balance_loss_coefficient == 0.01
    assert import_megatron(run, "launch.sh").loaded.spec.model.moe.top_k == 1
    with pytest.raises(MegaplanError):
        import_megatron(f"{run} --mlp-type residual", "launch.sh")


def test_words_and_marks_of_forks_are_planned_as_the_ones_they_contain() -> None:
    run = f"{RUN} --vocab-size 512 --num-experts 4"
    found = import_megatron(f"{run} --moe-token-dispatcher-type lshalltoall", "launch.sh").loaded.spec
    assert found == import_megatron(f"{run} --moe-token-dispatcher-type alltoall", "launch.sh").loaded.spec
    (said,) = [each for each in warned(f"{run} --moe-token-dispatcher-type lshalltoall") if "fork" in each]
    assert said == "--moe-token-dispatcher-type lshalltoall is a fork's, and is planned as alltoall"
    hybrid = (
        RUN.replace("pretrain_gpt.py", "pretrain_hybrid.py").replace("--num-layers 2", "--hybrid-layer-pattern {}") + " --vocab-size 512"
    )
    plain, grouped = (import_megatron(hybrid.format(pattern), "launch.sh").loaded.spec for pattern in ("**--", "[**][--]"))
    assert plain == grouped


def test_names_that_stand_for_a_file_are_guessed() -> None:
    (said,) = warned(f"{RUN} --vocab-file /PATH/TO/VOCAB")
    assert "is not known: 50,257 tokens, as its type has as a rule" in said
    assert vocabulary("--tokenizer-type HuggingFaceTokenizer --tokenizer-model '<your tokenizer>'", "jobs/train_qwen3_8B.sh") == 151_669


def layers_of(text: str) -> str:
    """The letter of the second half of each layer."""
    model = import_megatron(text, "launch.sh").loaded.spec.model
    return (model.pattern * model.num_layers)[: model.num_layers][1::2]


def test_what_is_read_twice_is_said_once() -> None:
    found = import_megatron(f"{RUN} --vocab-size 512 --optimizer fusedadamw", "launch.sh").loaded.diagnostics
    assert sum("fusedadamw" in each.detail for each in found) == 1


def test_a_tokenizers_file_that_is_not_here_decides_the_vocabulary_alone() -> None:
    """The way without it is taken with a note; a test of a file that decides a size is refused as before."""
    chosen = "if [ -f /models/own/tokenizer.json ]; then WORDS='{}'; else WORDS='--vocab-size 512'; fi\n" + f"{RUN} $WORDS"
    found = import_megatron(chosen.format("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /models/own"), "launch.sh").loaded
    assert found.spec.model.vocab_size == 512
    assert any("the reading assumes that it does not hold; it decides --vocab-size" in each.detail for each in found.diagnostics)
    with pytest.raises(MegaplanError, match="which is known only when the script runs"):
        import_megatron(chosen.format("--vocab-size 512 --hidden-size 128"), "launch.sh")


@pytest.mark.parametrize(
    "words", ["--attention-head-type a b", "--optimizer adam sgd", "--moe-token-dispatcher-type a b", "--glu-activation geglu"]
)
def test_words_that_cannot_be_read_are_refused(words: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(f"{RUN} --vocab-size 512 --num-experts 2 {words}", "launch.sh")
    assert {found.code for found in caught.value.diagnostics if found.severity is Severity.ERROR} <= {"MP913", "MP914", "MP916"}


@pytest.mark.parametrize(("more", "width"), [("", 768), (" --hidden-dim-multiplier 1.3", 1024), (" --ffn-hidden-size 96", 96)])
def test_flagscale_derives_the_width_of_a_gated_mlp(more: str, width: int) -> None:
    """int(4 · 256 · 2 / 3) = 682, and int(682 · 1.3) = 886, up to a multiple of 256."""
    text = f"{RUN} --vocab-size 512 --swiglu --multiple-of 256{more}".replace("--hidden-size 64", "--hidden-size 256")
    assert "--hidden-size 256" in text
    assert import_megatron(text, "launch.sh").loaded.spec.model.mlp.ffn_hidden_size == width


@pytest.mark.parametrize("stage", ["dpo", "orm", "prm", "simpo", "ray_grpo", "trl_ppo"])
def test_a_stage_with_more_than_the_decoder_is_refused(stage: str) -> None:
    text = f"{RUN} --vocab-size 512"
    with pytest.raises(MegaplanError, match=f"--stage {stage}"):
        import_megatron(f"{text} --stage {stage}", "launch.sh")
    assert import_megatron(f"{text} --stage sft", "launch.sh").loaded.spec == import_megatron(text, "launch.sh").loaded.spec


@pytest.mark.parametrize(
    "program", ["analyze_data.py", "ALCF/test_blendable_dataset.py", "prepare_pile_data.py", "tools/preprocess_data.py"]
)
def test_a_program_that_prepares_data_is_no_training(program: str) -> None:
    with pytest.raises(MegaplanError, match="the preparation of data"):
        import_megatron(f"{RUN} --vocab-size 512".replace("pretrain_gpt.py", program), "launch.sh")
