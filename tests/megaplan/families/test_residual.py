"""Norms of another kind or place: the tensors and a block's saved tensors, compared with the plain block."""

from typing import Any

import pytest

from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError
from megaplan.hosts.megarun.embedding import boundary_bytes
from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import build_layout
from megaplan.schedules import shared_buffers
from megaplan.spec.load import spec_from_document
from megaplan.spec.local import boundary, local_dims
from megaplan.spec.models import Spec
from megaplan.spec.not_built_yet import megarun_refuses

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


def test_streams_widen_what_a_block_keeps_and_what_a_stage_sends() -> None:
    """n streams in and out; the block itself computes on one of their width; the numbers of each token are fp32."""
    count = 3
    spec, inventory = made(streams={"count": count, "mixing": "constrained"})
    numbers = 2 * count + count**2
    own = {"stream_numbers": numbers, "stream_weights": numbers - count, "stream_rstd": 1}
    own = {name: per_token * STATISTIC for name, per_token in own.items()}
    assert kept(spec, inventory) == kept(*made()) | {"collapsed": STREAM, "mlp": STREAM, **own}
    assert block_ledger(spec, "layers.0", inventory.block("layers.0")).output.bytes == count * STREAM
    assert boundary_bytes(local_dims(spec)) == count * STREAM
    one, last = numbers * (count * H + 1) + 3, count * (count * H + 1) + 1
    assert inventory.parameters == made()[1].parameters + 2 * one + last
    alone = made(streams={"count": count, "mixing": "independent"})[1]
    assert alone.parameters == made()[1].parameters + 2 * (2 * count * (count * H + 1) + 2) + last


@pytest.mark.parametrize(("group", "layer", "earlier"), [(1, 0, 0), (1, 3, 3), (2, 2, 1), (2, 3, 2), (4, 3, 1), (9, 3, 1)])
def test_a_block_with_attention_residuals_keeps_its_input_and_numbers_of_each_value(group: int, layer: int, earlier: int) -> None:
    """Earlier values are others' storages; the block keeps its score and norm of each."""
    spec, inventory = made(num_layers=4, attention_residuals={"group_layers": group})
    number = STATISTIC * (earlier + 1)
    own = {"attended": STREAM, "depth_scores": number, "depth_rstd": number}
    assert kept(spec, inventory, layer) == kept(*made(num_layers=4)) | own
    assert names(inventory, layer)[-2:] == ["depth.query", "depth.scale"]
    assert block_ledger(spec, f"layers.{layer}", inventory.layers[layer]).output.bytes == STREAM
    assert inventory.parameters == made(num_layers=4)[1].parameters + 5 * 2 * H
    assert boundary(spec, local_dims(spec), layer).bytes == (earlier + 1) * STREAM


def test_a_stage_receives_the_values_that_its_layers_read() -> None:
    """Receive buffers of each rank: its input for each microbatch in flight, and the gradient of its output."""
    model = {"num_layers": 4, "attention_residuals": {"group_layers": 2}}
    document = made(**model)[0].as_document() | {"mesh": {"pp": 4}, "schedule": {"kind": "1f1b", "num_microbatches": 4}}
    spec = spec_from_document(document)
    budget = build_budget(spec, build_inventory(spec), build_layout(spec, build_inventory(spec), [(0, 1), (1, 2), (2, 3), (3, 4)]))
    received = [each.cells[Phase.OPTIMIZER][Column.COMMUNICATION] // STREAM for each in sorted(budget.ranks, key=lambda each: each.ranks)]
    values = [1, 2, 2, 3]  # embedding; and a sum; embedding and the first pair's; and a sum
    buffers = shared_buffers("1f1b", 4, 1, 4)
    expected = [buffers[rank][0][0] * values[rank] + buffers[rank][0][1] * (values[rank + 1] if rank < 3 else 0) for rank in range(4)]
    assert received == expected


@pytest.mark.parametrize(("key", "value"), [("streams", {"count": 2}), ("parallel_layers", [1]), ("stream_scale", True)])
def test_other_parts_of_a_residual_stream_are_refused_with_attention_residuals(key: str, value: object) -> None:
    with pytest.raises(MegaplanError, match=rf"MP715[\s\S]*attention_residuals is given, and model\.{key}"):
        made(attention_residuals={"group_layers": 1}, **{key: value})


def test_other_parts_of_one_stream_are_refused_with_several() -> None:
    with pytest.raises(MegaplanError, match=r"MP715[\s\S]*model\.streams\.count = 2, but model\.parallel_layers is given"):
        made(streams={"count": 2}, parallel_layers=[1])


def test_a_norm_on_what_one_layer_adds() -> None:
    spec, inventory = made(added_norm_layers=[1])
    assert names(inventory, 1) == [*names(inventory), "post_norm.weight"]
    assert kept(spec, inventory, 1) == kept(*made(norm_placement="both"), 1)
    with pytest.raises(MegaplanError, match=r"MP715[\s\S]*layer 1 is in post_norm_layers and in added_norm_layers"):
        made(added_norm_layers=[1], post_norm_layers=[1])


def test_a_norm_with_a_gate_and_factors_of_the_stream() -> None:
    rank = 5
    spec, inventory = made(norm_gate={"rank": rank, "layers": [0]}, stream_scale=True)
    narrow = B * T * rank * 2
    more = {"norm_ungated": STREAM, "norm_gate_sigmoid": STREAM, "norm_gate_low": narrow, "norm_gate_silu": narrow}
    assert kept(spec, inventory) == kept(*made()) | more
    assert kept(spec, inventory, 1) == kept(*made(), 1)
    assert names(inventory) == ["norm.weight", "norm_gate.down.weight", "norm_gate.up.weight", *names(made()[1])[1:], "stream_scale.weight"]
    assert inventory.parameters == made()[1].parameters + 2 * rank * H + 2 * H
    with pytest.raises(MegaplanError, match=r"MP715[\s\S]*a layer of norm_gate\.layers has no norm before it that it alone reads"):
        made(norm_gate={"rank": rank, "layers": [1]}, norm_placement="post")


def test_one_product_makes_queries_and_gate() -> None:
    heads, rank, value = 4, 6, 8
    section = {"kind": "mla", "num_heads": heads, "q_lora_rank": rank, "kv_lora_rank": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    plain = section | {"v_head_dim": value}
    spec, inventory = made("A", attention=plain | {"gate": True, "gate_source": "query"}, mlp=None)
    assert {tensor.name: tensor.shape for tensor in inventory.layers[0].tensors}["q_up.weight"] == (heads * (12 + value), 2 * rank)
    assert "gate_proj.weight" not in names(inventory)
    assert kept(spec, inventory)["q_joined"] == B * T * 2 * rank * 2
    with pytest.raises(MegaplanError, match=r"MP715[\s\S]*gate_source = query, and not attention\.gate: true"):
        made("A", attention=plain | {"gate_source": "query"}, mlp=None)


LATENTS = {"kind": "mla", "num_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
LATENTS["v_head_dim"] = 8


def test_latents_of_single_layers_and_the_norm_of_the_rotary_key() -> None:
    section = LATENTS
    own = {"num_heads": 2, "q_lora_rank": 5, "kv_lora_rank": 7, "qk_nope_head_dim": 3, "qk_rope_head_dim": 6, "v_head_dim": 9}
    spec, inventory = made("A", attention=section | {"layer_latents": [{"layers": [1], **own}]}, mlp=None)
    alone = made("A", attention=section | own, mlp=None)
    assert inventory.layers[0] == made("A", attention=section, mlp=None)[1].layers[0]
    assert inventory.layers[1].tensors == alone[1].layers[1].tensors
    assert kept(spec, inventory, 1) == kept(*alone, 1) != kept(spec, inventory)
    normed = made("A", attention=section | {"rotary_norm": True}, mlp=None)
    assert "rotary_norm.weight" in names(normed[1])
    assert normed[1].parameters == made("A", attention=section, mlp=None)[1].parameters + 2 * 4
    assert {"k_rope_rstd": STATISTIC}.items() <= kept(*normed).items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_latents": [{"layers": [1], "num_heads": 2}, {"layers": [1], "num_heads": 8}]}, "MP715[\\s\\S]*layer 1 is twice"),
        ({"layer_latents": [{"layers": [1], "qk_rope_head_dim": 5}]}, "MP708[\\s\\S]*qk_rope_head_dim = 5"),
        ({"layer_latents": [{"layers": [2], "num_heads": 2}]}, "MP706"),
        ({"layer_latents": [{"layers": [1], "q_lora_rank": 4}], "q_lora_rank": None}, "MP715[\\s\\S]*attention\\.q_lora_rank = null"),
    ],
)
def test_latents_of_single_layers_are_checked(changes: dict[str, Any], message: str) -> None:
    section = LATENTS
    with pytest.raises(MegaplanError, match=message):
        made("A", attention=section | changes, mlp=None)


def test_gathered_latents_are_those_of_the_layer() -> None:
    own = {"num_heads": 2, "kv_lora_rank": 7, "v_head_dim": 9}
    spec, inventory = made("A", attention=LATENTS | {"layer_latents": [{"layers": [1], **own}]}, mlp=None)
    alone = made("A", attention=LATENTS | own, mlp=None)
    mesh = spec.mesh.model_copy(update={"cp": 2, "context_exchange": "latents"})
    several, one = (each.model_copy(update={"mesh": mesh}) for each in (spec, alone[0]))
    assert kept(several, inventory, 1) == kept(one, alone[1], 1) != kept(several, inventory)
    refused = megarun_refuses(spec)
    assert [(item.code, "model.attention.layer_latents" in item.detail) for item in refused] == [("MP790", True)]
