"""Arguments of MindSpeed: each is the launch of Megatron-LM's own arguments that says the same, or is refused by name."""

import pytest
from recorded_launches import PLAIN

from megaplan.errors import MegaplanError, Severity
from megaplan.importers.megatron.spec import import_megatron
from megaplan.spec.models import Spec

RUN = f"torchrun --nproc_per_node 1 pretrain_gpt.py {PLAIN}"
NEEDED = "--vocab-size 256 --make-vocab-size-divisible-by 1"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-grouped-gemm --disable-bias-linear"


@pytest.mark.parametrize(
    ("words", "letters"),
    [
        ("--first-k-dense-replace 1 --moe-layer-freq 1", "DEEE"),
        ("--first-k-dense-replace 1 --moe-layer-freq 2", "DDED"),
        ("--first-k-dense-replace -1 --moe-layer-freq -1", "EEEE"),
        ("--first-k-dense-replace 0 --moe-layer-freq -2", "EDED"),
        ("--moe-layer-freq -1", "EEEE"),
        ("--first-k-dense-replace 2", "EEEE"),
    ],
)
def test_dense_layers_and_shared_experts_of_mindspeed(words: str, letters: str) -> None:
    text = RUN.replace("--num-layers 2", "--num-layers 4")
    model = import_megatron(f"{text} {NEEDED} {MOE} {words} --n-shared-experts 3", "x.sh").loaded.spec.model
    assert (model.pattern.replace("A", ""), model.moe.shared_ffn_hidden_size) == (letters, 144)


def test_gated_delta_nets_of_mindspeed_are_megatrons() -> None:
    sizes = "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 16 --disable-bias-linear"
    text = f"{RUN.replace('--num-layers 2', '--num-layers 4')} {NEEDED} {sizes} --position-embedding-type rope"
    own = "--full-attention-interval 2 --mamba-d-conv 3 --mamba-expand 1 --partial-rotary-factor 0.25"
    theirs = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-conv-kernel-dim 3 --rotary-percent 0.25"
    model = import_megatron(f"{text} {own}", "x.sh").loaded.spec.model
    assert model == import_megatron(f"{text} {theirs} --attention-output-gate", "x.sh").loaded.spec.model
    assert (model.pattern, model.attention.gate, model.linear_attention.conv_kernel) == ("GDADGDAD", True, 3)


@pytest.mark.parametrize(("word", "read"), [("softmax_topk", "none"), ("pai_megatron_aux_loss", "aux_loss")])
def test_choices_of_experts_of_mindspeed_are_losses(word: str, read: str) -> None:
    text = f"{RUN} {NEEDED} {MOE} --moe-router-load-balancing-type {word} --moe-aux-loss-coeff 0.01"
    assert import_megatron(text, "x.sh").loaded.spec.host.moe_load_balancing == read


SPARSE = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 64 --seq-length 128 --max-position-embeddings 128 --bf16 "
    "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 512 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 "
    "--position-embedding-type rope "
    "--disable-bias-linear --normalization RMSNorm"
)
FUSED = "--use-fused-lightning-indexer --use-sparse-flash-attn"


def spec_of(words: str, gpus: int = 1) -> Spec:
    return import_megatron(f"torchrun pretrain_gpt.py {words} {NEEDED}", "x.sh", gpus=gpus).loaded.spec


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (
            "--index-n-heads 64 --index-head-dim 32 --index-topk 16",
            "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 32 --dsa-indexer-topk 16",
        ),
        (
            "--index-topk 16 --index-topk-freq 4 --index-skip-topk-offset 3 --indexer-loss-coeff 0.5",
            "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 16 --dsa-indexer-topk-freq 4 "
            "--dsa-indexer-skip-topk-offset 3 --dsa-indexer-loss-coeff 0.5",
        ),
    ],
)
def test_an_indexer_of_mindspeed_is_megatrons(own: str, theirs: str) -> None:
    coefficient = "" if "coeff" in own else "--dsa-indexer-loss-coeff 1.0"
    upstream = f"--experimental-attention-variant dsa --dsa-indexer-use-sparse-loss --dsa-kernel-backend cudnn {theirs} {coefficient}"
    read = spec_of(f"{SPARSE} --enable-dsa-indexer {FUSED} {own}")
    assert read == spec_of(f"{SPARSE} {upstream}")
    indexer = read.model.attention.indexer
    assert indexer.layers == ((0, 2, 4, 12) if "freq" in own else tuple(range(0, 16, 2)))


@pytest.mark.parametrize(
    ("switches", "named"),
    [
        ("--enable-dsa-indexer --index-n-heads 64 --index-topk 16", "--enable-dsa-indexer"),
        (f"--enable-dsa-indexer --kv-compress {FUSED} --index-topk 16", "--kv-compress"),
        ("--enable-mhc", "--enable-mhc"),
        ("--share-kvstates", "--share-kvstates"),
        ("--tp-2d", "--tp-2d"),
    ],
)
def test_parts_without_a_price_are_refused_by_their_switch(switches: str, named: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        spec_of(f"{SPARSE} {switches}")
    (found,) = caught.value.diagnostics
    assert (found.code, found.location.key) == ("MP914", named)


@pytest.mark.parametrize("sizes", [(1, 3, 2), (2, 2, 2), (4, 1, 1)])
def test_layers_of_ranks_are_those_of_the_list(sizes: tuple[int, ...]) -> None:
    words = f"{PLAIN.replace('--num-layers 2', '--num-layers 6')} --pipeline-model-parallel-size 3"
    listed = spec_of(f"{words} --num-layer-list {','.join(map(str, sizes))}", 3)
    assert listed == spec_of(f"{words} --pipeline-model-parallel-layout '{'|'.join(f't*{size}' for size in sizes).join('EL')}'", 3)
    assert tuple(stage.count("A") for stage in listed.model.pattern.split("|")) == sizes


def test_a_list_of_layers_has_its_prediction_module_on_the_last_rank_and_none_of_its_own_beside_layers_that_do_nothing() -> None:
    words = f"{PLAIN.replace('--num-layers 2', '--num-layers 4')} --pipeline-model-parallel-size 2 --num-layer-list 3,1"
    ahead = spec_of(f"{words} --mtp-num-layers 1 --position-embedding-type rope", 2)
    assert [stage.count("A") for stage in ahead.model.pattern.split("|")] == [3, 1]
    assert ahead.model.features.mtp is not None
    even = spec_of(f"{words} --noop-layers 3", 2).model
    assert [stage.count("A") for stage in even.pattern.split("|")] == [2, 1]
    with pytest.raises(MegaplanError) as caught:
        spec_of(words.replace("3,1", "3,3"), 2)
    assert [each.code for each in caught.value.diagnostics] == ["MP911"]


def test_experts_that_tensor_ranks_share_out_are_whole() -> None:
    words = f"{PLAIN} {MOE} --tensor-model-parallel-size 2 --sequence-parallel --num-experts 8 --expert-model-parallel-size 2"
    spread = spec_of(f"{words} --moe-tp-extend-ep", 4)
    assert (spread.mesh.ep, spread.mesh.etp) == (4, 1)
    cut = spec_of(words, 4)
    assert (cut.mesh.ep, cut.mesh.etp) == (2, 2)


def test_gradients_in_16_bits_and_periods_below_zero_are_megatrons() -> None:
    assert spec_of(f"{PLAIN} --o2-gradient") == spec_of(f"{PLAIN} --grad-reduce-in-bf16")
    words = PLAIN.replace("--num-layers 2", "--num-layers 4")
    assert spec_of(f"{words} {MOE} --moe-layer-freq -2") == spec_of(f"{words} {MOE} --moe-layer-freq 2")


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ("--ai-framework mindspore", True),
        ("--ai-framework pytorch", False),
        ("--loss-compute-mode chunk", True),
        ("--loss-compute-mode default", False),
    ],
)
def test_words_that_change_memory_are_warned_of(given: str, warned: bool) -> None:
    found = import_megatron(f"{RUN} {NEEDED} {given}", "x.sh").loaded.diagnostics
    assert any(each.severity is Severity.WARNING and each.detail.startswith(f"{given}: ") for each in found) is warned
