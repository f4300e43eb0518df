"""Side embeddings: the stream that they pass on, and its gradient, are activations, whatever is made of them outside of blocks."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import BF16, compare_distinct_ranks

pytestmark = pytest.mark.runtime
SMALL: dict[str, Any] = {
    "model.pattern": "EE",
    "model.num_layers": 2,
    "model.vocab_size": 1024,
    "model.hidden_size": 512,
    "model.moe": {"num_experts": 2, "top_k": 1, "ffn_hidden_size": 64},
    "batch": {"micro_batch_size": 1, "seq_length": 207},
    "host.kernels": "triton",
    "precision": BF16,
}
SIDES: dict[str, dict[str, Any]] = {
    "ngram": {"num_tables": 3, "num_rows": 40, "dim": 4},
    "structure": {"num_categories": 7, "bottleneck": 6},
    "platform": {"num_categories": 3, "bottleneck": 2},
}
STREAMS: dict[str, dict[str, Any]] = {
    "scaled": {"model.embedding_multiplier": 5.5},
    "normed": {"model.embedding_norm": True, "model.embedding_multiplier": 5.5},
    "plain-norms": {"model.norm": "rmsnorm_no_scale", "model.embedding_multiplier": 5.5},
}
WRAPS: dict[str, dict[str, Any]] = {
    "stage": {"sharding.wrap": "stage", "mesh": {"pp": 2, "dp_shard": 2}, "schedule.num_microbatches": 2},
    "block": {"mesh": {"dp_shard": 2}, "sharding.reshard_after_forward": True},
}


CASES = [("scaled", "stage"), ("scaled", "block"), ("normed", "stage"), ("normed", "block"), ("plain-norms", "stage")]


@pytest.mark.parametrize(("stream", "wrap"), CASES)
@pytest.mark.parametrize("sides", [("structure",), tuple(SIDES)], ids=["one", "all"])
def test_columns_are_those_of_the_estimate(sides: tuple[str, ...], stream: str, wrap: str, job_with: Callable[..., Any]) -> None:
    """The backward of the embedding is the peak, of a large vocabulary and small layers."""
    job = job_with({**SMALL, "model.features": {side: SIDES[side] for side in sides}, **STREAMS[stream], **WRAPS[wrap]})
    compare_distinct_ranks(job)


@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("degree", [1, 2])
def test_a_tied_head_makes_the_gradient_of_the_words_alone(degree: int, kernels: str, job_with: Callable[..., Any]) -> None:
    """The norm of a tied embedding has one gradient, of the embedding's backward."""
    tied = {"model.tie_embeddings": True, "model.embedding_norm": True, "model.vocab_size": 8192, "host.kernels": kernels}
    few = {"batch": {"micro_batch_size": 1, "seq_length": 16}, "schedule.num_microbatches": 3 - degree}
    compare_distinct_ranks(job_with({**SMALL, **tied, **few, "mesh": {"dp_shard": degree}}))
