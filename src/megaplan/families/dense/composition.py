"""Work of the operations of D blocks: one MLP."""

from __future__ import annotations

from megaplan.blocks.costs import mlp, residual_work
from megaplan.blocks.work import Workload, Works
from megaplan.families.dense.section import Mlp

PART = "D"


def dense_work(load: Workload, section: Mlp, hidden_size: int, _variant: None = None) -> Works:
    """One D block, pre-norm and residual included; `tp` shards its width."""
    width, kind, scales_gate = section.ffn_hidden_size, section.activation, section.gate_multiplier != 1
    return (residual_work(load, PART, hidden_size), *mlp(load, PART, hidden_size, width, kind, scales_gate=scales_gate))
