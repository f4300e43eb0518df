"""D blocks as operations with facts: one MLP."""

from __future__ import annotations

from megaplan.blocks.costs import mlp, residual_op
from megaplan.blocks.work import Ops, Workload
from megaplan.families.dense.section import Mlp

PART = "D"


def dense_work(load: Workload, section: Mlp, hidden_size: int, _variant: None = None) -> Ops:
    """One D block, pre-norm and residual included; `tp` shards its width."""
    width, kind, scales_gate = section.ffn_hidden_size, section.activation, section.gate_multiplier != 1
    return (residual_op(load, PART, hidden_size), *mlp(load, PART, hidden_size, width, kind, scales_gate=scales_gate))
