"""Model FLOPs of each family: what torch's own counter sees of a real block, and the stated term of what it cannot see into."""

import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megaplan.cost.blocks import layer_ops, whole_workload
from megaplan.cost.mamba import ssd
from megaplan.cost.model import model_costs
from megaplan.cost.recurrent import m2rnn
from megaplan.inventory.build import build_inventory
from megaplan.inventory.tensors import Family
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.build import build_stage, materialise
from megarun.initialise import initialise
from megarun.model.rotary import Rotary

pytestmark = pytest.mark.runtime
ROWS, LENGTH, HIDDEN = 2, 24, 32
SPEC: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "counted",
    "model": {
        "pattern": "AMEDR",
        "num_layers": 5,
        "hidden_size": HIDDEN,
        "vocab_size": 61,
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
        "mamba": {"kind": "mamba2", "expand": 2, "head_dim": 16, "state_dim": 8, "num_groups": 2, "chunk_size": 8},
        "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16},
        "recurrent": {"kind": "m2rnn", "num_heads": 3, "key_dim": 4, "value_dim": 4, "save_every": 8},
        "mlp": {"ffn_hidden_size": 40},
    },
    "batch": {"micro_batch_size": ROWS, "seq_length": LENGTH},
    "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32"),
}


def core_flops_per_token(spec: Spec, family: Family) -> int:
    """The products inside a family's operations, forward and backward, each repeated one left out."""
    load, convolution = whole_workload(spec, spec.precision.params), 3 * 2 * 4  # a channel's taps: value, input and weight gradient
    if family is Family.A:
        return 3 * (LENGTH + 1) * 4 * (8 + 8)  # q kᵀ and p v, 2 each, of (T + 1) / 2 keys on average, four heads
    if family is Family.E:
        return 3 * 2 * HIDDEN * 4 + 3 * 2 * 2 * 3 * HIDDEN * 24  # router; two experts of three matrices
    if family is Family.M:
        scan = ssd(load, num_heads=4, num_groups=2, chunk_size=8, head_dim=16, state_dim=8)
        return convolution * (64 + 2 * 2 * 8) + scan.forward + scan.input_grad + scan.weight_grad - scan.recomputed
    if family is Family.R:
        assert spec.model.recurrent is not None
        scan = m2rnn(load, spec.model.recurrent)
        return convolution * (2 * 4 + 3 * 4) + scan.forward + scan.input_grad + scan.weight_grad - scan.recomputed
    return 0


@pytest.mark.parametrize("layer", range(5), ids=list("AMEDR"))
def test_model_flops_are_the_counter_s_and_the_core(layer: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Counter: every matrix product outside the operations, of a real forward and backward."""
    spec = Spec.model_validate(SPEC)
    inventory = build_inventory(spec)
    family = inventory.layers[layer].family
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, 5)]).slots[0])
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 0)
    x = torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = stage.layers[str(layer)](x, Rotary(stage.rope_cos, stage.rope_sin), None)
        torch.autograd.backward(out.square().sum())
    counted, num_tokens = counter.get_total_flops(), ROWS * LENGTH
    core = core_flops_per_token(spec, family)
    found = model_costs(spec, inventory).layers[layer].model_flops
    with capsys.disabled():
        sys.stdout.write(
            f"{family.value}: model {found:,} FLOPs a token = {counted // num_tokens:,} counted by torch + {core:,} of the core\n"
        )
    assert counted == num_tokens * (found - core)
    linears = [
        op.work for op in layer_ops(whole_workload(spec, spec.precision.params), spec.model, inventory.layers[layer]) if op.is_linear
    ]
    assert counted == num_tokens * sum(work.forward + work.input_grad + work.weight_grad for work in linears)
