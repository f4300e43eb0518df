"""Megatron-Core's parameters, tensor by tensor, against the inventory's total of the imported model."""

from typing import Any

import pytest
from accuracy_megatron.launches import spec_of_launch, stages_of_spec
from megatron_goldens import STATED
from small_launches import DELTA

from megaplan.hosts.megatron.storage import parameters
from megaplan.inventory.build import build_inventory

ALONE = [row for row in STATED if not any("fsdp" in key for key in row["arguments"])]
ON_MORE = ("virtual", "pipeline", "parallel_size", "instances", "sequence_parallel", "tp_comm_overlap", "cp_comm_type")
"""Parts of the names of arguments that need more than one GPU."""


def on_one_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in arguments.items() if not any(part in key for part in ON_MORE)}
    if "hybrid_layer_pattern" in found:
        found["hybrid_layer_pattern"] = found["hybrid_layer_pattern"].replace("|", "")
    return found


@pytest.mark.parametrize("row", ALONE, ids=lambda row: f"{row['name'].partition('/')[2]}-{row['platform']}")
def test_a_launch_on_one_gpu_has_the_parameters_of_its_model(row: dict[str, Any]) -> None:
    spec = spec_of_launch(on_one_gpu(row["arguments"]), 1, row["padded_vocab_size"], row["platform"])
    inventory = build_inventory(spec)
    expected = inventory.parameters
    if spec.host.mtp_repeated and spec.model.features.mtp is not None:  # one module runs at every depth
        depth = next(block for name, block in inventory.outside if name == "mtp.0")
        expected -= (spec.model.features.mtp.depth - 1) * depth.elements
    assert sum(tensor.elements for tensor in parameters(stages_of_spec(spec)[-1]).tensors) == expected


@pytest.mark.parametrize(
    "changes", [{}, {"linear_num_value_heads": 4}, {"linear_attention_freq": "[0,1,1,0]*2"}, {"moe_latent_size": 64}], ids=str
)
def test_gated_delta_nets_and_latent_experts(changes: dict[str, Any]) -> None:
    spec = spec_of_launch(DELTA | changes, 1, 32000, "h100")
    stage = stages_of_spec(spec)[-1]
    assert sum(tensor.elements for tensor in parameters(stage).tensors) == build_inventory(spec).parameters
