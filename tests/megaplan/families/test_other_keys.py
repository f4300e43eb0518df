"""Lightning attention, blocks of keys that an indexer chooses, and compressed keys: the tensors, a layer's saved tensors, and its work."""

import math
from typing import Any

import pytest

from megaplan.cost.blocks import layer_works, rank_workload
from megaplan.dtypes import DType
from megaplan.errors import MegaplanError
from megaplan.families.linear_attention.lightning import log_decays
from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec
from megaplan.spec.not_built_yet import megarun_refuses

H, B, T, HEADS, WIDTH = 64, 2, 32, 4, 8
GQA = {"kind": "gqa", "num_heads": HEADS, "num_kv_heads": 1, "head_dim": WIDTH, "qk_norm": True}


def made(pattern: str, mesh: dict[str, int] | None = None, **model: Any) -> tuple[Spec, Inventory]:
    sizes = {"pattern": pattern, "num_layers": 2, "hidden_size": H, "vocab_size": 128}
    document = {"format": "megaplan.spec/1", "name": "n", "model": sizes | model, "batch": {"micro_batch_size": B, "seq_length": T}}
    spec = spec_from_document(document | ({"mesh": mesh} if mesh else {}))
    return spec, build_inventory(spec)


def kept(spec: Spec, inventory: Inventory) -> dict[str, int]:
    return {tensor.name: tensor.bytes for tensor in block_ledger(spec, "layers.0", inventory.block("layers.0")).saved if tensor.bytes}


def flops(spec: Spec, inventory: Inventory) -> dict[str, int]:
    """Forward FLOPs per token of each operation of the first layer."""
    return {op.name: op.work.forward for op in layer_works(rank_workload(spec, DType.BF16), spec.model, inventory.layers[0])}


def test_lightning_attention_keeps_a_state_a_chunk_in_activations_dtype() -> None:
    chunk = 8
    spec, inventory = made("G", linear_attention={"kind": "lightning", "num_heads": HEADS, "head_dim": WIDTH, "chunk_size": chunk})
    assert inventory.layers[0].elements == H + 5 * HEADS * WIDTH * H + HEADS * WIDTH
    assert kept(spec, inventory)["states"] == B * (T // chunk) * HEADS * WIDTH**2 * 2
    assert flops(spec, inventory)["lightning"] == HEADS * (4 * chunk * WIDTH + 4 * WIDTH**2)
    shared, _ = made("G", {"cp": 2}, linear_attention={"kind": "lightning", "num_heads": HEADS, "head_dim": WIDTH, "gated_norm_eps": 1e-6})
    assert megarun_refuses(spec) == megarun_refuses(shared) == ()


def test_decays_of_lightning_attention() -> None:
    """Slopes of the first and the last mixing layer, and of a head: 2^(-8 (i + 1) / n) times the layer's factor."""
    letters, heads = "GEAEGE", 4
    for layer, factor in ((0, 1 + 1e-5), (4, 1 - 2 / (2 + 1e-5) + 1e-5), (6, 1 - 2 / (2 + 1e-5) + 1e-5)):
        first, step = log_decays(heads, letters, layer)
        slopes = [math.exp(first + head * step) for head in range(heads)]
        assert slopes == pytest.approx([factor * 2 ** (-8 * (head + 1) / heads) for head in range(heads)])


def test_mlstm_keeps_a_state_and_a_normaliser_a_chunk() -> None:
    chunk, key, value = 8, WIDTH, 2 * WIDTH
    sizes = {"num_heads": HEADS, "key_dim": key, "value_dim": value, "chunk_size": chunk}
    spec, inventory = made("G", linear_attention={"kind": "mlstm", **sizes})
    projected = HEADS * (2 * key + 2 * value + 2)
    assert inventory.layers[0].elements == H + projected * H + 2 * HEADS + HEADS * value + HEADS * value * H
    assert kept(spec, inventory)["states"] == B * (T // chunk) * HEADS * key * (value + 1) * 4
    assert flops(spec, inventory)["mlstm"] == HEADS * (2 * chunk * (key + value) + 4 * key * value)
    assert megarun_refuses(spec) == ()
    with pytest.raises(MegaplanError, match=r"MP715[\s\S]*kind = mlstm, mesh.cp = 2"):
        made("G", {"cp": 2}, linear_attention={"kind": "mlstm", **sizes})


def test_a_layer_before_the_head_and_a_layer_without_a_norm() -> None:
    plain, changed = made("A", attention=GQA), made("A", attention=GQA, head_layer={"bias": True}, unnormed_layers=[0])
    layers = [inventory.layers[0].elements for _, inventory in (plain, changed)]
    assert layers[0] - layers[1] == H
    assert plain[1].layers[1].elements == changed[1].layers[1].elements
    assert changed[1].block("final_norm").elements - plain[1].block("final_norm").elements == H * H + 2 * H
    assert kept(*plain).keys() - kept(*changed).keys() == {"normed", "rstd"}
    said = "\n".join(note.detail for note in megarun_refuses(changed[0]))
    assert "head_layer" in said
    assert "unnormed_layers" in said
    with pytest.raises(MegaplanError, match=r"MP715[\s\S]*head_layer.logits_bias = true"):
        made("A", attention=GQA, head_layer={"logits_bias": True})


def test_an_indexer_of_blocks() -> None:
    indexer = {"num_heads": 2, "head_dim": 6, "block_size": 4, "top_blocks": 2, "layers": [0]}
    plain, chosen = made("A", attention=GQA), made("A", attention=GQA | {"block_indexer": indexer})
    assert chosen[1].layers[0].elements - plain[1].layers[0].elements == 3 * 6 * H + 2 * 6
    assert chosen[1].layers[1].elements == plain[1].layers[1].elements
    more = {"indexer.q": B * T * 12 * 2, "indexer.k": B * T * 6 * 2, "indexer.blocks": B * T * 4 * 4}
    assert kept(*chosen) == kept(*plain) | more
    assert flops(*chosen)["attention"] < flops(*plain)["attention"]


def test_compressed_keys_that_are_values() -> None:
    rank, groups, low, rate = 10, 2, 6, 4
    compressor = {"layers": [0], "rate": rate, "overlaps": True, "top_k": 3, "index_heads": 2, "index_dim": 4}
    whole = GQA | {"values_are_keys": True, "query_norm_scale": False, "query_rank": rank, "output_groups": groups, "output_rank": low}
    spec, inventory = made("A", attention=whole | {"compressors": [compressor]})
    made_by_heads = HEADS * WIDTH
    attention = rank * (H + 1 + made_by_heads) + WIDTH * H + WIDTH + low * made_by_heads + groups * low * H
    assert inventory.layers[1].elements == H + attention
    compressing = sum(2 * 2 * dim * H + rate * 2 * dim + dim for dim in (WIDTH, 4))
    assert inventory.layers[0].elements == H + attention + compressing + 2 * 4 * rank + 2 * H
    found = kept(spec, inventory)
    assert found["compressor.keys"] == B * T // rate * WIDTH * 2
    assert "v" not in found
    with pytest.raises(MegaplanError, match=r"MP715[\s\S]*an indexer needs index_heads"):
        made("A", attention=whole | {"compressors": [compressor | {"index_heads": 0}]})
