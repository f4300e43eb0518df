"""Keys of earlier layers, embeddings and widths of layers, norms of experts: the tensors and what a layer keeps."""

from typing import Any

import pytest

from megaplan.errors import MegaplanError
from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec
from megaplan.spec.not_built_yet import megarun_refuses

H, F, B, T, WIDTH, GROUPS = 64, 96, 2, 32, 8, 2
HEADS = {"kind": "gqa", "num_heads": 4, "num_kv_heads": GROUPS, "head_dim": WIDTH, "qk_norm": True}
STREAM, NUMBER = B * T * H * 2, B * T * 4
"""Bytes of the residual stream in bf16, and of an fp32 number a token."""


def made(attention: dict[str, Any] | None = None, pattern: str = "AD", **options: Any) -> tuple[Spec, Inventory]:
    model = {"pattern": pattern, "num_layers": 4, "hidden_size": H, "vocab_size": 128, "attention": HEADS | (attention or {})}
    model |= {"mlp": {"ffn_hidden_size": F, "activation": "geglu"}} if "D" in pattern else {}
    batch = {"micro_batch_size": B, "seq_length": T}
    spec = spec_from_document({"format": "megaplan.spec/1", "name": "n", "model": model | options, "batch": batch})
    return spec, build_inventory(spec)


def kept(spec: Spec, inventory: Inventory, name: str) -> dict[str, int]:
    """Bytes by storage, without empty ones."""
    return {tensor.name: tensor.bytes for tensor in block_ledger(spec, name, inventory.block(name)).saved if tensor.bytes}


def names(inventory: Inventory, layer: int) -> set[str]:
    return {tensor.name for tensor in inventory.layers[layer].tensors}


def test_a_reader_of_keys_has_no_projection_of_them() -> None:
    plain, shared = made(), made({"shared_keys": [{"source": 0, "layers": [2]}]})
    assert names(plain[1], 2) - names(shared[1], 2) == {"k_proj.weight", "v_proj.weight", "k_norm.weight"}
    assert names(plain[1], 0) == names(shared[1], 0)
    before, after = kept(*plain, "layers.2"), kept(*shared, "layers.2")
    assert before.keys() - after.keys() == {"k", "v", "k_proj", "k_rstd"}
    assert kept(*shared, "layers.0") == kept(*plain, "layers.0")
    assert not megarun_refuses(shared[0])
    with pytest.raises(MegaplanError, match=r"MP715[\s\S]*layer 2 is not after layer 2"):
        made({"shared_keys": [{"source": 2, "layers": [2]}]})
    with pytest.raises(MegaplanError, match=r"MP715[\s\S]*other key heads or another window than layer 0"):
        made({"window_size": 4, "full_layers": [2], "shared_keys": [{"source": 0, "layers": [2]}]})


def test_layers_of_another_width() -> None:
    spec, inventory = made(mlp={"ffn_hidden_size": F, "layer_widths": [{"layers": [3], "ffn_hidden_size": 2 * F}]})
    assert inventory.layers[3].elements - inventory.layers[1].elements == 3 * F * H
    assert kept(spec, inventory, "layers.3")["up"] == 2 * kept(spec, inventory, "layers.1")["up"]
    with pytest.raises(MegaplanError, match=r"MP706[\s\S]*layer 2 is not a D layer"):
        made(mlp={"ffn_hidden_size": F, "layer_widths": [{"layers": [2], "ffn_hidden_size": F}]})


def test_embeddings_of_layers() -> None:
    rows, dim = 50, 6
    plain, embedded = made(), made(features={"layer_embeddings": {"num_rows": rows, "dim": dim, "layers": [1, 3]}})
    assert embedded[1].parameters - plain[1].parameters == rows * 2 * dim + 2 * dim * H + dim + 2 * (2 * dim * H + H)
    narrow = B * T * dim * 2
    more = {"added": STREAM, "embedding_wide": STREAM, "embedding_rstd": NUMBER}
    more |= dict.fromkeys(("embedding_gate", "embedding_active", "embedding_product"), narrow)
    assert kept(*embedded, "layers.1") == kept(*plain, "layers.1") | more
    outside = kept(*embedded, "layer_embeddings")
    assert outside["joined"] == outside["projected"] == 2 * narrow
    with pytest.raises(MegaplanError, match=r"MP715[\s\S]*no stage hands embeddings of layers on"):
        spec_from_document(embedded[0].model_dump(mode="json") | {"mesh": {"pp": 2}})


def test_experts_with_norms_of_their_own() -> None:
    moe = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "shared_ffn_hidden_size": 24, "activation": "geglu"}
    plain, normed = made(pattern="AE", moe=moe), made(pattern="AE", moe=moe | {"own_norms": True})
    assert normed[1].parameters - plain[1].parameters == 2 * (4 * H + 4)
    before, after = kept(*plain, "layers.1"), kept(*normed, "layers.1")
    # experts, router and shared expert read three norms of one stream, and what two of them make is kept for norms
    assert sum(after.values()) - sum(before.values()) == 5 * STREAM + 4 * NUMBER + 2 * H
    with pytest.raises(MegaplanError, match=r"MP715[\s\S]*norms belong to a shared expert, too"):
        made(pattern="AE", moe=moe | {"own_norms": True, "shared_ffn_hidden_size": 0})
