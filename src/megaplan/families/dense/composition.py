"""Work of the operations of D blocks: one MLP."""

from __future__ import annotations

from megaplan.blocks.costs import mlp, norm_work, residual_work
from megaplan.blocks.work import Workload, Works
from megaplan.families.dense.section import INNER_NORM, Mlp

PART = "D"


def dense_work(load: Workload, section: Mlp, hidden_size: int, variant: int | None = None) -> Works:
    """One D block, pre-norm and residual included; `tp` shards its width."""
    width, kind, scales_gate = variant or section.ffn_hidden_size, section.activation, section.gate_multiplier != 1
    inner = (norm_work(load, INNER_NORM, PART, width // load.tp),) if section.inner_norm else ()
    *ops, down = mlp(load, PART, hidden_size, width, kind, scales_gate=scales_gate)
    return (residual_work(load, PART, hidden_size), *ops, *inner, down)
