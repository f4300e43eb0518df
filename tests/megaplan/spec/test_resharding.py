"""`sharding.reshard_after_forward` by default: as FSDP2 has it where one pipeline rank shards, and never under Megatron-Core."""

from fractions import Fraction
from typing import Any

import pytest

import megaplan
from megaplan.advice.changes import Edit, changed, texts
from megaplan.spec.load import spec_from_document
from megaplan.spec.schema import spec_schema

LLAMA: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "small",
    "model": {
        **{"pattern": "AD", "num_layers": 4, "hidden_size": 256, "vocab_size": 512, "mlp": {"ffn_hidden_size": 512}},
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 4, "head_dim": 64},
    },
    "mesh": {"dp_shard": 4},
    "schedule": {"num_microbatches": 4},
    "batch": {"micro_batch_size": 1, "seq_length": 64},
}
EXPERTS = "model={pattern: E, num_layers: 4, hidden_size: 64, vocab_size: 512, moe: {num_experts: 4, top_k: 2, ffn_hidden_size: 32}}"


@pytest.mark.parametrize(
    ("changes", "frees"),
    [
        ((), True),
        (("sharding.prefetch=2",), True),
        (("host.name=torchtitan", "optimizer.matrix=adamw"), True),
        (("mesh={tp: 2}", EXPERTS), True),
        (("mesh={tp: 2}",), False),
        (("mesh.dp_shard=1",), False),
        (("mesh={dp_replicate: 4}",), False),
        (("mesh={pp: 2, dp_shard: 4}",), False),
        (("sharding.mode=ddp",), False),
        (("host={name: megatron}", "optimizer.matrix=adamw"), False),
        (("sharding.reshard_after_forward=false",), False),
        (("mesh={pp: 2, dp_shard: 4}", "sharding.reshard_after_forward=true"), True),
    ],
    ids=str,
)
def test_the_default_is_that_of_fsdp2(changes: tuple[str, ...], frees: bool) -> None:
    assert megaplan.load(LLAMA, *changes).spec.sharding.reshard_after_forward is frees


def test_a_plan_keeps_the_value_that_it_was_made_with() -> None:
    inputs = megaplan.load(LLAMA).spec.as_document()
    assert inputs["sharding"] == {"reshard_after_forward": True}
    earlier = inputs | {"sharding": {"reshard_after_forward": False}}
    assert spec_from_document(earlier).sharding.reshard_after_forward is False


def test_a_change_of_the_mesh_is_priced_and_printed_with_the_default_that_it_gets() -> None:
    spec, moved = megaplan.load(LLAMA).spec, (Edit("mesh", factors=(("dp_shard", Fraction(1, 2)), ("pp", Fraction(2)))),)
    after = changed(spec, moved)
    assert after is not None
    assert after.sharding.reshard_after_forward is False
    assert "sharding.reshard_after_forward=false" in texts(spec, after)
    assert megaplan.load(LLAMA, *texts(spec, after)).spec.sharding == after.sharding


def test_the_schema_states_no_default() -> None:
    key = spec_schema()["$defs"]["Sharding"]["properties"]["reshard_after_forward"]
    assert key["type"] == "boolean"
    assert "default" not in key
    assert "FSDP2" in key["description"]
