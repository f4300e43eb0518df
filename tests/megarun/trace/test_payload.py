"""Values that layers pass on to later layers, in a stage and over its boundaries: the trace counts what the estimate does."""

from itertools import pairwise
from typing import Any

import pytest
from trace_checks import BF16, compare_distinct_ranks

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-14")]
HEADS = {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "qk_norm": True}
LATENTS = {"kind": "mla", "num_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16}
LATENTS["q_lora_rank"] = 16
LONG = {"batch": {"micro_batch_size": 2, "seq_length": 256}}
FULL, SELECTIVE = {"recompute": {"default": "full"}}, {"recompute": {"default": "selective"}}
RESHARD = {"sharding.reshard_after_forward": True}


def keys(*groups: tuple[int, list[int]], **more: Any) -> dict[str, Any]:
    return LONG | {"model.attention": HEADS | {"shared_keys": [{"source": source, "layers": layers} for source, layers in groups]} | more}


def choices(layers: list[int], shared: list[int]) -> dict[str, Any]:
    indexer = {"num_heads": 2, "head_dim": 8, "top_k": 16, "layers": layers, "shared_layers": shared}
    return LONG | {"model.attention": {**LATENTS, "indexer": indexer}, "batch.seq_length": 512}


def cut(*cuts: int, kind: str = "1f1b", pp: int | None = None, microbatches: int = 4, layers: int = 8, **mesh: int) -> dict[str, Any]:
    """Stages that begin at these layers."""
    spans = [list(span) for span in pairwise((0, *cuts, layers))]
    ranks = pp or len(spans)
    found: dict[str, Any] = {"mesh": {"pp": ranks, "vpp": len(spans) // ranks, **mesh}}
    found["split"] = {"mode": "manual", "reason": "a cut between a layer and its readers", "spans": spans}
    return found | {"schedule": {"kind": kind, "num_microbatches": microbatches}}


ONE = keys((0, [2, 6]))
TWO = keys((0, [4]), (2, [6]))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("ADADADAD", ONE),
    "alone, adjacent": ("AAAA", keys((0, [1, 2, 3]))),
    "alone, selective": ("ADADADAD", TWO | SELECTIVE),
    "alone, full": ("ADADADAD", ONE | FULL),
    "alone, full of attention": ("ADADADAD", TWO | {"recompute": {"blocks": {"A": "full"}}}),
    "alone, bf16": ("ADADADAD", ONE | {"precision": BF16}),
    "alone, kernels": ("ADADADAD", ONE | {"host.kernels": "triton", "precision": BF16}),
    "alone, shards": ("ADADADAD", ONE | RESHARD | {"mesh": {"dp_shard": 2}, "precision": BF16}),
    "alone, shards in bf16": ("ADADADAD", TWO | {"mesh": {"dp_shard": 2}, "precision": BF16 | {"grads": "bf16", "reduce": "bf16"}}),
    "alone, copies": ("ADADADAD", ONE | {"mesh": {"dp_replicate": 2}, "sharding.mode": "ddp", "precision": BF16}),
    "alone, tp": ("ADADADAD", ONE | {"mesh": {"tp": 2}}),
    "alone, cp": ("ADADADAD", ONE | {"mesh": {"cp": 2}}),
    "alone, tp, cp, full": ("ADADADAD", TWO | FULL | {"mesh": {"cp": 2, "tp": 2}}),
    "alone, wide layers between": ("ADADADAD", ONE | {"model.mlp.ffn_hidden_size": 2048}),
    "alone, norms behind": ("ADADADAD", ONE | {"model.norm_placement": "post"}),
    "alone, no norms, no rotation": ("ADADADAD", keys((0, [2, 6]), qk_norm=False, nope_layers=[0, 2, 6])),
    "alone, values normed": ("ADADADAD", keys((0, [2, 6]), value_norm=True)),
    "alone, values of keys": ("ADADADAD", keys((0, [2, 6]), value_norm=True, values_from_keys=True)),
    "alone, further tokens": ("ADADADAD", ONE | {"model.features": {"mtp": {"depth": 1, "ffn_hidden_size": 64}}}),
    "alone, packed rows": ("ADADADAD", ONE | {"data.packing": "documents"}),
    "stages": ("ADADADAD", ONE | cut(3)),
    "reader behind": ("ADADADAD", keys((0, [6])) | cut(4)),
    "source last": ("DADADADA", keys((1, [3, 5])) | cut(2)),
    "source alone": ("AAAD", keys((0, [1, 2])) | cut(1, layers=4)),
    "passed through": ("ADADADAD", keys((0, [2, 6])) | cut(2, 3, 5)),
    "only passed through": ("ADADADAD", keys((0, [6])) | cut(1, 2, 5)),
    "two groups": ("ADADADAD", TWO | cut(3, 5)),
    "stages, bf16": ("ADADADAD", TWO | cut(3, 5) | {"precision": BF16}),
    "stages, full": ("ADADADAD", TWO | cut(3, 5) | FULL),
    "source alone, full": ("AAAD", keys((0, [1, 2])) | cut(1, layers=4) | FULL),
    "stages, selective": ("ADADADAD", ONE | cut(3, 5) | SELECTIVE),
    "stages, kernels": ("ADADADAD", ONE | cut(3, 5) | {"host.kernels": "triton", "precision": BF16}),
    "stages, gpipe": ("ADADADAD", ONE | cut(3, 5, kind="gpipe")),
    "stages, tp": ("ADADADAD", ONE | cut(3, tp=2)),
    "stages, cp": ("ADADADAD", ONE | cut(3, cp=2)),
    "stages, cp, tp, full": ("ADADADAD", TWO | cut(3, cp=2, tp=2) | FULL),
    "stages, shards": ("ADADADAD", ONE | cut(3, dp_shard=2) | RESHARD | {"precision": BF16}),
    "stages, wrapped": ("ADADADAD", ONE | cut(3, dp_shard=2) | {"precision": BF16, "sharding.wrap": "stage"}),
    "stages, copies": ("ADADADAD", ONE | cut(3, dp_replicate=2) | {"sharding.mode": "ddp"}),
    "stages, shared norms": ("ADADADAD", TWO | cut(4) | {"model.parallel_layers": [1, 3, 7]}),
    "stages, norms behind": ("ADADADAD", TWO | cut(3, 5) | {"model.norm_placement": "post"}),
    "stages, two streams": ("ADADADAD", TWO | cut(3, 5) | {"model.streams": {"count": 2, "mixing": "independent"}}),
    "interleaved": ("ADADADAD", TWO | cut(1, 3, 5, kind="interleaved_1f1b", pp=2)),
    "looped": ("ADADADAD", ONE | cut(2, 4, 6, kind="looped_bfs", pp=2)),
    "zero bubble": ("ADADADAD", TWO | cut(2, 4, 6, kind="interleaved_zero_bubble", pp=2)),
    "zbv": ("ADADADAD", TWO | cut(1, 3, 5, kind="zbv", pp=2)),
    "zbv, full": ("ADADADAD", ONE | cut(1, 4, 5, kind="zbv", pp=2) | FULL),
    "zbv, norms behind": ("ADADADAD", ONE | cut(2, 3, 5, kind="zbv", pp=2) | {"model.norm_placement": "post"}),
    "zbv, no norms, no rotation": ("ADADADAD", keys((0, [2, 6]), qk_norm=False, nope_layers=[0, 2, 6]) | cut(1, 3, 5, kind="zbv", pp=2)),
    "dualpipev": ("ADADADAD", TWO | cut(2, 3, 6, kind="dualpipev", pp=2)),
    "dualpipe": ("ADADADAD", TWO | cut(3, kind="dualpipe")),
    "earlier values": ("ADADADAD", TWO | cut(3, 5) | {"model.attention_residuals": {"group_layers": 3}}),
    "earlier values, alone": ("ADADADAD", TWO | {"model.attention_residuals": {"group_layers": 2}}),
    "earlier values, dtypes of families": (
        "ADADADAD",
        TWO | cut(3, 5) | {"model.attention_residuals": {"group_layers": 3}, "precision": {**BF16, "families": {"A": "fp32"}}},
    ),
    "earlier values, dtypes of families, factors, full": (
        "ADADADAD",
        TWO
        | FULL
        | cut(4)
        | {
            "model.attention_residuals": {"group_layers": 1},
            "model.mlp.output_multiplier": 0.5,
            "model.norm_placement": "both",
            "precision": {**BF16, "params": "fp32", "families": {"D": "bf16"}},
        },
    ),
    "experts": ("AEAEAEAE", TWO | cut(3, dp_shard=2, ep=2) | RESHARD | {"precision": BF16}),
    "experts, paired 1f1b": (
        "AEAEAEAE",
        TWO | cut(3, 5, kind="paired_1f1b", microbatches=6, dp_shard=2, ep=2) | {"precision": BF16, "host.moe_overlap": True},
    ),
    "experts, dualpipev": (
        "AEAEAEAE",
        TWO | cut(1, 3, 5, kind="dualpipev", pp=2, dp_shard=2, ep=2) | {"precision": BF16, "host.moe_overlap": True},
    ),
    "choices": ("ADADADAD", choices([0], [2, 6]) | cut(3)),
    "choices, passed through": ("ADADADAD", choices([0], [6]) | cut(1, 2, 5)),
    "choices, full": ("ADADADAD", choices([0, 4], [2, 6]) | cut(1, 3, 5) | FULL),
    "choices, bf16, kernels": ("ADADADAD", choices([0], [2, 6]) | cut(3) | {"host.kernels": "triton", "precision": BF16}),
    "choices, cp, tp": ("ADADADAD", choices([0], [2, 6]) | cut(3, cp=2, tp=2)),
    "choices, zbv": ("ADADADAD", choices([0, 4], [2, 6]) | cut(1, 3, 5, kind="zbv", pp=2)),
    "choices, dualpipev": ("ADADADAD", choices([0], [2, 4, 6]) | cut(1, 3, 5, kind="dualpipev", pp=2)),
}
QUICK = ("alone", "passed through", "zbv", "choices")
"""Cases that CI traces."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES])
def test_values_of_earlier_layers_are_counted_once(job_with: Any, name: str) -> None:
    pattern, settings = CASES[name]
    compare_distinct_ranks(job_with({"model.pattern": pattern, "model.num_layers": len(pattern), **settings}))
