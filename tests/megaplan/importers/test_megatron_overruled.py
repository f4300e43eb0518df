"""Arguments that other arguments overrule, layers that do not add up, and launches of other front ends."""

import pytest

from megaplan.errors import MegaplanError
from megaplan.importers.megatron.spec import import_megatron

SHAPES = "--hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 --vocab-size 1024 --bf16"


def notes(words: str) -> str:
    found = import_megatron(f"--num-layers 4 {SHAPES} {words}", "launch", [], 8).loaded.diagnostics
    return "\n".join(each.detail for each in found if each.code == "MP919")


def error(words: str, gpus: int = 8) -> tuple[str, tuple[str, ...]]:
    with pytest.raises(MegaplanError) as caught:
        import_megatron(words, "launch.sh", [], gpus)
    (found,) = caught.value.diagnostics
    return f"{found.code} {found.detail}", tuple(found.hints)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--transformer-impl local --use-flash-attn", "--use-flash-attn has no effect: --transformer-impl local"),
        ("--transformer-impl local --attention-backend flash", "--attention-backend flash has no effect: --transformer-impl local"),
        ("--sequence-parallel", "--sequence-parallel has no effect: --tensor-model-parallel-size is 1"),
        ("--expert-model-parallel-size 4", "--expert-model-parallel-size 4 has no effect: the model has no experts"),
        ("--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 2 has no effect: the model has no experts"),
        ("--kv-lora-rank 16 --v-head-dim 64", "--kv-lora-rank 16 has no effect: it is read with --multi-latent-attention"),
        ("--num-query-groups 2", "--num-query-groups 2 has no effect: it is read with --group-query-attention"),
        (
            "--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16",
            "--accumulate-allreduce-grads-in-fp32 has no effect: --grad-reduce-in-bf16 decides",
        ),
        ("--recompute-modules moe_act", "--recompute-modules moe_act has no effect"),
        (
            "--recompute-activations --recompute-granularity full --recompute-method uniform",
            "--recompute-activations has no effect: --recompute-granularity decides",
        ),
        (
            "--position-embedding-type none --use-rotary-position-embeddings",
            "--position-embedding-type none has no effect: --use-rotary-position-embeddings makes it rope",
        ),
    ],
)
def test_an_argument_that_another_one_overrules_is_a_note(words: str, said: str) -> None:
    assert said in notes(words)


def test_arguments_at_their_defaults_and_used_ones_are_no_notes() -> None:
    assert notes("--attention-backend auto --expert-model-parallel-size 1 --group-query-attention --num-query-groups 2") == ""
    assert notes("--tensor-model-parallel-size 2 --sequence-parallel --use-flash-attn --recompute-activations") == ""


@pytest.mark.parametrize(
    ("words", "said", "fits"),
    [
        ("--num-layers 20 --decoder-last-pipeline-num-layers 1", "--decoder-last-pipeline-num-layers 1: 1 of 20 layers are placed", "20"),
        (
            "--num-layers 30 --pipeline-model-parallel-size 4",
            "--num-layers 30: 30 layers do not divide over 4 stages: 30 % 4 = 2",
            "28 or 32; or --decoder-last-pipeline-num-layers 6; or --pipeline-model-parallel-size 3",
        ),
        (
            "--num-layers 30 --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 5",
            "with --decoder-first-pipeline-num-layers 4, 9 of 30 layers are placed, and 21 do not divide over 2 other stages",
            "4",
        ),
        (
            "--num-layers 30 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
            "30 layers do not divide over stages of --num-layers-per-virtual-pipeline-stage 2 on 4 ranks: 30 % 8 = 6",
            "24 or 32",
        ),
        (
            "--num-layers 31 --pipeline-model-parallel-size 4 --account-for-loss-in-pipeline-split "
            "--num-virtual-stages-per-pipeline-rank 3",
            "31 layers and --account-for-loss-in-pipeline-split do not divide over 12 virtual stages, 3 on each of 4 ranks",
            "23 or 35",
        ),
    ],
)
def test_counts_that_do_not_add_up_name_the_argument_and_what_fits(words: str, said: str, fits: str) -> None:
    detail, hints = error(f"{words} {SHAPES}")
    assert detail.startswith("MP914 ")
    assert said in detail
    assert hints[0].endswith(fits)


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (
            "NPROC_PER_NODE=8 megatron sft --model ORG/MODEL --tensor_model_parallel_size 4 --sequence_parallel true --max_length 8192",
            "MP926 launch.sh belongs to ms-swift, which takes the model from the config of --model",
            "megaplan estimate ORG/MODEL --gpus 8 --seq 8192 --set mesh.tp=4",
        ),
        (
            "torchrun --nproc-per-node 8 train.py --model_name_or_path ORG/MODEL --tensor-model-parallel-size 2",
            "MP916 no --num-layers, --hidden-size, --num-attention-heads, --seq-length: the launch of train.py uses another front end than"
            " Megatron-LM's own: its model comes from --model-name-or-path ORG/MODEL",
            "megaplan estimate ORG/MODEL --gpus 8 --set mesh.tp=2",
        ),
    ],
    ids=["known", "unknown"],
)
def test_a_launch_of_another_front_end_is_one_error(words: str, said: str, hint: str) -> None:
    detail, hints = error(words)
    assert detail == said
    assert hints[0] == hint


def test_a_launch_with_some_of_its_shapes_names_the_missing_ones() -> None:
    with pytest.raises(MegaplanError) as caught:
        import_megatron("--num-layers 4 --bf16", "launch", [], 8)
    (found,) = caught.value.diagnostics
    assert found.detail == "--hidden-size, --max-position-embeddings, --num-attention-heads, --seq-length are missing"
