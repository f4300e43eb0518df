"""Ledgers against numbers worked out by hand, for a spec small enough to follow: B 2, T 8, h 16, bf16."""

from collections.abc import Iterable
from typing import Any

import pytest

from megaplan.columns import Column
from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.hosts.values import BlockLedger, LedgerTensor
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec

STREAM = 2 * 8 * 16 * 2  # 512 B: [2, 8, 16] in bf16
NORM = STREAM + 2 * 8 * 4  # 576 B: the normed stream and rstd fp32 [2, 8]
GQA = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
MLA = {
    "kind": "mla",
    "num_heads": 2,
    "q_lora_rank": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
}


def bytes_by_column(tensors: Iterable[LedgerTensor]) -> dict[Column, int]:
    """Sum of bytes per column."""
    total: dict[Column, int] = {}
    for tensor in tensors:
        total[tensor.column] = total.get(tensor.column, 0) + tensor.bytes
    return total


def spec_of(letter: str, sections: dict[str, Any], **more: Any) -> Spec:
    model = {"pattern": letter, "num_layers": 2, "hidden_size": 16, "vocab_size": 40, **sections}
    values = {
        "format": "megaplan.spec/1",
        "name": "t",
        "model": model,
        "batch": {"micro_batch_size": 2, "seq_length": 8},
        "host": {"kernels": "reference"},
    }
    return Spec.model_validate({**values, **more})


def ledger_of(spec: Spec, name: str = "layers.0") -> BlockLedger:
    inventory = build_inventory(spec)
    return block_ledger(spec, name, inventory.block(name))


def saved_bytes(ledger: BlockLedger) -> int:
    return sum(tensor.bytes for tensor in ledger.saved)


def test_gqa() -> None:
    # q [2,8,4,4] 512, k and v [2,8,2,4] 256 each, out 512, lse fp32 [2,4,8] 256
    ledger = ledger_of(spec_of("A", {"attention": GQA}))
    assert saved_bytes(ledger) == NORM + 512 + 256 + 256 + 512 + 256
    assert ledger.output.bytes == STREAM


def test_qk_norm_also_keeps_q_and_k_before_it() -> None:
    # q 512 and k 256 before their norms, rstd fp32 [2,8,4] 256 and [2,8,2] 128
    plain, normed = (ledger_of(spec_of("A", {"attention": {**GQA, "qk_norm": flag}})) for flag in (False, True))
    assert saved_bytes(normed) - saved_bytes(plain) == 512 + 256 + 256 + 128


def test_mla() -> None:
    # q latent [2,8,6] 192 twice (raw, normed), its rstd 64; kv_down's output [2,8,12] 384 whole, rstd 64, normed latent [2,8,10] 320;
    # q and k [2,8,2,6] 384 each, v and out [2,8,2,3] 192 each, lse fp32 [2,2,8] 128
    ledger = ledger_of(spec_of("A", {"attention": MLA}))
    assert saved_bytes(ledger) == NORM + 192 + 192 + 64 + 384 + 64 + 320 + 384 + 384 + 192 + 192 + 128


def test_mla_without_positions_keeps_two_numbers_more() -> None:
    # the angle-0 table: one fp32 each, expanded
    spec = spec_of("A", {"attention": {**MLA, "nope_layers": [1]}})
    assert saved_bytes(ledger_of(spec, "layers.1")) - saved_bytes(ledger_of(spec)) == 8


def test_an_indexer_adds_what_it_makes_and_two_numbers_a_token() -> None:
    # q [2,8,3,5] 480, k before its norm [2,8,5] 160, head weights [2,8,3] 96, threshold and log-sum-exp fp32 [2,8] 64 each
    spec = spec_of("A", {"attention": {**MLA, "indexer": {"num_heads": 3, "head_dim": 5, "layers": [1]}}})
    assert saved_bytes(ledger_of(spec, "layers.1")) - saved_bytes(ledger_of(spec)) == 480 + 160 + 96 + 2 * 64


def test_mamba2() -> None:
    # 4 heads of 8 = 32 inner, 2 groups of state 3 = 6: in_proj's output [2,8,32+32+6+6+4] = 80 wide 2560, once;
    # convolved [2,8,44] 1408; y [2,8,32] 1024; states [2,ceil(8/3),4,8,3] = 576 elements 1152; rstd fp32 [2,8,2] 128; out_proj's input 1024
    section = {"kind": "mamba2", "expand": 2, "head_dim": 8, "state_dim": 3, "num_groups": 2, "chunk_size": 3}
    ledger = ledger_of(spec_of("M", {"mamba": section}))
    assert saved_bytes(ledger) == NORM + 2560 + 1408 + 1024 + 1152 + 128 + 1024
    assert {tensor.name for tensor in ledger.saved} >= {"projected", "conv"}
    assert not {"z", "dt", "conv_x"} & {tensor.name for tensor in ledger.saved}  # views


def test_mamba3() -> None:
    # inner 32, B and C 2 groups · rank 2 · state 3 = 12 each: in_proj's output 32+32+12+12+3·4 = 100 wide 3200; angles [2,8,2] 64;
    # B and C normed [2,8,12] 384 each, rstd fp32 [2,8,4] 256 each; states [2,3,4,8,3] 1152, phases fp32 [2,3,4,2] 192;
    # gated output 1024
    section = {"kind": "mamba3", "head_dim": 8, "state_dim": 3, "num_groups": 2, "mimo_rank": 2, "num_angles": 2, "save_every": 3}
    assert saved_bytes(ledger_of(spec_of("M", {"mamba": section}))) == NORM + 3200 + 64 + 2 * 384 + 2 * 256 + 1152 + 192 + 1024


@pytest.mark.parametrize(("kernels", "moved"), [("reference", {"received", "leaving"}), ("triton", {"arrived", "leaving", "returned"})])
def test_combined_rows_are_an_activation_and_rows_on_their_way_are_not(kernels: str, moved: set[str]) -> None:
    """The sum of its experts' rows is a block's result; rows before that, and their gradients, are routing."""
    moe = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
    ledger = ledger_of(spec_of("E", {"moe": moe, "norm_placement": "both"}, mesh={"dp_shard": 2, "ep": 2}, host={"kernels": kernels}))
    found = {tensor.name: tensor.column for tensor in (*ledger.saved, *ledger.forward_live, *ledger.backward_live)}
    assert found["combined"] is Column.ACTIVATIONS
    gradients = {name for name in found if name.removeprefix("d.") in {*moved, "processed"} and name.startswith("d.")}
    assert gradients
    assert {found[name] for name in moved | gradients} == {Column.ROUTING}


def test_moe_by_column() -> None:
    # N 16 tokens, k 2, E 4. Routing: indices and rows 32 · 4 = 128 each, counts 16, received [32,16] 1024.
    # Activations: probs fp32 [16,4] 256, weights fp32 [16,2] 128, gate and up [32,8] 512 each, shared gate, up, act [16,5] 160 each
    section = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "shared_ffn_hidden_size": 5}
    columns = bytes_by_column(ledger_of(spec_of("E", {"moe": section})).saved)
    assert columns == {Column.ROUTING: 128 + 128 + 16 + 1024, Column.ACTIVATIONS: NORM + 256 + 128 + 512 + 512 + 3 * 160}


def test_ungated_experts_keep_no_gate() -> None:
    section = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "activation": "relu2"}
    columns = bytes_by_column(ledger_of(spec_of("E", {"moe": section})).saved)
    assert columns[Column.ACTIVATIONS] == NORM + 256 + 128 + 512


def test_m2rnn() -> None:
    # qk before and after its convolution [2,8,6] 192 each, v likewise [2,8,3·5] 480 each, forget [2,8,3] 96, gate 480, y 480, gated 480,
    # rstd fp32 [2,8,1] 64, states fp32 [2,ceil(8/3)+1,3,3,5] = 360 elements 1440
    section = {"kind": "m2rnn", "num_heads": 3, "key_dim": 3, "value_dim": 5, "save_every": 3}
    ledger = ledger_of(spec_of("R", {"recurrent": section}))
    assert saved_bytes(ledger) == NORM + 2 * 192 + 2 * 480 + 96 + 480 + 480 + 480 + 64 + 1440


def test_the_published_state_arithmetic_of_r() -> None:
    """NAM56R's R at [4, 4096]: fp32 states every 64 tokens are 65 of them, 44.69 MiB."""
    section = {"kind": "m2rnn", "num_heads": 44, "key_dim": 64, "value_dim": 16}
    spec = spec_of("R", {"recurrent": section}, batch={"micro_batch_size": 4, "seq_length": 4096})
    states = next(tensor for tensor in ledger_of(spec).saved if tensor.name == "states")
    assert states.shape == (4, 65, 44, 64, 16)
    assert round(states.bytes / 2**20, 2) == 44.69


@pytest.mark.parametrize(("activation", "kept"), [("swiglu", 3), ("relu2", 2), ("gelu", 2)])
def test_mlp(activation: str, kept: int) -> None:
    # [2,8,10] 320 each of gate, up, act
    ledger = ledger_of(spec_of("D", {"mlp": {"ffn_hidden_size": 10, "activation": activation}}))
    assert saved_bytes(ledger) == NORM + kept * 320


def test_backward_working_set_of_an_mlp_is_derived_operation_by_operation() -> None:
    # worst in gate_proj's backward, the last of the two: normed and rstd are kept; d.out waits for the residual, d.gate is read, up_proj's
    # gradient of the normed stream stands and gate_proj's is about to be added; all three weight gradients [16, 10] are made
    ledger = ledger_of(spec_of("D", {"mlp": {"ffn_hidden_size": 10}}))
    working = {tensor.name: tensor.bytes for tensor in ledger.backward_live if tensor.name not in {kept.name for kept in ledger.saved}}
    assert working == {"d.out": 512, "d.gate": 320, "d.normed": 512, "d.normed+": 512, **dict.fromkeys(GRADIENTS, 320)}


GRADIENTS = ("d.down_proj.weight", "d.up_proj.weight", "d.gate_proj.weight")


def test_ends_of_the_stack() -> None:
    # head: logits [16, 40] bf16 1280 and lse fp32 64; the final norm's rstd 64; the embedding keeps only its token ids, an input
    spec = spec_of("D", {"mlp": {"ffn_hidden_size": 10}})
    assert saved_bytes(ledger_of(spec, "head")) == 1280 + 64
    assert saved_bytes(ledger_of(spec, "final_norm")) == 64
    assert ledger_of(spec, "embedding").saved == ()


def test_features() -> None:
    # n-gram: ids int64 [2,8,3] 384, rows [2,8,3·2] 192. structure: ids 128, rows [2,8,4] 128, projection 512. relation ids int32 64
    features = {
        "ngram": {"num_tables": 3, "num_rows": 50, "dim": 2},
        "structure": {"num_categories": 5, "bottleneck": 4},
        "relation_bias": {"num_relations": 7},
    }
    spec = spec_of("A", {"attention": GQA, "features": features})
    found = {name: bytes_by_column(ledger_of(spec, name).saved) for name in features}
    expected = {"ngram": 384 + 192, "structure": 128 + 128 + 512, "relation_bias": 64}
    assert found == {name: {Column.FEATURE_ACTIVATIONS: size} for name, size in expected.items()}


def test_mtp_is_an_attention_block_an_mlp_and_a_head() -> None:
    # embedding 512, hidden and embedding rstd 128, joined 1024, projected 512 (A's input); A as above without its input;
    # A's output 512 (the MLP's input), normed 512, rstd 64, up and act [2,8,10] 320 each; the MLP's output 512, normed 512, rstd 64; loss;
    # int64 ids of the next tokens
    features = {"mtp": {"depth": 1, "ffn_hidden_size": 10}}
    spec = spec_of("A", {"attention": GQA, "features": features})
    attention = saved_bytes(ledger_of(spec))
    expected = 512 + 128 + 1024 + 512 + attention + 512 + 512 + 64 + 640 + 512 + 512 + 64 + 1280 + 64 + 128
    assert saved_bytes(ledger_of(spec, "mtp.0")) == expected


@pytest.mark.parametrize("letter", ["A", "M", "R", "D"])
def test_tensor_parallel_halves_widths_and_residual_alike(letter: str) -> None:
    """Every kept tensor of these blocks halves under SP, but what all heads share."""
    sections: dict[str, Any] = {
        "attention": GQA,
        "mamba": {"kind": "mamba2", "head_dim": 8, "state_dim": 3, "num_groups": 2, "chunk_size": 3},
        "recurrent": {"kind": "m2rnn", "num_heads": 2, "key_dim": 3, "value_dim": 5, "save_every": 3},
        "mlp": {"ffn_hidden_size": 10},
    }
    one, two = (ledger_of(spec_of(letter, sections, mesh={"tp": tp})) for tp in (1, 2))
    shared = {"qk_proj", "qk", "gated_rstd"} if letter == "R" else set()
    sizes = {tensor.name: tensor.bytes for tensor in two.saved}
    assert sizes == {t.name: t.bytes if t.name in shared else t.bytes // 2 for t in one.saved}
    assert Column.COMMUNICATION in bytes_by_column(two.forward_live) | bytes_by_column(two.backward_live)


@pytest.mark.parametrize(("letter", "dropped"), [("A", {"lse", "attention"}), ("D", {"activation"}), ("M", {"projected", "conv"})])
def test_selective_recompute_drops_its_region(letter: str, dropped: set[str]) -> None:
    sections: dict[str, Any] = {
        "attention": GQA,
        "mamba": {"kind": "mamba2", "head_dim": 8, "state_dim": 3, "num_groups": 2, "chunk_size": 3},
        "mlp": {"ffn_hidden_size": 10},
    }
    none, selective = (
        {tensor.name for tensor in ledger_of(spec_of(letter, sections, recompute={"default": policy})).saved}
        for policy in ("none", "selective")
    )
    assert none - selective == dropped
    assert selective <= none


@pytest.mark.requirement("R-67")
def test_full_recompute_keeps_the_input_alone_and_the_last_layer_everything() -> None:
    spec = spec_of("D", {"mlp": {"ffn_hidden_size": 10}}, recompute={"default": "full"})
    assert ledger_of(spec, "layers.0").saved == ()
    assert ledger_of(spec, "layers.1") == ledger_of(spec.model_copy(update={"recompute": type(spec.recompute)()}), "layers.1")


@pytest.mark.requirement("R-67")
def test_experts_selective_keeps_router_and_dispatch() -> None:
    section = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
    none, selective = (
        {tensor.name for tensor in ledger_of(spec_of("E", {"moe": section}, recompute={"default": policy})).saved}
        for policy in ("none", "selective")
    )
    assert none - selective == {"experts.gate", "experts.up"}


def test_every_ledger_tensor_says_why_it_is_there() -> None:
    spec = spec_of("E", {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}})
    ledger = ledger_of(spec)
    assert all(tensor.why for tensor in (*ledger.saved, *ledger.forward_live, *ledger.backward_live))
    assert next(tensor.why for tensor in ledger.saved if tensor.name == "rows") == "kept by dispatch, experts, combine"
