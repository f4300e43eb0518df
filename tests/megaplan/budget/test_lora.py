"""Adapters on a frozen model: bytes by hand, and what the choice of linears changes."""

import copy
from typing import Any

import pytest

from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megaplan.cost.model import model_costs
from megaplan.families.registry import FAMILIES
from megaplan.hosts.megarun.ledger import block_ledger
from megaplan.inventory.adapters import A_SUFFIX, adaptable
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Group, Inventory
from megaplan.layout.build import build_layout
from megaplan.spec.local import local_dims
from megaplan.spec.models import Spec

BASE: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "adapted",
    "model": {
        "pattern": "AMEDRG",
        "num_layers": 6,
        "hidden_size": 64,
        "vocab_size": 128,
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
        "mamba": {"kind": "mamba2", "expand": 2, "head_dim": 16, "state_dim": 8, "num_groups": 2, "chunk_size": 8},
        "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16},
        "recurrent": {"kind": "m2rnn", "num_heads": 4, "key_dim": 4, "value_dim": 4, "save_every": 8},
        "linear_attention": {"kind": "kda", "num_heads": 4, "head_dim": 8},
        "mlp": {"ffn_hidden_size": 96},
    },
    "batch": {"micro_batch_size": 2, "seq_length": 32},
    "lora": {"rank": 4, "alpha": 8.0},
}


def made(**lora: Any) -> tuple[Spec, Inventory]:
    document = copy.deepcopy(BASE)
    document["lora"] |= lora
    spec = Spec.model_validate(document)
    return spec, build_inventory(spec)


def test_states_by_hand() -> None:
    """bf16 of all frozen parameters and fp32 of adapters; two moments and a counter of each adapter; gradients of nothing else."""
    spec, inventory = made()
    layout = build_layout(spec, inventory, [(0, 6)])
    cells = build_budget(spec, inventory, layout).worst.cells
    trained = [tensor for _, tensor in inventory.tensors() if tensor.group is not Group.FROZEN]
    frozen = inventory.parameters - inventory.trained_parameters
    assert sum(tensor.elements for tensor in trained) == inventory.trained_parameters > 0
    columns = (Column.REPLICATED_PARAMS, Column.TENSOR_PARALLEL_PARAMS, Column.EXPERT_PARALLEL_PARAMS)
    assert sum(cells[Phase.OPTIMIZER][column] for column in columns) == 2 * frozen + 4 * inventory.trained_parameters
    assert cells[Phase.OPTIMIZER][Column.OTHER_OPTIMIZER] == 8 * inventory.trained_parameters + 4 * len(trained)
    assert cells[Phase.OPTIMIZER][Column.GRADIENTS] == 4 * inventory.trained_parameters
    assert cells[Phase.OPTIMIZER][Column.MATRIX_OPTIMIZER] == 0


@pytest.mark.parametrize("letter", "AMEDRG")
def test_every_adapted_linear_is_an_operation_of_its_block(letter: str) -> None:
    """Every tensor adapted by its name is a linear of the program: no adapter lacks an operation that keeps its input and narrow rows."""
    spec, inventory = made()
    index = BASE["model"]["pattern"].index(letter)
    family, base = FAMILIES[letter], build_inventory(spec.model_copy(update={"lora": None})).layers[index]
    program, _ = family.program(
        local_dims(spec),
        family.section_of(spec.model),
        base.variant,
        family.operations(family.section_of(spec.model), index),
        spec.precision.params,
    )
    linears = {param.removesuffix(".weight") for op in program.ops for param, _ in op.late}
    adapted = {name for tensor in base.tensors if (name := adaptable(tensor)) is not None}
    assert adapted
    assert adapted <= linears
    kept = [
        tensor.name for tensor in block_ledger(spec, f"layers.{index}", inventory.layers[index]).saved if tensor.name.endswith(".narrow")
    ]
    assert len(kept) == len(adapted)


def test_the_choice_of_linears_decides_what_is_kept() -> None:
    """Queries and values alone: the output projection keeps nothing; a name is the last part of a linear's name or all of it."""
    spec, inventory = made(families=["q_proj", "v_proj", "shared.up_proj"])
    names = {name.removesuffix(f".{A_SUFFIX}") for name, _ in inventory.tensors() if name.endswith(f".{A_SUFFIX}")}
    assert names == {"layers.0.q_proj", "layers.0.v_proj", "layers.2.shared.up_proj", "layers.4.v_proj", "layers.5.v_proj"}
    attention = {tensor.name: tensor.keepers for tensor in block_ledger(spec, "layers.0", inventory.layers[0]).saved}
    assert attention["normed"] == ("q_proj", "v_proj")
    assert attention["attention"] == ("attention",)
    dense = {tensor.name for tensor in block_ledger(spec, "layers.3", inventory.layers[3]).saved}
    assert "normed" not in dense
    assert "activation" not in dense
    assert build_inventory(made()[0]) is build_inventory(made()[0])


def test_frozen_parameters_cost_no_weight_gradients() -> None:
    """Only adapters have FLOPs of weight gradients: each has three times 2 · rank · (in + out), a third of them for the gradients."""
    spec, inventory = made()
    base = spec.model_copy(update={"lora": None})
    adapted, trained = model_costs(spec, inventory), model_costs(base, build_inventory(base))
    narrow = 2 * inventory.trained_parameters
    assert sum(layer.weight_grad_flops for layer in adapted.layers) == narrow
    assert sum(layer.forward_flops for layer in adapted.layers) == sum(layer.forward_flops for layer in trained.layers) + narrow
    assert adapted.head.weight_grad_flops == 0 < trained.head.weight_grad_flops
    assert adapted.head.forward_flops == trained.head.forward_flops


def test_a_plan_without_the_section_has_no_key_of_it() -> None:
    """So older plans keep their digests."""
    spec = Spec.model_validate({key: value for key, value in BASE.items() if key != "lora"})
    assert "lora" not in spec.as_document()
