"""Norms of another kind or place: the tensors and what a block keeps, against those of the plain block."""

from typing import Any

import pytest

from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.spec.load import spec_from_document
from megaplan.spec.models import Spec

H, F, B, T = 64, 96, 2, 32
STREAM, STATISTIC = B * T * H * 2, B * T * 4
"""Bytes of the residual stream in bf16, and of an fp32 number a token."""


def made(pattern: str = "D", **options: Any) -> tuple[Spec, Inventory]:
    model = {"pattern": pattern, "num_layers": 2, "hidden_size": H, "vocab_size": 128, "mlp": {"ffn_hidden_size": F, "activation": "gelu"}}
    spec = spec_from_document(
        {"format": "megaplan.spec/1", "name": "n", "model": model | options, "batch": {"micro_batch_size": B, "seq_length": T}}
    )
    return spec, build_inventory(spec)


def kept(spec: Spec, inventory: Inventory, layer: int = 0) -> dict[str, int]:
    """Bytes by storage."""
    name = f"layers.{layer}"
    return {tensor.name: tensor.bytes for tensor in block_ledger(spec, name, inventory.block(name)).saved}


def names(inventory: Inventory, layer: int = 0) -> list[str]:
    return [tensor.name for tensor in inventory.layers[layer].tensors]


def test_layernorm_has_a_bias_and_keeps_the_mean() -> None:
    plain, other = kept(*made()), kept(*made(norm="layernorm"))
    assert other == plain | {"mean": STATISTIC}
    inventory = made(norm="layernorm")[1]
    assert names(inventory)[:2] == ["norm.weight", "norm.bias"]
    assert [tensor.name for tensor in dict(inventory.outside)["final_norm"].tensors] == ["weight", "bias"]
    assert kept(*made(norm="layernorm_no_bias")) == other


def test_a_norm_after_the_block_keeps_what_the_block_made() -> None:
    plain, after, both = kept(*made()), kept(*made(norm_placement="post")), kept(*made(norm_placement="both"))
    assert both == plain | {"mlp": STREAM, "post_rstd": STATISTIC}
    assert after == {name: size for name, size in both.items() if name not in ("normed", "rstd")}  # the product reads the stream itself
    assert names(made(norm_placement="post")[1]) == ["up_proj.weight", "down_proj.weight", "post_norm.weight"]


def test_a_block_that_shares_its_input_keeps_it_once() -> None:
    spec, inventory = made(parallel_layers=[1])
    assert names(inventory, 1) == names(inventory)[1:]
    first, second = kept(spec, inventory), kept(spec, inventory, 1)
    assert second.get("normed", 0) == 0
    assert first["normed"] == STREAM


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"norm": "layernorm"}, 3 * H),  # a bias beside each of three scales
        ({"norm": "layernorm_no_bias"}, 0),
        ({"norm_placement": "both"}, 2 * H),
        ({"norm_placement": "post"}, 0),
        ({"head_bias": True}, 128),
        ({"parallel_layers": [1]}, -H),
        ({"mlp": {"ffn_hidden_size": F, "activation": "gelu", "bias": True}}, 2 * (F + H)),
        ({"mlp": {"ffn_hidden_size": F, "activation": "geglu"}}, 2 * F * H),
    ],
)
def test_parameters(options: dict[str, Any], more: int) -> None:
    assert made(**options)[1].parameters == made()[1].parameters + more


def test_an_option_at_its_default_is_not_written() -> None:
    document = made()[0].as_document()["model"]
    assert not {"norm", "norm_placement", "parallel_layers", "head_bias"} & set(document)
    assert "bias" not in document["mlp"]
    assert made(norm="layernorm")[0].as_document()["model"]["norm"] == "layernorm"
