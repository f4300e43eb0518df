"""Parameters of a rank, for what happens once a step: gradients reduced, parameters gathered, optimizer state read and written."""

from __future__ import annotations

from typing import NamedTuple

from megaplan.cost.step.frameworks import framework
from megaplan.cost.step.workload import AttentionShape, ModelShape, Software, StepWorkload

ACCUMULATE_BYTES = 12
"""Of a parameter: a product's gradient written and read in 16 bits, added to a sum of 32."""


def accumulate_bytes(software: Software) -> int:
    """Bytes of a parameter and microbatch that gradients take to their sums, beside the products that make them; 0 where those add."""
    own = framework(software.name).accumulate_bytes
    return own if own or software.fused_accumulation else ACCUMULATE_BYTES


class Held(NamedTuple):
    """Elements of a rank before data sharding: those that every data rank has, and those of its experts."""

    dense: float
    experts: float


def held(work: StepWorkload) -> Held:
    """Parameters of a mean stage's rank; embedding and head are counted once if they stand on two stages."""
    model, mesh, counts = work.model, work.mesh, work.model.counts
    matrices = 3 if model.gated else 2
    blocks = counts.get("D", 0) * model.hidden * model.ffn * matrices
    if model.attention:
        blocks += (counts.get("A", 0) + model.mtp) * attention_elements(model.hidden, model.attention)
    if model.mamba:
        inner = model.mamba.num_heads * model.mamba.head_dim
        blocks += counts.get("M", 0) * 3 * model.hidden * inner
    routed = 0.0
    if model.experts and counts.get("E", 0):
        count = counts["E"] + model.mtp
        blocks += count * model.hidden * model.experts.shared * matrices
        routed = count * model.experts.num * (model.experts.latent or model.hidden) * model.experts.width * matrices
    tables = 1 if model.tied or mesh.pp > 1 else 2
    dense = blocks / mesh.tp / mesh.pp + tables * model.vocab * model.hidden / mesh.tp
    return Held(dense, routed / mesh.ep / mesh.etp / mesh.pp)


def attention_elements(hidden: int, shape: AttentionShape) -> float:
    """Elements of an attention block's linears."""
    if not shape.kv_lora:
        return hidden * (shape.num_heads * (shape.key_dim + shape.value_dim) + 2 * shape.num_kv_heads * shape.key_dim)
    plain = shape.key_dim - shape.rope_dim
    query = shape.q_lora * (hidden + shape.num_heads * shape.key_dim) if shape.q_lora else hidden * shape.num_heads * shape.key_dim
    values = shape.num_heads * shape.value_dim * hidden
    return query + hidden * (shape.kv_lora + shape.rope_dim) + shape.kv_lora * shape.num_heads * (plain + shape.value_dim) + values


def model_flops(model: ModelShape, seq: int) -> float:
    """Model FLOPs of a token: 6 a parameter that it meets, and 6 · heads · (d_k + d_v) · S/2 of causal attention; repeated work left out.

    Source: arXiv:2204.02311, appendix B.
    """
    counts, matrices = model.counts, 3 if model.gated else 2
    met = counts.get("D", 0) * model.hidden * model.ffn * matrices + (1 + model.mtp) * model.vocab * model.hidden
    pairs = 0.0
    if model.attention:
        shape, layers = model.attention, counts.get("A", 0) + model.mtp
        met += layers * attention_elements(model.hidden, shape)
        seen = (1 - shape.window_share) * seq / 2 + shape.window_share * min(shape.window or seq, seq / 2)
        pairs = 6.0 * layers * shape.num_heads * (shape.key_dim + shape.value_dim) * seen
    if model.mamba:
        met += counts.get("M", 0) * 3 * model.hidden * model.mamba.num_heads * model.mamba.head_dim
    if model.experts and counts.get("E", 0):
        shared = model.hidden * model.experts.shared
        routed = model.experts.top_k * (model.experts.latent or model.hidden) * model.experts.width
        met += (counts["E"] + model.mtp) * (shared + routed) * matrices
    return 6.0 * met + pairs
