"""Counts the scratch of operations with kernels: allocations are counted, kernels do not run."""

from typing import Any

import pytest
import torch
from storages import Idle, Storages
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megakernels import scratch_bytes
from megakernels.ops.attention import kernel as attention_kernel
from megakernels.ops.attention.stored import backward as stored_backward
from megakernels.ops.gated_delta import launch as delta_launch
from megakernels.ops.indexed_attention import kernel as indexed_kernel
from megakernels.ops.m2rnn import kernel as m2rnn_kernel
from megakernels.ops.mamba3 import launch as mamba3_launch
from megakernels.ops.mamba3 import launch_backward as mamba3_launch_backward
from megakernels.ops.selective_scan import kernel as selective_kernel
from megakernels.ops.ssd import kernel as ssd_kernel
from megakernels.ops.ssd import launch_backward as ssd_launch_backward

BF16, FP32 = torch.bfloat16, torch.float32
KERNELS = {
    delta_launch: tuple(name for name in vars(delta_launch) if name.startswith("delta_") and name.endswith("_kernel")),
    attention_kernel: ("attention_forward_kernel", "attention_query_kernel", "attention_key_kernel", "attention_relation_kernel"),
    stored_backward: tuple(name for name in vars(stored_backward) if name.startswith("attention_") and name.endswith("_kernel")),
    indexed_kernel: tuple(name for name in vars(indexed_kernel) if name.startswith("index_") and name.endswith("_kernel")),
    ssd_kernel: ("ssd_table_kernel", "ssd_chunk_kernel", "ssd_pass_kernel", "ssd_output_kernel"),
    ssd_launch_backward: (
        *("ssd_state_kernel", "ssd_pair_kernel", "ssd_value_kernel", "ssd_edge_kernel", "ssd_group_kernel", "ssd_step_kernel"),
    ),
    selective_kernel: ("selective_forward_kernel", "selective_backward_kernel"),
    m2rnn_kernel: ("m2rnn_forward_kernel", "m2rnn_recompute_kernel", "m2rnn_walk_kernel", "m2rnn_gradient_kernel"),
    mamba3_launch: ("mamba3_table_kernel", "mamba3_turn_kernel", "mamba3_angle_kernel", "mamba3_state_kernel", "mamba3_output_kernel"),
    mamba3_launch_backward: (
        *("mamba3_state_kernel", "mamba3_output_kernel", "mamba3_state_gradient_kernel", "mamba3_pair_kernel", "mamba3_value_kernel"),
        *("mamba3_group_kernel", "mamba3_last_phase_kernel", "mamba3_phase_gradient_kernel"),
        "mamba3_step_gradient_kernel",
    ),
}
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
DTYPES = pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP32), (BF16, FP32)], ids=["bf16", "fp32", "fp32 parameters"])


def make_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs."""
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Idle())


def check(op: Any, *operands: Any) -> int:
    """An operation's body holds exactly its stated scratch, which is returned."""
    with Storages() as found:
        results = op._init_fn(*operands)
    stated = scratch_bytes(str(op._opoverload), operands)
    assert stated == found.scratch(tree_leaves(results))
    return stated


def starts_of(batch: int, num_positions: int, packed: bool) -> Tensor | None:
    return torch.zeros(batch, num_positions, dtype=torch.int32) if packed else None
