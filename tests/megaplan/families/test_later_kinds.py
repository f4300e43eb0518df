"""Linear attention, short convolution and Mamba-1: tensors, a block's saved tensors, and FLOPs, counted by hand."""

from typing import Any

import pytest
from ideal_works import delta_rule, selective_scan

from megakernels.ops.gated_conv1d.facts import GatedConvolutionSizes
from megaplan.blocks.work import Workload
from megaplan.budget.serving import serving_budget
from megaplan.errors import MegaplanError
from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.inventory.build import build_inventory
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import GatedDeltaNet, KimiDeltaAttention, Mamba3, Spec

H, B, T = 96, 2, 100
GATED = {"kind": "gated_delta", "num_key_heads": 2, "num_value_heads": 4, "key_dim": 6, "value_dim": 10, "save_every": 32}
KDA = {"kind": "kda", "num_heads": 4, "head_dim": 12, "save_every": 32}
MAMBA1 = {"kind": "mamba1", "expand": 2, "state_dim": 4, "dt_rank": 5, "save_every": 64}


def spec_of(pattern: str, sections: dict[str, Any], **more: Any) -> Spec:
    model = {"pattern": pattern, "num_layers": 2, "hidden_size": H, "vocab_size": 128, **sections}
    batch = {"micro_batch_size": B, "seq_length": T}
    return spec_from_document({"format": "megaplan.spec/1", "name": "n", "model": model, "batch": batch, **more})


def elements(spec: Spec) -> dict[str, int]:
    return {tensor.name: tensor.elements for tensor in build_inventory(spec).layers[0].tensors}


def kept(spec: Spec, layer: int = 0) -> dict[str, int]:
    """Bytes by storage."""
    inventory, name = build_inventory(spec), f"layers.{layer}"
    return {tensor.name: tensor.bytes for tensor in block_ledger(spec, name, inventory.block(name)).saved}


def test_tensors_of_a_gated_delta_net() -> None:
    keys, values, heads = 2 * 6, 4 * 10, 4
    assert elements(spec_of("G", {"linear_attention": GATED})) == {
        "norm.weight": H, "qk_proj.weight": 2 * keys * H, "v_proj.weight": values * H, "beta_proj.weight": heads * H,
        "decay_proj.weight": heads * H, "gate_proj.weight": values * H, "conv_qk.weight": 2 * keys * 4, "conv_v.weight": values * 4,
        "A_log": heads, "dt_bias": heads, "gated_norm.weight": 10, "out_proj.weight": values * H,
    }  # fmt: skip


def test_tensors_of_kimi_delta_attention() -> None:
    inner = 4 * 12
    assert elements(spec_of("G", {"linear_attention": KDA})) == {
        "norm.weight": H, "qk_proj.weight": 2 * inner * H, "v_proj.weight": inner * H, "beta_proj.weight": 4 * H,
        "latent_proj.weight": 2 * 12 * H, "decay_up.weight": inner * 12, "gate_up.weight": inner * 12, "conv_qk.weight": 2 * inner * 4,
        "conv_v.weight": inner * 4, "A_log": 4, "dt_bias": inner, "gated_norm.weight": 12, "out_proj.weight": inner * H,
    }  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
def test_tensors_of_a_short_convolution(bias: bool) -> None:
    """A block like LFM2's: a projection of three widths, a convolution of K taps, an output."""
    found = elements(spec_of("C", {"short_convolution": {"conv_kernel": 3, "bias": bias}}))
    assert sum(found.values()) == H + 3 * H * H + 3 * H + H * H + bias * (3 * H + H + H)


@pytest.mark.parametrize("norms", ["none", "plain", "scaled"])
def test_tensors_of_mamba_1(norms: str) -> None:
    inner, scales = 2 * H, 5 + 2 * 4 if norms == "scaled" else 0
    found = elements(spec_of("M", {"mamba": MAMBA1 | {"inner_norm": norms, "bias": True}}))
    body = 2 * inner * H + 5 * inner + (5 + 2 * 4) * inner + 5 * inner + inner + 4 * inner + inner + inner * H
    assert sum(found.values()) == H + body + 2 * inner + H + scales


def test_the_latent_of_steps_is_a_sixteenth_rounded_up() -> None:
    rank = elements(spec_of("M", {"mamba": {"kind": "mamba1"}}, batch={"micro_batch_size": 1, "seq_length": 8}))["dt_proj.weight"]
    assert rank == 2 * H * 6


TOKENS, STREAM = B * T, B * T * H * 2


def test_what_a_gated_delta_net_keeps() -> None:
    """Inputs of the convolutions and of the delta rule once each, a state every 32 positions, the inputs of the norm and the output."""
    keys, values, heads = 2 * 6, 4 * 10, 4
    wide = {
        "qk_proj": 2 * keys, "qk": 2 * keys, "v_proj": values, "v": values, "y": values, "gate": values, "gated": values, "beta": heads,
        "decay": heads,
    }  # fmt: skip
    assert kept(spec_of("G", {"linear_attention": GATED})) == {
        "normed": STREAM, "rstd": TOKENS * 4, "gated_rstd": TOKENS * heads * 4, "states": B * 4 * heads * 6 * 10 * 4,
        **{name: TOKENS * width * 2 for name, width in wide.items()},
    }  # fmt: skip


def test_what_selective_recompute_keeps_of_a_gated_delta_net() -> None:
    """Projections and convolutions run again; the results of the delta rule and the norm are saved."""
    whole = kept(spec_of("G", {"linear_attention": GATED}))
    again = kept(spec_of("G", {"linear_attention": GATED}, recompute={"default": "selective"}))
    assert set(whole) - set(again) == {"qk_proj", "qk", "v_proj", "v", "gate", "beta", "decay"}
    assert {name: whole[name] for name in again} == again


def test_kimi_delta_attention_keeps_a_decay_a_key_dim() -> None:
    found = kept(spec_of("G", {"linear_attention": KDA}))
    assert (found["decay"], found["latents"]) == (TOKENS * 4 * 12 * 2, TOKENS * 2 * 12 * 2)


def test_what_a_short_convolution_keeps() -> None:
    found = kept(spec_of("C", {"short_convolution": {}}))
    assert found == {
        "normed": STREAM, "rstd": TOKENS * 4, **dict.fromkeys(("input_gate", "output_gate", "value", "mixed"), STREAM)
    }  # fmt: skip


def test_what_mamba_1_keeps() -> None:
    inner = TOKENS * 2 * H * 2
    normed = {name: TOKENS * width * 2 for name, width in (("dt_latent_normed", 5), ("B_normed", 4), ("C_normed", 4))}
    found = kept(spec_of("M", {"mamba": MAMBA1 | {"inner_norm": "scaled"}}))
    assert found == {
        "normed": STREAM, "rstd": TOKENS * 4, "projected": 2 * inner, **dict.fromkeys(("x_conv", "dt", "y", "gated"), inner),
        "steps": TOKENS * 13 * 2, **normed, **dict.fromkeys(("dt_latent_rstd", "B_rstd", "C_rstd"), TOKENS * 4),
        "states": B * 2 * 2 * H * 4 * 4,
    }  # fmt: skip


def test_flops_of_the_delta_rule_product_by_product() -> None:
    """Chunks of Q positions of one head: whole Q × Q tiles, and a triangular system by substitution, Q · Q / 2 multiply-adds a column."""
    gated = GatedDeltaNet.model_validate(GATED | {"num_key_heads": 1, "num_value_heads": 1, "chunk_size": 16, "save_every": 64})
    q, k, v = 16, 6, 10
    products = [(q, k, q), (q, k, q), (q, q, v), (q, k, v), (q, k, v), (k, q, v)]
    chunk = sum(2 * m * n * p for m, n, p in products) + q * q * v
    work = delta_rule(Workload(seq_length=64, num_tokens=64, itemsize=2), gated)
    assert work.forward * q == chunk
    again = chunk - 2 * q * q * v - 2 * q * k * v
    assert work.recomputed * q == again
    assert work.input_grad == 2 * work.forward + work.recomputed


def test_a_decay_a_key_dim_moves_more_and_multiplies_as_much() -> None:
    load = Workload(seq_length=64, num_tokens=64, itemsize=2)
    one = GatedDeltaNet.model_validate(
        {"kind": "gated_delta", "num_key_heads": 4, "num_value_heads": 4, "key_dim": 12, "value_dim": 12, "save_every": 32}
    )
    each = KimiDeltaAttention.model_validate(KDA)
    plain, fine = delta_rule(load, one), delta_rule(load, each)
    assert fine.forward == plain.forward
    assert fine.moved_forward - plain.moved_forward == 4 * 11 * 2


def test_flops_of_the_selective_scan_and_of_the_gated_convolution() -> None:
    load = Workload(seq_length=64, num_tokens=64, itemsize=2)
    scan = selective_scan(load, channels=3, state_dim=4, save_every=64)
    assert (scan.forward, scan.input_grad, scan.recomputed) == (5 * 12, 14 * 12, 3 * 12)
    short = GatedConvolutionSizes(1, 64, 8, 3, False, 2).work()
    assert (short.forward, short.input_grad, short.weight_grad, short.recomputed) == (48, 96, 48, 48)


def test_states_of_served_sequences() -> None:
    """The delta rule's state and the convolutions' last inputs, of every G layer; a C layer has the inputs alone."""
    spec = spec_of("GC", {"linear_attention": GATED, "short_convolution": {}}, serving={"batch_size": 3, "context_length": 50})
    found = serving_budget(spec, build_inventory(spec))
    assert found is not None
    delta, inputs = 4 * 6 * 10 * 4, (2 * 12 + 40) * 3 * 2
    assert found.recurrent_state_bytes == 3 * (delta + inputs + H * 2 * 2)


REFUSED = [
    ({"linear_attention": GATED | {"num_value_heads": 5}}, "G", {}, "MP701"),
    ({"linear_attention": GATED}, "G", {"mesh": {"tp": 4}}, "MP201"),
    ({"linear_attention": GATED}, "G", {"recompute": {"default": "full"}}, "MP720"),
    ({"short_convolution": {}}, "C", {"mesh": {"tp": 5}}, "MP201"),
    ({"short_convolution": {"conv_kernel": 60}}, "C", {"mesh": {"cp": 2}}, "MP207"),
    ({"mamba": MAMBA1}, "M", {"mesh": {"tp": 5}}, "MP201"),
]


@pytest.mark.parametrize(("sections", "pattern", "more", "code"), REFUSED)
def test_what_does_not_fit_is_refused(sections: dict[str, Any], pattern: str, more: dict[str, Any], code: str) -> None:
    with pytest.raises(MegaplanError) as caught:
        spec_of(pattern, sections, **more)
    assert code in {found.code for found in caught.value.diagnostics}


@pytest.mark.parametrize(("rank", "positions"), [(1, 64), (4, 16), (5, 12), (64, 1), (100, 1)])
def test_a_scan_of_mamba_3_computes_64_rows_at_once(rank: int, positions: int) -> None:
    mamba = {"kind": "mamba3", "head_dim": 16, "state_dim": 16, "mimo_rank": rank}
    section = spec_of("M", {"mamba": mamba}).model.mamba
    assert isinstance(section, Mamba3)
    assert section.chunk_positions == positions
