"""Depths of multi-token prediction of other blocks than the plain ones: the trace counts what the estimate does."""

from collections.abc import Callable
from typing import Any

import pytest
from trace_checks import compare_distinct_ranks

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-10")]
BF16 = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}
TWO = {"schedule.num_microbatches": 2}


def _depths(depth: int = 1, **more: Any) -> dict[str, Any]:
    return {"model.features.mtp": {"depth": depth, "ffn_hidden_size": 40, **more}}


CASES = {
    "swiglu": ("AD", _depths(2, activation="swiglu")),
    "gelu-bias-tp-vocabulary": ("AD", _depths(activation="gelu", bias=True) | {"mesh": {"tp": 2, "vocab_parallel": True}}),
    "swiglu-bias-pp-bf16": ("AD", TWO | _depths(2, activation="swiglu", bias=True) | {"mesh": {"pp": 2}, "precision": BF16}),
    "swiglu-bias-cp-tp-tied": ("AD", _depths(activation="swiglu", bias=True) | {"mesh": {"cp": 2, "tp": 2}, "model.tie_embeddings": True}),
}


@pytest.mark.parametrize(("pattern", "settings"), CASES.values(), ids=CASES)
def test_estimate_is_what_the_runtime_allocates(job_with: Callable[..., Any], pattern: str, settings: dict[str, Any]) -> None:
    """Of every distinct rank, in every column, but for scalars."""
    compare_distinct_ranks(job_with({"model.pattern": pattern, "model.num_layers": 2, **settings}))
