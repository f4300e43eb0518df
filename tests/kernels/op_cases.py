"""One case for each operation, and each setting that changes what it computes or keeps."""

import math
from functools import partial

import torch
from op_exact import (
    EPS,
    TOP_K,
    angles,
    exact_attention,
    exact_conv,
    exact_conv_after,
    exact_gated_rms_norm,
    exact_indexed_attention,
    exact_linear_cross_entropy,
    exact_m2rnn,
    exact_mamba3,
    exact_mla_kv,
    exact_rms_norm,
    exact_rope,
    exact_ssd,
)
from op_makers import BATCH, Case, attention_case, expert_case, indexed_case, mamba3_case, packed, plan, route_case, routed_case, ssd_case
from torch.nn import functional

from megakernels.activation import gelu, relu2, swiglu
from megakernels.attention import attention
from megakernels.causal_conv1d import causal_conv1d
from megakernels.cross_entropy import cross_entropy
from megakernels.indexed_attention import indexed_attention
from megakernels.linear_cross_entropy import linear_cross_entropy
from megakernels.m2rnn import m2rnn
from megakernels.mamba3 import mamba3
from megakernels.moe import combine, dispatch
from megakernels.rms_norm import add_rms_norm, gated_rms_norm, rms_norm
from megakernels.rope import mla_kv, rope
from megakernels.side_embedding import gated_add
from megakernels.ssd import ssd

CASES = [
    Case(
        "rms_norm",
        lambda n, t: {"x": n(BATCH, t, 37), "weight": n(37)},
        lambda i: (rms_norm(i["x"], i["weight"], EPS),),
        lambda i: (exact_rms_norm(i["x"], i["weight"]),),
        ("x", "weight"),
        lambda t: [((BATCH, t), "accumulator")],
    ),
    Case(
        "add_rms_norm",
        lambda n, t: {"x": n(BATCH, t, 37), "branch": n(BATCH, t, 37), "weight": n(37)},
        lambda i: add_rms_norm(i["x"], i["branch"], i["weight"], EPS),
        lambda i: (i["x"] + i["branch"], exact_rms_norm(i["x"] + i["branch"], i["weight"])),
        ("weight",),
        lambda t: [((BATCH, t), "accumulator")],
        saved_outputs=(0,),
        alike=("branch",),
    ),
    Case(
        "gated_rms_norm",
        lambda n, t: {"x": n(BATCH, t, 39), "gate": n(BATCH, t, 39), "weight": n(39)},
        lambda i: (gated_rms_norm(i["x"], i["gate"], i["weight"], EPS, 3),),
        lambda i: (exact_gated_rms_norm(i["x"], i["gate"], i["weight"], 3),),
        ("x", "gate", "weight"),
        lambda t: [((BATCH, t, 3), "accumulator")],
    ),
    Case(
        "swiglu",
        lambda n, t: {"gate": n(BATCH, t, 21), "up": n(BATCH, t, 21)},
        lambda i: (swiglu(i["gate"], i["up"]),),
        lambda i: (functional.silu(i["gate"]) * i["up"],),
        ("gate", "up"),
    ),
    Case("relu2", lambda n, t: {"x": n(BATCH, t, 21)}, lambda i: (relu2(i["x"]),), lambda i: (functional.relu(i["x"]) ** 2,), ("x",)),
    Case(
        "gelu",
        lambda n, t: {"x": n(BATCH, t, 21)},
        lambda i: (gelu(i["x"]),),
        lambda i: (functional.gelu(i["x"], approximate="tanh"),),
        ("x",),
    ),
    Case(
        "rope",
        lambda n, t: {"x": n(BATCH, t, 3, 10), **angles(n, t, 3)},
        lambda i: (rope(**i),),
        lambda i: (exact_rope(**i),),
        ("cos", "sin"),
        constant=("cos", "sin"),
    ),
    Case(
        "mla_kv",
        lambda n, t: {"kv": n(BATCH, t, 3, 11), "k_rope": n(BATCH, t, 6), **angles(n, t, 3)},
        lambda i: mla_kv(**i, nope_dim=4),
        lambda i: exact_mla_kv(**i, nope_dim=4),
        ("cos", "sin"),
        constant=("cos", "sin"),
    ),
    attention_case("attention", 3, 3, 12, 12, None),
    attention_case("attention_grouped_unequal", 6, 2, 5, 7, None),
    attention_case("attention_window", 4, 2, 5, 5, 9),
    indexed_case("indexed_attention", 11, None),
    indexed_case("indexed_attention_window", 4, 9),
    Case(
        "causal_conv1d",
        lambda n, t: {"x": n(BATCH, t, 11), "weight": n(11, 4), "bias": n(11)},
        lambda i: (causal_conv1d(**i, silu=True),),
        lambda i: (exact_conv(**i, silu=True),),
        ("x", "weight", "bias"),
    ),
    Case(
        "causal_conv1d_plain",
        lambda n, t: {"x": n(BATCH, t, 11), "weight": n(11, 3)},
        lambda i: (causal_conv1d(i["x"], i["weight"], None, silu=False),),
        lambda i: (exact_conv(i["x"], i["weight"], None, silu=False),),
        ("x", "weight"),
    ),
    Case(
        "causal_conv1d_initial",
        lambda n, t: {"x": n(BATCH, t, 11), "weight": n(11, 4), "bias": n(11), "initial": n(BATCH, 3, 11)},
        lambda i: (causal_conv1d(**i, silu=True),),
        lambda i: (exact_conv_after(**i, silu=True),),
        ("x", "weight", "bias", "initial"),
    ),
    ssd_case("ssd", 64, 2),
    ssd_case("ssd_one_group_small_chunks", 16, 1),
    ssd_case("ssd_limited", 32, 2, (0.08, 0.4)),
    Case(
        "m2rnn",
        lambda n, t: {
            "q": n(BATCH, t, 5),
            "k": n(BATCH, t, 5),
            "v": n(BATCH, t, 3, 6),
            "f": n(BATCH, t, 3),
            "state_map": n(3, 6, 6) / math.sqrt(6),
            "D": n(3, 6),
            "dt_bias": n(3) - 1,
            "A_log": n(3).abs().mul(2).log1p(),
        },
        lambda i: (m2rnn(**i, save_every=32),),
        lambda i: (exact_m2rnn(**i),),
        ("q", "k", "v", "f", "state_map", "D", "dt_bias", "A_log"),
        lambda t: [((BATCH, math.ceil(t / 32) + 1, 3, 5, 6), "accumulator")],
    ),
    mamba3_case("mamba3", 32, 3, 2),
    mamba3_case("mamba3_single_unrotated", 64, 1, 0),
    mamba3_case("mamba3_single", 16, 1, 2, save_every=40, heavy_tail=True),
    route_case(normalize=True),
    route_case(normalize=False),
    Case(
        "gated_add",
        lambda n, t: {"x": n(BATCH, t, 7), "side": n(BATCH, t, 7), "gates": n(2)},
        lambda i: (gated_add(**i),),
        lambda i: (i["x"] + i["gates"][1] * i["gates"][0].tanh() * i["side"],),
        ("side", "gates"),
    ),
    Case(
        "dispatch",
        lambda n, t: {"x": n(t, 9), "rows": plan(t)["rows"]},
        lambda i: (dispatch(i["x"], i["rows"], TOP_K),),
        lambda i: (torch.stack([i["x"][row // TOP_K] for row in i["rows"].tolist()]),),
        ("rows",),
    ),
    Case(
        "combine",
        lambda n, t: {"x": n(t * TOP_K, 9), "rows": plan(t)["rows"]},
        lambda i: (combine(i["x"], i["rows"], TOP_K),),
        lambda i: (torch.zeros(i["x"].shape[0] // TOP_K, 9, dtype=i["x"].dtype).index_add(0, i["rows"].long() // TOP_K, i["x"]),),
        ("rows",),
    ),
    expert_case("swiglu", 16, 24),
    expert_case("swiglu", 7, 9),
    expert_case("relu2", 24, 8),
    expert_case("gelu", 5, 6),
    routed_case("swiglu", 16, 24),
    routed_case("gelu", 5, 6),
    Case(
        "cross_entropy",
        lambda n, t: {"logits": n(t, 23) * 3, "labels": torch.where(torch.arange(t) % 5 == 3, -100, torch.arange(t) * 7 % 23)},
        lambda i: (cross_entropy(i["logits"], i["labels"]),),
        lambda i: (functional.cross_entropy(i["logits"], i["labels"], reduction="sum"),),
        ("logits", "labels"),
        lambda t: [((t,), "accumulator")],
    ),
    Case(
        "linear_cross_entropy",
        lambda n, t: {
            "x": n(t, 12),
            "weight": n(23, 12) / 2,
            "labels": torch.where(torch.arange(t) % 5 == 3, -100, torch.arange(t) * 7 % 23),
        },
        lambda i: (linear_cross_entropy(i["x"], i["weight"], i["labels"], z_loss=0.03),),
        lambda i: (exact_linear_cross_entropy(i["x"], i["weight"], i["labels"], 0.03),),
        ("x", "weight", "labels"),
        lambda t: [((t,), "accumulator")],
    ),
]


_BY_NAME = {case.name: case for case in CASES}
CASES += [
    packed(
        _BY_NAME["attention_grouped_unequal"],
        partial(attention, scale=0.3),
        partial(exact_attention, scale=0.3, window=None),
        ("q", "k", "v"),
    ),
    packed(
        _BY_NAME["attention_window"],
        partial(attention, scale=0.3, window=9),
        partial(exact_attention, scale=0.3, window=9),
        ("q", "k", "v"),
    ),
    packed(
        _BY_NAME["indexed_attention"],
        partial(indexed_attention, scale=0.3, top_k=11, loss_factor=0.7, eps=EPS),
        partial(exact_indexed_attention, top_k=11, loss_factor=0.7),
        ("q", "k", "v", "index_q", "index_k", "index_weights"),
    ),
    packed(_BY_NAME["causal_conv1d"], partial(causal_conv1d, silu=True), partial(exact_conv, silu=True), ("x",)),
    packed(_BY_NAME["ssd"], partial(ssd, chunk_size=64), exact_ssd, ("x", "dt", "B", "C")),
    packed(_BY_NAME["ssd_one_group_small_chunks"], partial(ssd, chunk_size=16), exact_ssd, ("x", "dt", "B", "C")),
    packed(_BY_NAME["mamba3"], partial(mamba3, chunk_size=32), exact_mamba3, ("x", "z", "B", "C", "dt", "A", "trapezoid", "angles")),
    packed(
        _BY_NAME["mamba3_single"],
        partial(mamba3, **dict.fromkeys(("mimo_x", "mimo_z", "mimo_o")), chunk_size=16, save_every=40, heavy_tail=True),
        partial(exact_mamba3, heavy_tail=True),
        ("x", "z", "B", "C", "dt", "A", "trapezoid", "angles"),
    ),
    packed(_BY_NAME["m2rnn"], partial(m2rnn, save_every=32), exact_m2rnn, ("q", "k", "v", "f")),
]
