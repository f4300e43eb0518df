"""The cost model's table of operations in plain torch, compared with what the roofline counts on their own code."""

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))  # rooflines

pytest.importorskip("triton")
from rooflines.runs import count_ranks  # noqa: E402
from rooflines.work import Work  # noqa: E402

import megaplan  # noqa: E402
from megaplan.cost.blocks import layer_ops, rank_workload  # noqa: E402
from megaplan.families.attention.tensors import attention_place  # noqa: E402
from megarun.job.job import Job  # noqa: E402

pytestmark = pytest.mark.runtime
SPEC: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "plain",
    "model": {
        **{"pattern": "AMERD", "num_layers": 5, "hidden_size": 512, "vocab_size": 4096},
        "attention": {"kind": "gqa", "num_heads": 8, "num_kv_heads": 2, "head_dim": 64},
        "mamba": {"kind": "mamba2", "num_heads": 16, "head_dim": 64, "state_dim": 128, "num_groups": 8, "chunk_size": 128},
        "moe": {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 896, "activation": "swiglu"},
        "recurrent": {"kind": "m2rnn", "num_heads": 16, "key_dim": 64, "value_dim": 16},
        "mlp": {"ffn_hidden_size": 2048},
    },
    "schedule": {"kind": "1f1b", "num_microbatches": 3},
    "batch": {"micro_batch_size": 1, "seq_length": 1024},
    "host": {"kernels": "reference"},
}
INDEXED = {
    "model": {
        **{"pattern": "AM", "num_layers": 2, "hidden_size": 512, "vocab_size": 4096},
        "attention": {
            **{"kind": "mla", "num_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64},
            **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
            "indexer": {"num_heads": 8, "head_dim": 64, "top_k": 128, "layers": [0]},
        },
        "mamba": {"kind": "mamba3", "expand": 2, "head_dim": 64, "state_dim": 128, "num_groups": 8, "mimo_rank": 4, "num_angles": 32},
    },
}
SHARING = {
    "model": {
        **{"pattern": "AA", "num_layers": 2, "hidden_size": 256, "vocab_size": 512},
        "attention": {
            **{"kind": "mla", "num_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64},
            **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
            "indexer": {"num_heads": 8, "head_dim": 64, "top_k": 128, "layers": [0], "shared_layers": [1]},
        },
    },
}
DELTA = {
    "model": {
        **{"pattern": "GD", "num_layers": 2, "hidden_size": 256, "vocab_size": 512, "mlp": {"ffn_hidden_size": 512}},
        "linear_attention": {"kind": "gated_delta", "num_key_heads": 4, "num_value_heads": 8, "key_dim": 64, "value_dim": 64},
    },
    "batch": {"micro_batch_size": 1, "seq_length": 256},
}
KIMI = DELTA | {"model": {**DELTA["model"], "linear_attention": {"kind": "kda", "num_heads": 4, "head_dim": 64}}}
CONVOLVED = {
    "model": {
        **{"pattern": "CM", "num_layers": 2, "hidden_size": 256, "vocab_size": 512},
        "short_convolution": {"bias": True},
        "mamba": {"kind": "mamba1"},
    },
    "batch": {"micro_batch_size": 1, "seq_length": 256},
}
NAMES = {
    **{"attention": "attention", "conv1d": "causal_conv1d", "ssd": "ssd", "gated_norm": "gated_rms_norm", "m2rnn": "m2rnn"},
    **{"dispatch": "dispatch", "combine": "combine", "experts": "experts_gated", "activation": "swiglu"},
    **{"indexer": "indexed_attention", "scan": "mamba3", "delta_rule": "gated_delta", "gated_conv": "gated_conv1d"},
    **{"selective_scan": "selective_scan", "masked": "chosen_attention"},
}
OF_HEADS = {"gated_norm": "head_gated_norm"}
"""Those of G blocks."""
"""Ops of the cost model, and the operations of megakernels that they are."""


def counted(spec: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Bytes of kernels without products, launches and FLOPs of each operation of the second microbatch, by part of the model."""
    loaded = megaplan.load(spec)
    found: dict[str, tuple[int, ...]] = {}
    for event in count_ranks(Job(loaded.spec, loaded.inventory, loaded.layout))[0]:
        if event.action is not None and event.action.microbatch == 1 and isinstance(event.done, Work):
            moved = sum(kernel.num_bytes for kernel in event.done.kernels if not kernel.products)
            found[f"{event.family} {event.done.op}"] = moved, event.done.launches, sum(event.done.product_flops.values())
    return found


def stated(spec: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The same by the table."""
    loaded, found = megaplan.load(spec), dict[str, tuple[int, ...]]()
    for index, block in enumerate(loaded.inventory.layers):
        load = rank_workload(loaded.spec, loaded.spec.precision.of(block.family))
        ops = layer_ops(load, loaded.spec.model, block)
        for op in ops:
            if op.name not in NAMES:
                continue
            own = OF_HEADS if block.family == "G" else {}
            core = op.name
            if op.name in ("attention", "masked", "indexer"):  # one operation of the runtime
                core = next((other.name for other in ops if other.name in ("indexer", "masked")), "attention")
            name = f"{block.family} megakernels.{own.get(core, NAMES[core])}"
            if core == "indexer" and attention_place(loaded.spec.model.attention, index).role == "source":
                name += "_choice"
            for side, done in zip(("", "_backward"), op.facts.plain(op.work, load.num_tokens), strict=True):
                before = found.get(name + side, (0, 0, 0)) if op.name in ("masked", "indexer") else (0, 0, 0)
                found[name + side] = tuple(map(sum, zip(before, (done.num_bytes, done.launches, done.flops), strict=True)))
    return found


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(SPEC, id="plain", marks=pytest.mark.slow),
        pytest.param(SPEC | INDEXED, id="indexed", marks=pytest.mark.slow),
        pytest.param(SPEC | SHARING, id="sharing", marks=pytest.mark.slow),
        pytest.param(SPEC | DELTA, id="delta", marks=pytest.mark.slow),
        pytest.param(SPEC | KIMI, id="kimi", marks=pytest.mark.slow),
        pytest.param(SPEC | CONVOLVED, id="convolved", marks=pytest.mark.slow),
    ],
)
def test_the_table_is_what_is_counted(spec: dict[str, Any]) -> None:
    """To a quarter in bytes and launches: the table has no term for the strides of operands."""
    ours, theirs = stated(spec), counted(spec)
    assert ours
    for name, (num_bytes, launches, _) in ours.items():
        assert 0.75 < num_bytes / theirs[name][0] < 1.34, name
        assert 0.75 < launches / theirs[name][1] < 1.34, name


LATENT = SHARING["model"]["attention"] | {"indexer": None}
WIDE = LATENT | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
GROUPED = {"kind": "gqa", "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
PACKED = {"data": {"packing": "documents"}}


@pytest.mark.parametrize("sequences", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("attention", "sections"),
    [
        pytest.param(LATENT, {}, id="keys of 96, values of 64"),
        pytest.param(WIDE, PACKED, id="keys of 192, values of 128, packed"),
        pytest.param(LATENT | {"window_size": 200}, {}, id="window", marks=pytest.mark.slow),
        pytest.param(GROUPED, {}, id="grouped", marks=pytest.mark.slow),
        pytest.param(GROUPED | {"num_kv_heads": 1, "score_cap": 30.0}, PACKED, id="one key head, cap", marks=pytest.mark.slow),
        pytest.param(GROUPED, {"mesh": {"tp": 2}, "precision": {"params": "fp32"}}, id="tensor ranks, fp32", marks=pytest.mark.slow),
    ],
)
def test_attention_follows_from_its_loop(attention: dict[str, Any], sections: dict[str, Any], sequences: int) -> None:
    """Bytes to a hundredth, launches and FLOPs exactly, for any widths, windows, documents and sequences."""
    model = {"pattern": "A", "num_layers": 1, "hidden_size": 256, "vocab_size": 512, "attention": attention}
    spec = SPEC | sections | {"model": model, "batch": {"micro_batch_size": sequences, "seq_length": 512}}
    ours, theirs = stated(spec), counted(spec)
    for name in ("A megakernels.attention", "A megakernels.attention_backward"):
        assert ours[name][0] == pytest.approx(theirs[name][0], rel=0.01), name
        assert ours[name][1:] == theirs[name][1:], name


@pytest.mark.parametrize("sequences", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("sizes", "sections"),
    [
        pytest.param({}, {}, id="as many heads", marks=pytest.mark.slow),
        pytest.param({"num_heads": 4, "head_dim": 128, "top_k": 300}, {"mesh": {"tp": 2}}, id="tensor ranks"),
    ],
)
def test_an_indexer_follows_from_its_loop(sizes: dict[str, Any], sections: dict[str, Any], sequences: int) -> None:
    """With the attention it runs in: bytes to a twentieth, launches to a tenth where a choice is packed too, and FLOPs exactly."""
    attention = SHARING["model"]["attention"] | {"indexer": SHARING["model"]["attention"]["indexer"] | sizes}
    spec = SPEC | sections | {"model": SHARING["model"] | {"attention": attention}}
    spec |= {"batch": {"micro_batch_size": sequences, "seq_length": 512}}
    ours, theirs = stated(spec), counted(spec)
    assert len(ours) == 4
    for name, (num_bytes, launches, flops) in ours.items():
        assert num_bytes == pytest.approx(theirs[name][0], rel=0.05), name
        assert launches == pytest.approx(theirs[name][1], rel=0.12), name
        assert flops == theirs[name][2], name
