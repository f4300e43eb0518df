"""Layers that attend to an earlier layer's keys: their tensors, work, cache and storages, against those of the layers that choose."""

from typing import Any

import pytest

from megaplan.blocks.ops import CHOICE, given
from megaplan.budget.serving import serving_budget
from megaplan.cost.blocks import layer_works, rank_workload
from megaplan.families.attention.variants import attention_place
from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.inventory.build import build_inventory
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import LatentAttention, Spec

B, T = 2, 300
WORDS = 12
"""A block has words of 32 bits for 300 keys, 128 keys at a time."""
GIVEN_CHOICE = given(CHOICE)
INDEXER = {"num_heads": 3, "head_dim": 8, "top_k": 5}


def made(layers: list[int], shared: list[int] | None = None, **options: Any) -> Spec:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    indexer = INDEXER | {"layers": layers} | ({} if shared is None else {"shared_layers": shared})
    model = {"pattern": "AD", "num_layers": 8, "hidden_size": 64, "vocab_size": 128, "mlp": {"ffn_hidden_size": 96}}
    model["attention"] = {"kind": "mla", "num_heads": 4, **sizes, "indexer": indexer}
    batch = {"micro_batch_size": B, "seq_length": T}
    return spec_from_document({"format": "megaplan.spec/1", "name": "n", "model": model, "batch": batch, **options})


def kept(spec: Spec, layer: int) -> dict[str, int]:
    """Bytes by storage."""
    name = f"layers.{layer}"
    return {tensor.name: tensor.bytes for tensor in block_ledger(spec, name, build_inventory(spec).block(name)).saved}


def test_a_sharing_layer_has_the_tensors_of_a_layer_without_an_indexer() -> None:
    sharing, all_keys = (build_inventory(made([0], shared)) for shared in ([2, 4], []))
    assert sharing.layers[2].tensors == all_keys.layers[2].tensors
    assert sharing.parameters == all_keys.parameters
    assert build_inventory(made([0, 2, 4])).parameters == sharing.parameters + 2 * (3 * 8 * 16 + 8 * 64 + 16 + 3 * 64)


def test_its_work_is_attention_to_the_chosen_keys_alone() -> None:
    """An indexed layer's without the indexer's operations; of the keys that are not chosen the kernels' products are counted."""
    spec = made([0], [2, 4])
    load = rank_workload(spec, spec.precision.of("A"))
    indexed, sharing, plain = (layer_works(load, spec.model, build_inventory(spec).layers[layer]) for layer in (0, 2, 6))
    work = {op.name: op.work for op in indexed if not op.name.startswith("indexer")}
    assert {op.name: op.work for op in sharing if op.name != "masked"} == work
    assert next(op for op in plain if op.name == "attention").work.forward > work["attention"].forward


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_the_first_sharing_layer_keeps_the_choice(policy: str) -> None:
    """A bit per query and key, under any recompute: it is an input. The layer that chose does not keep it, and no later one does."""
    spec = made([0], [2, 4], recompute={"blocks": {"A": policy}})
    assert CHOICE not in kept(spec, 0)
    assert kept(spec, 2)[GIVEN_CHOICE] == 4 * B * T * WORDS
    assert GIVEN_CHOICE not in kept(spec, 4)
    assert GIVEN_CHOICE not in kept(spec, 6)
    assert {name: size for name, size in kept(spec, 2).items() if name != GIVEN_CHOICE} == kept(spec, 6)


def test_context_ranks_keep_the_bits_of_their_own_queries() -> None:
    """The keys are those of the whole sequence."""
    spec = made([0], [2], mesh={"cp": 2}, batch={"micro_batch_size": B, "seq_length": 512})
    assert kept(spec, 2)[GIVEN_CHOICE] == 4 * B * 256 * 16


def test_a_served_sequence_has_index_keys_of_choosing_layers_alone() -> None:
    serving = {"batch_size": 1, "context_length": 100, "cache": "contiguous"}
    found = []
    for spec in (made([0, 2], serving=serving), made([0], [2], serving=serving)):
        budget = serving_budget(spec, build_inventory(spec))
        assert budget is not None
        found.append(budget.kv_cache_bytes)
    assert found[0] - found[1] == 100 * 8 * 2


def test_roles() -> None:
    """Two groups, and a layer that shares with none before it."""
    attention = made([0, 4], [2, 6]).model.attention
    assert isinstance(attention, LatentAttention)
    assert [attention_place(attention, layer).role for layer in (0, 2, 4, 6, 8)] == ["source", "reader", "source", "reader", "alone"]
    longer = made([0], [2, 4]).model
    assert isinstance(longer.attention, LatentAttention)
    assert [attention_place(longer.attention, layer).role for layer in (0, 2, 4, 6)] == ["source", "reader", "reader", "alone"]
    (value,) = longer.payload
    assert (value.source, value.readers) == (0, (2, 4))


def test_without_sharing_layers_the_key_is_not_written() -> None:
    """So no digest of a plan changes."""
    assert "shared_layers" not in made([0, 2]).as_document()["model"]["attention"]["indexer"]
    assert made([0], [2]).as_document()["model"]["attention"]["indexer"]["shared_layers"] == [2]
