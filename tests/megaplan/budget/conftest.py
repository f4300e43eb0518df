"""Small specs with every family and feature, and the flagship."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from megaplan.budget.peaks import build_budget
from megaplan.budget.values import Budget
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec

HYBRID: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "hybrid",
    "model": {
        "pattern": "AEMRD",
        "num_layers": 10,
        "hidden_size": 64,
        "vocab_size": 512,
        "attention": {"kind": "gqa", "num_heads": 8, "num_kv_heads": 4, "head_dim": 8},
        "mamba": {"kind": "mamba2", "head_dim": 16, "state_dim": 16, "num_groups": 4, "chunk_size": 16},
        "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 32, "shared_ffn_hidden_size": 32},
        "recurrent": {"kind": "m2rnn", "num_heads": 8, "key_dim": 8, "value_dim": 8, "save_every": 16},
        "mlp": {"ffn_hidden_size": 128},
        "features": {
            "ngram": {"num_tables": 4, "num_rows": 1024, "dim": 8},
            "structure": {"num_categories": 16, "bottleneck": 8},
            "mtp": {"depth": 1, "ffn_hidden_size": 128},
        },
    },
    "mesh": {"pp": 2, "dp_shard": 2},
    "sharding": {"reshard_after_forward": False},
    "schedule": {"num_microbatches": 8},
    "batch": {"micro_batch_size": 2, "seq_length": 64},
    "host": {"kernels": "reference"},
}

NAM56R: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "nam56r-8xh200",
    "model": {
        "pattern": "AEMEAEMEAEMR",
        "num_layers": 52,
        "hidden_size": 3584,
        "vocab_size": 65536,
        "attention": {
            "kind": "mla",
            "num_heads": 28,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "indexer": {"num_heads": 8, "head_dim": 64, "layers": [4, 8, 12, 20, 24, 28, 36, 40, 44]},
        },
        "mamba": {"kind": "mamba3", "expand": 2, "head_dim": 64, "state_dim": 128, "num_groups": 8, "mimo_rank": 4, "num_angles": 32},
        "moe": {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 896, "shared_ffn_hidden_size": 1024, "activation": "relu2"},
        "recurrent": {"kind": "m2rnn", "num_heads": 44, "key_dim": 64, "value_dim": 16},
        "features": {
            "ngram": {"num_tables": 16, "num_rows": 7998862, "dim": 16},
            "structure": {"num_categories": 25, "bottleneck": 64},
            "mtp": {"depth": 1, "ffn_hidden_size": 18944},
        },
    },
    "mesh": {"pp": 2, "vpp": 2, "dp_shard": 4},
    "sharding": {"reshard_after_forward": False},
    "schedule": {"kind": "interleaved_1f1b", "num_microbatches": 16},
    "batch": {"micro_batch_size": 4, "seq_length": 4096},
    "serving": {"batch_size": 32, "context_length": 32768, "cache": "paged"},
}

Spans = Sequence[tuple[int, int]]


def _with(base: dict[str, Any], overrides: dict[str, Any]) -> Spec:
    values = copy.deepcopy(base)
    for key, value in overrides.items():
        *path, last = key.split(".")
        section = values
        for step in path:
            section = section.setdefault(step, {})
        section[last] = value
    return Spec.model_validate(values)


@pytest.fixture(scope="session")
def hybrid() -> Callable[..., Spec]:
    """The small hybrid with dotted keys replaced."""
    return lambda overrides=None: _with(HYBRID, overrides or {})


@pytest.fixture(scope="session")
def nam56r() -> Callable[..., Spec]:
    """The flagship with dotted keys replaced."""
    return lambda overrides=None: _with(NAM56R, overrides or {})


@pytest.fixture(scope="session")
def budget_of() -> Callable[..., Budget]:
    """The budget of a spec cut into equal spans, or into given ones."""

    def build(spec: Spec, spans: Spans | None = None) -> Budget:
        inventory = build_inventory(spec)
        return build_budget(spec, inventory, build_layout(spec, inventory, spans or equal_spans(spec)))

    return build


def equal_spans(spec: Spec) -> Spans:
    slots, layers = spec.mesh.pp * spec.mesh.vpp, spec.model.num_layers
    cuts = [layers * index // slots for index in range(slots + 1)]
    return list(pairwise(cuts))
