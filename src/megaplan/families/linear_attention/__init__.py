"""G blocks: linear attention with a gated delta rule, with one decay per head (gated delta net) or per key dim (Kimi delta attention)."""

from __future__ import annotations

from megaplan.dtypes import DType
from megaplan.families.family import Family, ServingState
from megaplan.families.linear_attention.composition import linear_attention_work
from megaplan.families.linear_attention.formulas import FORMULAS
from megaplan.families.linear_attention.program import linear_attention_program, linear_attention_selective
from megaplan.families.linear_attention.rules import linear_attention_rules
from megaplan.families.linear_attention.section import GatedDeltaNet, KimiDeltaAttention
from megaplan.families.linear_attention.tensors import linear_attention_tensors


def _sharded(linear: GatedDeltaNet | KimiDeltaAttention, _hidden_size: int) -> dict[str, int]:
    if isinstance(linear, KimiDeltaAttention):
        return {"linear_attention.num_heads": linear.num_heads}
    return {"linear_attention.num_key_heads": linear.num_key_heads}


def _served(linear: GatedDeltaNet | KimiDeltaAttention, _hidden_size: int, _variant: None, dtype: DType) -> ServingState:
    """Serving state: the convolution's last inputs and the state H · K · V, which accumulates in fp32."""
    values = linear.num_value_heads * linear.value_dim
    convolved = (2 * linear.num_key_heads * linear.key_dim + values) * (linear.conv_kernel - 1)
    return ServingState(state_bytes=values * linear.key_dim * DType.FP32.bytes + convolved * dtype.bytes)


def _convolution(linear: GatedDeltaNet | KimiDeltaAttention) -> int:
    return linear.conv_kernel


LINEAR_ATTENTION = Family(
    letter="G",
    title="linear attention",
    section="linear_attention",
    tensors=linear_attention_tensors,
    program=linear_attention_program,
    work=linear_attention_work,
    formulas=FORMULAS,
    selective=linear_attention_selective,
    full_refused="its delta rule would run twice, and projections and convolutions are what selective recomputes",
    rules=linear_attention_rules,
    sharded=_sharded,
    serving=_served,
    convolution=_convolution,
    execution_keys=frozenset({"chunk_size", "save_every"}),
    timed=False,
    last_own="dt_bias",
    in_pieces=True,
)
