"""Tensors that operators keep, compared in pairs: widths add up, heads are divided, and common dims of two tensors are equal."""

from typing import Any

import pytest
from accuracy_megatron.launches import changed, stage_of_launch
from megatron_goldens import STATED

import megaplan
from megaplan.columns import Column, Phase
from megaplan.dtypes import DType
from megaplan.families.attention.section import GroupedQueryAttention, LatentAttention
from megaplan.families.dense.section import Mlp
from megaplan.families.moe.section import MixtureOfExperts
from megaplan.hosts.megatron.chunks import backward_excess
from megaplan.hosts.megatron.peak import memory
from megaplan.hosts.megatron.run import MegatronRun, MegatronStage
from megaplan.hosts.megatron.setting import attention_kernel
from megaplan.importers.megatron.spec import import_megatron
from megaplan.inventory.build import build_inventory

STATE = Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER
WIDTHS = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 40}


@pytest.fixture(scope="module")
def stage() -> MegatronStage:
    """A dense GPT with grouped queries on two tensor ranks, 16 heads in 4 groups of 32."""
    row = STATED[0]
    found = stage_of_launch(row["arguments"], row["gpus"], row["padded_vocab_size"], row["platform"])
    grouped = GroupedQueryAttention(kind="gqa", num_heads=16, num_kv_heads=4, head_dim=32)
    return changed(found, model__attention=grouped, mesh__tp=2, mesh__cp=1, host__attention_backend="flash", host__recompute_modules=())


def kept_by(stage: MegatronStage, letter: str, **changes: Any) -> dict[str, int]:
    return changed(stage, **changes).run.operator(letter).tensors


def test_layers_in_fp32_keep_twice_the_bytes_but_of_masks_and_statistics(stage: MegatronStage) -> None:
    """Unfused attention in both: no kernel of attention takes fp32."""
    plain = {"host__attention_backend": "unfused", "host__hidden_dropout": True, "host__attention_dropout": True}
    single = dict.fromkeys(("precision__params", "precision__grads", "precision__reduce", "precision__master"), DType.FP32)
    for letter, same in (("*", {"norm.stats", "dropout.mask", "softmax.mask"}), ("-", {"norm.stats", "dropout.mask"})):
        half, whole = kept_by(stage, letter, **plain), kept_by(stage, letter, **plain, **single)
        assert same < half.keys()
        assert whole == {name: size if name in same else 2 * size for name, size in half.items()}
    assert attention_kernel(changed(stage, host__attention_backend="auto", **single).spec) == "unfused"


def test_fp32_weights_have_no_masters_and_logits_no_wider_copy() -> None:
    """The distributed optimizer steps views of fp32 parameters, and `.float()` of fp32 logits is the logits."""
    words = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --max-position-embeddings 512 --vocab-size 65536"
    words += " --micro-batch-size 4 --use-distributed-optimizer --no-gradient-accumulation-fusion"
    launches = [import_megatron(f"{words} {more}", "launch", ["host.fragmentation_percent=0"], 1) for more in ("--bf16", "")]
    half, whole = (megaplan.estimate(launch.document).worst for launch in launches)
    columns = Column.TENSOR_PARALLEL_PARAMS, Column.REPLICATED_PARAMS, Column.GRADIENTS
    for rank, each in ((half, 2 + 4), (whole, 4 + 4)):
        assert sum(rank.cells[Phase.FORWARD_BACKWARD][column] for column in columns) == each * rank.parameters
    state = [sum(rank.cells[Phase.FORWARD_BACKWARD][column] for column in STATE) for rank in (half, whole)]
    assert state == [12 * half.parameters, 8 * half.parameters]
    for launch, each in zip(launches, (2 + 4, 4), strict=True):
        spec = launch.loaded.spec
        run = MegatronRun(spec, build_inventory(spec))
        assert memory(MegatronStage(run, (run.end,), 0)).phases["loss"] == each * 4 * 512 * 65536


def kept_with(stage: MegatronStage, **widths: int) -> dict[str, int]:
    return kept_by(stage, "*", model__attention=LatentAttention.model_validate({"kind": "mla", "num_heads": 16, **WIDTHS, **widths}))


@pytest.mark.parametrize(
    ("name", "wider"),
    [
        ("qk_nope_head_dim", {"q": 1, "k": 1}),
        ("qk_rope_head_dim", {"q": 1, "k": 1}),
        ("v_head_dim", {"v": 1, "context": 1, "context.transposed": 1}),
    ],
)
def test_a_wider_head_is_wider_in_its_own_tensors(stage: MegatronStage, name: str, wider: dict[str, int]) -> None:
    """Eight more places of each of the rank's 8 heads, in 16 bit, for every token: in these tensors, and in no other."""
    before, after = kept_with(stage), kept_with(stage, **{name: WIDTHS[name] + 8})
    grown = {tensor: after[tensor] - before[tensor] for tensor in before if after[tensor] != before[tensor]}
    assert grown == dict.fromkeys(wider, 2 * stage.run.at.tokens * 8 * 8)


@pytest.mark.parametrize(
    ("name", "tensors"), [("q_lora_rank", ("q_latent", "q_latent.norm")), ("kv_lora_rank", ("kv_latent", "kv_latent.norm"))]
)
def test_a_latent_is_kept_before_and_after_its_norm(stage: MegatronStage, name: str, tensors: tuple[str, str]) -> None:
    """Latents are not a head's, so tensor ranks share their tokens instead."""
    before, after = kept_with(stage), kept_with(stage, **{name: WIDTHS[name] + 8})
    grown = {tensor: after[tensor] - before[tensor] for tensor in before if after[tensor] != before[tensor]}
    assert grown == dict.fromkeys(tensors, 2 * stage.run.at.stream_tokens * 8)


def test_queries_keys_and_values_lie_side_by_side(stage: MegatronStage) -> None:
    """Two tensor ranks: 8 query heads, and 2 heads each of keys and values; the context is as wide as the queries."""
    kept = kept_by(stage, "*")
    assert kept["qkv"] * 8 == kept["context"] * (8 + 2 + 2)
    assert kept["context"] == 2 * stage.run.at.tokens * 8 * 32


@pytest.mark.parametrize(("kernel", "batch", "copies"), [("flash", 1, 0), ("flash", 2, 1), ("fused", 2, 0), ("unfused", 2, 0)])
def test_flash_attention_keeps_its_output_in_both_orders(stage: MegatronStage, kernel: str, batch: int, copies: int) -> None:
    """One sequence needs no transposition; recompute of the core repeats its own output, but not the projection's saved tensor."""
    changes = {"host__attention_backend": kernel, "batch__micro_batch_size": batch}
    kept, again = kept_by(stage, "*", **changes), kept_by(stage, "*", **changes, host__recompute_modules=("core_attn",))
    assert kept.get("context.transposed", 0) == copies * kept["context"]
    assert "context.transposed" not in again
    assert again["context"] == kept["context"]


AT_WILL = {"host__attention_backend": "auto", "host__attention_dropout": 0.1, "host__deterministic_mode": False}
AUTO = [
    ("a100-80gb", {}, "flash"),
    ("h100-sxm", {}, "fused"),
    ("h100-sxm", {"host__deterministic_mode": True}, "fused"),
    ("h100-sxm", {"model__attention__head_dim": 256}, "fused"),
    ("gb200", {}, "fused"),
    ("gb200", {"host__deterministic_mode": True}, "flash"),
    ("gb200", {"host__deterministic_mode": True, "host__attention_dropout": 0.0}, "fused"),
    ("gb200", {"model__attention__head_dim": 256}, "flash"),
    ("gb200", {"host__transformer_impl": "local"}, "unfused"),
    ("gb200", {"host__attention_backend": "flash"}, "flash"),
]


@pytest.mark.parametrize(("device", "changes", "kernel"), AUTO)
def test_transformer_engine_takes_the_kernel_that_the_device_can_run(
    stage: MegatronStage, device: str, changes: dict[str, Any], kernel: str
) -> None:
    found = changed(stage, device__name=device, **{**AT_WILL, **changes})
    assert attention_kernel(found.spec) == kernel


def test_latent_attention_of_deepseek_is_fused_on_blackwell(stage: MegatronStage) -> None:
    latent = {"kind": "mla", "num_heads": 16, **WIDTHS, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    for values, kernel in ((128, "fused"), (192, "flash")):
        attention = LatentAttention.model_validate({**latent, "v_head_dim": values})
        found = changed(stage, device__name="b200", **AT_WILL, model__attention=attention)
        assert attention_kernel(found.spec) == kernel


def test_without_a_fused_kernel_keys_and_values_are_repeated_for_every_query_head(stage: MegatronStage) -> None:
    kept = kept_by(stage, "*", host__attention_backend="unfused")
    assert kept["kv.expanded"] == 2 * kept["context"]
    assert kept["softmax"] == 2 * stage.spec.batch.micro_batch_size * 8 * stage.spec.batch.seq_length**2
    assert "lse" not in kept
    assert "kv.expanded" not in kept_by(stage, "*", host__attention_backend="unfused", model__attention__num_kv_heads=16)


def test_dropout_keeps_its_mask_and_a_second_copy_of_the_scores(stage: MegatronStage) -> None:
    kept = kept_by(stage, "*", host__attention_backend="unfused", host__attention_dropout=0.1)
    assert kept["softmax.dropped"] == kept["softmax"] == 2 * kept["softmax.mask"]


@pytest.mark.parametrize("gated", [False, True])
def test_an_activation_is_as_wide_as_its_input_or_half(stage: MegatronStage, gated: bool) -> None:
    """Dense, shared and routed alike: a gate comes beside the input."""
    kind: Any = "swiglu" if gated else "gelu"
    moe = MixtureOfExperts(num_experts=8, top_k=2, ffn_hidden_size=256, shared_ffn_hidden_size=512, activation=kind)
    mlp = Mlp(ffn_hidden_size=1024, activation=kind)
    stage = changed(stage, model__moe=moe, model__mlp=mlp, host__moe_dispatcher="alltoall", mesh__ep=1, mesh__etp=1)
    kept = kept_by(stage, "-") | kept_by(stage, "E")
    for part in ("", "shared.", "routed."):
        assert kept[f"{part}fc1.output"] == (2 if gated else 1) * kept[f"{part}activation.output"]
    assert kept["shared.activation.output"] == 2 * stage.run.at.tokens * 512 // 2
    assert kept["activation.output"] == 2 * kept["shared.activation.output"]
    assert kept["routed.fc1.input"] * 256 == kept["routed.activation.output"] * stage.spec.model.hidden_size


@pytest.mark.parametrize("letter", ["*", "-"])
def test_before_a_dropout_the_operator_has_a_gradient_of_its_own(stage: MegatronStage, letter: str) -> None:
    """The gradient has 16 bit for each of the rank's elements; while one operator runs backward, that is all that dropout adds."""
    plain, dropped = (changed(stage, host__hidden_dropout=chance).run for chance in (0.0, 0.1))
    assert backward_excess(dropped, letter) - backward_excess(plain, letter) == stage.run.boundary_bytes
