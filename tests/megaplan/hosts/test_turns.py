"""Rules of pairs that take turns (`host.moe_overlap` under megarun)."""

from typing import Any

import pytest

from megaplan.errors import MegaplanError
from megaplan.spec.load import spec_from_document

V = {"pp": 2, "vpp": 2, "dp_shard": 2, "ep": 2}
SCHEDULE = {"kind": "dualpipev", "num_microbatches": 4}


MODEL = {
    "pattern": "AE",
    "num_layers": 8,
    "hidden_size": 64,
    "vocab_size": 128,
    "tie_embeddings": False,
    "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 32, "activation": "swiglu"},
}


def refused(**sections: Any) -> list[str]:
    """Keys that MP907 names."""
    features = sections.pop("features", {})
    document = {
        "format": "megaplan.spec/1",
        "name": "turns",
        "model": {**MODEL, "features": features},
        "mesh": V,
        "schedule": SCHEDULE,
        "batch": {"micro_batch_size": 1, "seq_length": 64},
        "host": {"moe_overlap": True},
        **sections,
    }
    try:
        spec_from_document(document)
    except MegaplanError as error:
        return [str(each.location.key) for each in error.diagnostics if each.code == "MP907"] or [str(error)]
    return []


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({}, []),
        ({"schedule": {"kind": "zbv", "num_microbatches": 4}}, ["schedule.kind"]),
        ({"mesh": {"pp": 2, "vpp": 2, "dp_shard": 2}}, ["mesh.ep"]),
        ({"host": {"moe_overlap": True, "moe_dispatcher": "allgather"}}, ["host.moe_dispatcher"]),
        ({"sharding": {"reshard_after_forward": True}}, ["sharding.reshard_after_forward"]),
        ({"features": {"mtp": {"depth": 1, "ffn_hidden_size": 64}}}, []),
    ],
)
def test_turns_without_a_pair_or_an_exchange_are_refused(sections: dict[str, Any], keys: list[str]) -> None:
    assert refused(**sections) == keys
