"""What operators keep, tensor beside tensor: widths add up, heads are shared out, and what two tensors have in common is equal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from accuracy_megatron.launches import job_of_launch
from megatron_goldens import STATED

from megaplan.hosts.megatron.job import LatentDims, MegatronJob, MoeDims
from megaplan.hosts.megatron.saved import operator
from megaplan.hosts.megatron.working import backward_excess

LATENT = LatentDims(q_lora_rank=96, kv_lora_rank=64, qk_head_dim=48, qk_pos_emb_head_dim=16, v_head_dim=40)


@pytest.fixture(scope="module")
def job() -> MegatronJob:
    """A dense GPT with grouped queries on two tensor ranks, 16 heads in 4 groups of 32."""
    row = STATED[0]
    found = job_of_launch(row["arguments"], row["gpus"], row["padded_vocab_size"], row["platform"])
    return replace(
        found, num_heads=16, num_query_groups=4, head_dim=32, tp=2, cp=1, latent=None, attention_backend="flash", recompute=frozenset()
    )


@pytest.mark.parametrize(
    ("name", "wider"),
    [
        ("qk_head_dim", {"q": 1, "k": 1}),
        ("qk_pos_emb_head_dim", {"q": 1, "k": 1}),
        ("v_head_dim", {"v": 1, "context": 1}),
    ],
)
def test_a_wider_head_is_wider_in_its_own_tensors(job: MegatronJob, name: str, wider: dict[str, int]) -> None:
    """Eight more places of each of the rank's 8 heads, in 16 bit, for every token: in these tensors, and in no other."""
    before = operator(replace(job, latent=LATENT), "*")
    after = operator(replace(job, latent=replace(LATENT, **{name: getattr(LATENT, name) + 8})), "*")
    grown = {tensor: after[tensor] - before[tensor] for tensor in before if after[tensor] != before[tensor]}
    assert grown == dict.fromkeys(wider, 2 * job.tokens * 8 * 8)


@pytest.mark.parametrize(
    ("name", "tensors"), [("q_lora_rank", ("q_latent", "q_latent.norm")), ("kv_lora_rank", ("kv_latent", "kv_latent.norm"))]
)
def test_a_latent_is_kept_before_and_after_its_norm(job: MegatronJob, name: str, tensors: tuple[str, str]) -> None:
    """Latents are no head's, so tensor ranks share their tokens instead."""
    before = operator(replace(job, latent=LATENT), "*")
    after = operator(replace(job, latent=replace(LATENT, **{name: getattr(LATENT, name) + 8})), "*")
    grown = {tensor: after[tensor] - before[tensor] for tensor in before if after[tensor] != before[tensor]}
    assert grown == dict.fromkeys(tensors, 2 * job.stream_tokens * 8)


def test_queries_keys_and_values_lie_side_by_side(job: MegatronJob) -> None:
    """Two tensor ranks: 8 query heads, and 2 heads each of keys and values; the context is as wide as the queries."""
    kept = operator(job, "*")
    assert kept["qkv"] * 8 == kept["context"] * (8 + 2 + 2)
    assert kept["context"] == 2 * job.tokens * 8 * 32


def test_without_a_fused_kernel_keys_and_values_are_repeated_for_every_query_head(job: MegatronJob) -> None:
    kept = operator(replace(job, attention_backend="unfused"), "*")
    assert kept["kv.expanded"] == 2 * kept["context"]
    assert kept["softmax"] == 2 * job.micro_batch_size * 8 * job.seq_length**2
    assert "lse" not in kept
    assert "kv.expanded" not in operator(replace(job, attention_backend="unfused", num_query_groups=16), "*")


def test_dropout_keeps_its_mask_and_a_second_copy_of_the_scores(job: MegatronJob) -> None:
    kept = operator(replace(job, attention_backend="unfused", attention_dropout=0.1), "*")
    assert kept["softmax.dropped"] == kept["softmax"] == 2 * kept["softmax.mask"]


@pytest.mark.parametrize("gated", [False, True])
def test_an_activation_is_as_wide_as_its_input_or_half(job: MegatronJob, gated: bool) -> None:
    """Dense, shared and routed alike: a gate comes beside the input."""
    moe = MoeDims(8, 2, 256, 512, "alltoall", grouped_gemm=True, overlap=False)
    job = replace(job, gated=gated, moe=moe, ffn_hidden_size=1024, ep=1, etp=1)
    kept = operator(job, "-") | operator(job, "E")
    for part in ("", "shared.", "routed."):
        assert kept[f"{part}fc1.output"] == (2 if gated else 1) * kept[f"{part}activation.output"]
    assert kept["shared.activation.output"] == 2 * job.tokens * 512 // 2
    assert kept["activation.output"] == 2 * kept["shared.activation.output"]
    assert kept["routed.fc1.input"] * 256 == kept["routed.activation.output"] * job.hidden_size


@pytest.mark.parametrize("letter", ["*", "-"])
def test_before_a_dropout_the_operator_has_a_gradient_of_its_own(job: MegatronJob, letter: str) -> None:
    """Beside the residual stream's: 16 bit for each of the rank's elements; while one operator runs backward, all that dropout adds."""
    plain, dropped = (replace(job, hidden_dropout=chance) for chance in (0.0, 0.1))
    assert backward_excess(dropped, letter) - backward_excess(plain, letter) == 2 * job.stream_tokens * job.hidden_size
