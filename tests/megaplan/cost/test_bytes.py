"""Bytes moved, sharing of costs between layers, and how the values add up."""

from dataclasses import astuple
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ideal_works import attention_core, m2rnn, ssd

from megakernels.facts import Work
from megakernels.ops.activation.facts import activation
from megakernels.ops.causal_conv1d.facts import causal_conv1d
from megakernels.ops.cross_entropy.facts import cross_entropy
from megakernels.ops.library import gather, linear
from megakernels.ops.rms_norm.facts import gated_norm, norm, residual_norm
from megakernels.ops.rope.facts import rope
from megaplan.blocks.work import LayerCost, Workload, total
from megaplan.cost.model import ModelCosts, model_costs
from megaplan.families.attention.composition import attention_work
from megaplan.families.moe.composition import routing
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import LatentAttention, MatrixRecurrence, MixtureOfExperts, Spec

PLANS = Path(__file__).parents[3] / "plans"
BF16 = Workload(seq_length=4096, num_tokens=8192, itemsize=2)


def costs_of(spec: Spec) -> ModelCosts:
    return model_costs(spec, build_inventory(spec))


def flagship(**sections: dict[str, object]) -> Spec:
    document = yaml.safe_load((PLANS / "nam56r-8xh200.yaml").read_text())
    return Spec.model_validate({**document, **sections})


MLA = LatentAttention(kind="mla", num_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=32)
ROOFLINES = {  # bytes per token in bf16, forward and backward, operand by operand
    "linear": (linear(64, 256, 2).moved, 2 * ((64 + 256) + (256 + 64) + (64 + 256))),
    "residual_norm": (residual_norm(64, 2).moved, 2 * (4 * 64 + 4 * 64) + 8),
    "swiglu": (activation(64, 2, gated=True).moved, 2 * (3 * 64 + 5 * 64)),
    "relu2": (activation(64, 2, gated=False).moved, 2 * (2 * 64 + 3 * 64)),
    "conv": (causal_conv1d(64, 4, 2).moved, 2 * (2 * 64 + 3 * 64)),
    "rope": (rope(64, 2).moved, 2 * (2 * 64 + 2 * 64)),
    "attention": (
        # q, k, v read and out, lse written; all of them and dout read, dq, dk, dv written
        attention_core(BF16, num_heads=8, num_kv_heads=2, head_dim=16, value_dim=16).moved,
        2 * ((128 + 32 + 32 + 128) + (128 + 32 + 32 + 128 + 128) + (128 + 32 + 32)) + 4 * 8 * 2,
    ),
    "ssd": (
        # 16 chunks of 256: states of 4 · 16 · 32 elements, written, read, read again, their gradient written and read
        ssd(BF16, num_heads=4, head_dim=16, state_dim=32, num_groups=2, chunk_size=256).moved,
        2 * ((64 + 128 + 4 + 64) + (64 + 128 + 4 + 64) + (64 + 128 + 4)) + 2 * 5 * 16 * 2048 // 4096,
    ),
    "norm": (norm(64, 2).moved, 2 * (2 * 64 + 3 * 64) + 8),
    "gated_norm": (gated_norm(64, 4, 2).moved, 2 * (3 * 64 + 5 * 64) + 8 * 4),
    "cross_entropy": (cross_entropy(1000, 2).moved, 2 * 3 * 1000 + 8),
    "gather": (gather(64, 2, 4).moved, 2 * 3 * 64 + 2 * 64 * 4),
    "m2rnn": (
        # q, k, v, f read and y written; those and dy read, four gradients written; 33 fp32 states of 2 · 8 · 4 written and read
        m2rnn(BF16, MatrixRecurrence(kind="m2rnn", num_heads=2, key_dim=8, value_dim=4, save_every=128)).moved,
        2 * ((8 + 8 + 8 + 2 + 8) + (8 + 8 + 8 + 2 + 8) + (8 + 8 + 8 + 2)) + -(-2 * 33 * 64 * 4 // 4096),
    ),
    "mla": (
        total(attention_work(BF16, MLA, 64)).moved,
        sum(
            (
                residual_norm(64, 2).moved,
                *(linear(*io, 2).moved for io in ((64, 12), (12, 2 * 24), (64, 10 + 8), (10, 2 * 48), (64, 64))),
                norm(12, 2).moved + norm(10, 2).moved,
                rope(2 * 24, 2).moved,
                2 * 2 * ((2 * 48 + 8) + (2 * 24 + 2 * 32)),  # mla_kv: kv and the rotated key in, k and v out, both ways
                attention_core(BF16, num_heads=2, num_kv_heads=2, head_dim=24, value_dim=32).moved,
            )
        ),
    ),
    "routing": (
        # dispatch and combine of 2 rows both ways, the router's product, 8 fp32 probabilities written and read
        total(routing(BF16, MixtureOfExperts(num_experts=8, top_k=2, ffn_hidden_size=1), 64)).moved,
        2 * 64 * ((2 + 2) + (2 + 1) + (2 + 1) + (1 + 2)) + 2 * 3 * (64 + 8) + 2 * 8 * 4,
    ),
    "routing_in_place": (
        # two rows summed to one both ways; nothing is dispatched, and the gradient of a sum is read where it is
        total(routing(BF16._replace(gathers=True), MixtureOfExperts(num_experts=8, top_k=2, ffn_hidden_size=1), 64)).moved,
        2 * 64 * ((2 + 1) + (2 + 1)) + 2 * 3 * (64 + 8) + 2 * 8 * 4,
    ),
    "routing_in_place_on_two_ranks": (
        # rows are sent and returned as usual, without a sort
        total(routing(BF16._replace(gathers=True, ep=2), MixtureOfExperts(num_experts=8, top_k=2, ffn_hidden_size=1), 64)).moved,
        total(routing(BF16, MixtureOfExperts(num_experts=8, top_k=2, ffn_hidden_size=1), 64)).moved,
    ),
}


@pytest.mark.parametrize("op", ROOFLINES)
def test_ideal_bytes_of_an_op(op: str) -> None:
    found, counted = ROOFLINES[op]
    assert found == counted


def test_weights_are_read_twice_and_gradients_read_and_written() -> None:
    """bf16 weights and fp32 gradients: 2 · 2 + 2 · 4 bytes per element and microbatch, every expert of a bank included."""
    spec = flagship()
    inventory, costs = build_inventory(spec), costs_of(spec)
    for block, cost in zip(inventory.layers, costs.layers, strict=True):
        assert cost.weight_bytes == block.elements * 12
    assert costs.head.weight_bytes == (65_536 * 3584 + 3584) * 12
    assert costs.mtp[0].weight_bytes == (168_896_128 + 65_536 * 3584) * 12
    assert costs.side_embeddings.weight_bytes == 3584 * (256 + 64) * 12
    assert costs.embedding.weight_bytes == 0  # a lookup touches the rows of its tokens only


def test_the_token_s_share_of_weights_shrinks_with_the_microbatch() -> None:
    """Twice the tokens share one reading of the weights; activation bytes of a token stay."""
    small = costs_of(flagship(batch={"micro_batch_size": 1, "seq_length": 4096})).layers[1]
    large = costs_of(flagship(batch={"micro_batch_size": 2, "seq_length": 4096})).layers[1]
    assert small.activation_bytes == large.activation_bytes
    assert small.moved_bytes - small.activation_bytes == -(-110_161_408 * 12 // 4096)
    assert large.moved_bytes - large.activation_bytes == -(-110_161_408 * 12 // 8192)


def test_a_family_s_own_precision_changes_its_bytes_only() -> None:
    """fp32 for M widens its activations and weights; no other family's bytes and no FLOPs change; fp8 narrows weights alone."""
    base = costs_of(flagship())
    wide = costs_of(flagship(precision={"families": {"M": "fp32"}}))
    narrow = costs_of(flagship(precision={"families": {"M": "fp8"}}))
    for old, new, small in zip(base.layers, wide.layers, narrow.layers, strict=True):
        assert old.total_flops == new.total_flops == small.total_flops
        if old is base.layers[2]:
            assert new.activation_bytes > 1.9 * old.activation_bytes
            assert small.activation_bytes == old.activation_bytes
            assert [c.weight_bytes // 107_954_144 for c in (old, new, small)] == [12, 16, 10]
        else:
            assert old == new == small


def test_layers_of_the_same_make_share_one_cost() -> None:
    """52 layers share five objects, which are cheap to hold and to compare."""
    costs = costs_of(flagship())
    assert len(costs.layers) == 52
    assert len({id(cost) for cost in costs.layers}) == 5


def test_costs_are_whole_numbers() -> None:
    """A window and a sequence that do not divide anything still give integers, rounded up."""
    document = yaml.safe_load((PLANS / "tiny-hybrid.yaml").read_text())
    document["model"]["attention"]["window_size"] = 100
    document["batch"] = {"micro_batch_size": 3, "seq_length": 257}
    spec = Spec.model_validate(document)
    costs = costs_of(spec)
    for cost in (*costs.layers, costs.embedding, costs.side_embeddings, costs.head):
        assert all(type(value) is int for value in (*cost, cost.total_flops, cost.model_flops, cost.moved_bytes))
    core = costs.layers[0].forward_flops - 2 * 128 * (4 * 32 + 2 * 2 * 32 + 4 * 32)
    pairs = sum(min(i + 1, 100) for i in range(257))
    assert core == -(-2 * pairs * 4 * (32 + 32) // 257)


@given(st.lists(st.builds(Work, *[st.integers(0, 10**6)] * 7), max_size=4), st.integers(0, 5))
def test_work_adds_and_repeats_field_by_field(parts: list[Work], times: int) -> None:
    total = sum(parts, start=Work())
    assert astuple(total) == tuple(sum(column) for column in zip(*map(astuple, parts), strict=True)) or not parts
    assert astuple(total * times) == tuple(value * times for value in astuple(total))


def test_model_flops_leave_repeated_work_out() -> None:
    cost = LayerCost(10, 25, 10, 5, 100, 7, 2)
    assert (cost.total_flops, cost.model_flops, cost.moved_bytes) == (45, 40, 104)


def test_an_inventory_of_another_model_is_refused() -> None:
    """Costs of layers that the spec has no section for are an error, not zeros."""
    spec = flagship()
    other = spec.model_copy(update={"model": spec.model.model_copy(update={"moe": None})})
    with pytest.raises(ValueError, match=r"needs a section model\.moe"):
        model_costs(other, build_inventory(spec))
