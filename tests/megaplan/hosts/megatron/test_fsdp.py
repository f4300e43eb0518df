"""Megatron-FSDP's bytes: shards, gathered layers, and the arguments that are refused."""

from random import Random
from typing import Any

import pytest
from accuracy_megatron.launches import changed, refusals
from megatron_goldens import STATED, stage_of

from megaplan.families.attention.section import GroupedQueryAttention
from megaplan.hosts.megatron.peak import memory
from megaplan.hosts.megatron.storage import gathered_bytes, parameters, storage_bytes


def fsdp_run() -> dict[str, Any]:
    return next(row for row in STATED if "zp_z3" in row["name"])


def test_megatron_fsdp_shards_all_and_has_all_layers_again_at_the_loss() -> None:
    row = fsdp_run()
    stage = stage_of(row)
    found, elements = memory(stage), parameters(stage).elements(experts=False)
    assert found.static["parameters"] + found.static["gradients"] + found.static["optimizer"] == (2 + 4 + 12) * elements // 2
    unsharded = memory(changed(stage, sharding__reshard_after_forward=False))
    assert found.phases["loss"] - unsharded.phases["loss"] == 2 * elements


def test_megatron_fsdp_gathers_five_hundred_million_elements_ahead_of_backward() -> None:
    plain = stage_of(fsdp_run())
    assert isinstance(plain.spec.model.attention, GroupedQueryAttention)
    attention = plain.spec.model.attention.model_copy(update={"num_heads": 64, "num_kv_heads": 64, "head_dim": 128})
    mlp = plain.spec.model.mlp
    assert mlp is not None
    wide = mlp.model_copy(update={"ffn_hidden_size": 32768})
    stage = changed(plain, model__hidden_size=8192, model__attention=attention, model__mlp=wide, mesh__tp=1)
    found = parameters(stage)
    elements = found.elements(experts=False)
    root = 50432 * 8192 + 1024 * 8192 + 2 * 8192
    layer = (elements - root) // 12
    assert layer > 500_000_000
    assert gathered_bytes(stage, found).loss == 2 * (root + layer)
    assert gathered_bytes(stage, found).first_layer_backward == 2 * (root + layer) + 4 * 3 * layer
    assert memory(stage).phases["first-layer backward"] < memory(stage).phases["loss"]


def test_megatron_fsdp_shards_experts_over_their_own_ranks_and_gathers_layers_of_their_sizes() -> None:
    experts_of_last = {"num_experts": 8, "moe_ffn_hidden_size": 1024, "moe_layer_freq": "([0]*11+[1])", "moe_grouped_gemm": True}
    degrees = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 2}
    stage = stage_of(fsdp_run(), **experts_of_last, **degrees, disable_bias_linear=True)
    found, static = parameters(stage), memory(stage).static
    dense, experts = found.elements(experts=False), found.elements(experts=True)
    assert experts == 4 * 2 * 512 * 1024
    assert static["parameters"] + static["gradients"] + static["optimizer"] == 18 * (dense // 4 + experts // 2)
    root = 50432 * 512 + 1024 * 512 + 2 * 512
    layers = dense + experts - root
    assert gathered_bytes(stage, found).loss == 2 * (dense + experts)
    one = changed(stage, host__fsdp_unit_elements=2)  # a layer ahead; two of the mean size and the first one wait
    first = sum(one.elements for letter in "*-" for one in stage.run.parameters(letter).tensors)
    assert gathered_bytes(one, found) == (2 * (root + first), 2 * (root + first) + 4 * (2 * layers // 12 + first))


def test_double_buffers_of_gradients_stay_as_those_of_parameters_do() -> None:
    """They are of two layers: here at the loss and when backward reaches the first layer."""
    stage = changed(stage_of(fsdp_run(), tensor_model_parallel_size=1), host__fsdp_double_buffer=True)
    found = parameters(stage)
    elements, root = found.elements(experts=False), 50432 * 512 + 1024 * 512 + 2 * 512
    layer = (elements - root) // 12
    assert gathered_bytes(stage, found) == (2 * root + (2 + 4) * 2 * layer, 2 * root + (2 + 4) * 2 * layer)


@pytest.mark.parametrize("seed", range(12))
def test_double_buffers_are_of_the_layers_that_megatron_gives_them_to(seed: int) -> None:
    """Buffers by name, as Megatron's two allocators keep them, after a step over layers with and without experts."""
    draw = Random(seed)
    number = draw.randint(1, 11)
    experts = {"num_experts": 4, "moe_ffn_hidden_size": draw.choice([256, 1024]), "moe_layer_freq": f"([0]*{12 - number}+[1]*{number})"}
    switches = {"fsdp_max_pool": draw.random() < 0.5, "fsdp_persistent_buffers": draw.random() < 0.5}
    stage = stage_of(fsdp_run(), tensor_model_parallel_size=1, **experts, moe_grouped_gemm=True, disable_bias_linear=True)
    stage = changed(stage, host__fsdp_double_buffer=True, **{f"host__{key}": value for key, value in switches.items()})
    found = parameters(stage)
    mlp, moe = (sum(one.elements for letter in pair for one in stage.run.parameters(letter).tensors) for pair in ("*-", "*E"))
    layers = [mlp] * (12 - number) + [moe] * number
    root = found.elements(experts=False) + found.elements(experts=True) - sum(layers)
    most = max(set(layers), key=layers.count) if layers.count(mlp) != layers.count(moe) else layers[0]
    buffers, passing = dict[Any, int](), 0
    for place, size in enumerate(layers):
        if switches["fsdp_max_pool"]:
            buffers[place % 2] = max(layers)
        elif size == most:
            buffers["pool", layers[:place].count(size) % 2] = size
        elif switches["fsdp_persistent_buffers"]:
            buffers["own", place] = size
        elif place == 0:
            passing = size
    always = (2 + 4) * sum(buffers.values()) + 2 * root + 4 * root * switches["fsdp_persistent_buffers"]
    assert gathered_bytes(stage, found) == (always, always + (2 + 4) * passing)


def test_transposes_of_fp8_weights_stay_if_they_are_kept() -> None:
    """A byte for each parameter of the layers, at the loss as well as when backward reaches the first layer, which had its own."""
    fp8 = {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": True}
    dropped = changed(stage_of(fsdp_run(), tensor_model_parallel_size=1, **fp8), device__name="h100-sxm")
    kept = changed(dropped, host__fsdp_keeps_transposes=True)
    before, after = (gathered_bytes(each, parameters(each)) for each in (dropped, kept))
    root = 50432 * 512 + 1024 * 512 + 2 * 512
    layers = parameters(kept).elements(experts=False) - root
    assert after.loss - before.loss == layers
    assert after.first_layer_backward - before.first_layer_backward == layers - layers // 12


FSDP = "Megatron-FSDP has other buffers unless it shards all"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data_parallel_sharding_strategy": "optim"}, FSDP),
        (
            {"num_experts": 8, "moe_ffn_hidden_size": 1024, "overlap_moe_expert_parallel_comm": True},
            "with host.moe_overlap = true: it selects Megatron-FSDP",
        ),
        ({"fp8_format": "e4m3"}, "with precision.recipe = {name: fp8_delayed, param_gather: false}: it selects Megatron-FSDP"),
        ({"pipeline_model_parallel_size": 2}, "with mesh.pp = 2: it selects Megatron-FSDP"),
        ({"outer_dp_sharding_strategy": "optim"}, FSDP),
        ({"megatron_fsdp_version": 2}, FSDP),
        ({"megatron_fsdp_grad_comm_dtype": "bf16", "fsdp_double_buffer": True}, "Megatron reduces in the dtype of its gradient buffer"),
        ({"megatron_fsdp_main_params_dtype": "bf16"}, FSDP),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_megatron_fsdp_is_not_priced_with(changes: dict[str, Any], why: str) -> None:
    arguments, gpus = fsdp_run()["arguments"], fsdp_run()["gpus"]
    assert refusals(arguments, gpus) == ()
    assert any(why in detail for detail in refusals({**arguments, **changes}, gpus))


def test_gradients_of_megatron_fsdp_have_the_parameters_dtype_unless_it_is_said() -> None:
    said = {"megatron_fsdp_main_grads_dtype": None, "megatron_fsdp_grad_comm_dtype": None, "bf16": True}
    wide, half = stage_of(fsdp_run()), stage_of(fsdp_run(), **said)
    assert [stage.spec.precision.grads for stage in (wide, half)] == ["fp32", "bf16"]
    gradients = [storage_bytes(stage, parameters(stage))["gradients"] for stage in (wide, half)]
    assert gradients[0] == 2 * gradients[1]
    sent = stage_of(fsdp_run(), megatron_fsdp_grad_comm_dtype="bf16")  # kept in fp32, waiting to be reduced in bf16
    assert storage_bytes(sent, parameters(sent))["gradients"] == gradients[0]
    waits = [gathered_bytes(stage, parameters(stage)) for stage in (wide, sent, half)]
    assert waits[1] == waits[2]
    assert waits[0].first_layer_backward - waits[1].first_layer_backward == 2 * parameters(wide).elements(experts=False)
