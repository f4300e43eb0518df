"""G blocks: linear attention with a gated delta rule, with one decay per head (gated delta net) or per key dim (Kimi delta attention).

Lightning attention and mLSTM have no delta rule, and separate modules. mLSTM hands no state between ranks of a context group.
"""

from collections.abc import Iterator

from megaplan.blocks.ops import BlockProgram, Dims
from megaplan.blocks.storages import Shapes
from megaplan.blocks.work import Workload, Works
from megaplan.dtypes import DType
from megaplan.errors import Diagnostic
from megaplan.families.checks import CheckedSpec
from megaplan.families.family import Family, Selective, ServingState
from megaplan.families.linear_attention.formulas import FORMULAS
from megaplan.families.linear_attention.lightning import LIGHTNING, lightning_program, lightning_tensors, lightning_work
from megaplan.families.linear_attention.matrix_lstm import MLSTM, mlstm_program, mlstm_tensors, mlstm_work
from megaplan.families.linear_attention.program import linear_attention_program as delta_program
from megaplan.families.linear_attention.program import linear_attention_selective as delta_selective
from megaplan.families.linear_attention.program import linear_attention_work as delta_work
from megaplan.families.linear_attention.rules import linear_attention_rules as delta_rules
from megaplan.families.linear_attention.section import (
    WITHOUT_DELTA_RULE,
    GatedDeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    MatrixLstm,
)
from megaplan.families.linear_attention.tensors import linear_attention_tensors as delta_tensors
from megaplan.inventory.tensors import ParamTensor

Kinds = GatedDeltaNet | KimiDeltaAttention | LightningAttention | MatrixLstm


def _tensors(linear: Kinds, hidden_size: int, _variant: None = None) -> tuple[ParamTensor, ...]:
    if isinstance(linear, MatrixLstm):
        return mlstm_tensors(linear, hidden_size)
    return lightning_tensors(linear, hidden_size) if isinstance(linear, LightningAttention) else delta_tensors(linear, hidden_size)


def _program(dims: Dims, linear: Kinds, variant: None, operations: None, parameters: DType) -> tuple[BlockProgram, Shapes]:
    if isinstance(linear, LightningAttention):
        return lightning_program(dims, linear)
    if isinstance(linear, MatrixLstm):
        return mlstm_program(dims, linear)
    return delta_program(dims, linear, variant, operations, parameters)


def _work(load: Workload, linear: Kinds, hidden_size: int, _variant: None = None) -> Works:
    if isinstance(linear, MatrixLstm):
        return mlstm_work(load, linear, hidden_size)
    return lightning_work(load, linear, hidden_size) if isinstance(linear, LightningAttention) else delta_work(load, linear, hidden_size)


def _selective(linear: Kinds, variant: None) -> Selective:
    if isinstance(linear, MatrixLstm):
        return MLSTM
    return LIGHTNING if isinstance(linear, LightningAttention) else delta_selective(linear, variant)


def _rules(checked: CheckedSpec, linear: Kinds) -> Iterator[Diagnostic]:
    return iter(()) if isinstance(linear, WITHOUT_DELTA_RULE) else delta_rules(checked, linear)


def _sharded(linear: Kinds, _hidden_size: int) -> dict[str, int]:
    if isinstance(linear, KimiDeltaAttention | LightningAttention | MatrixLstm):
        return {"linear_attention.num_heads": linear.num_heads}
    return {"linear_attention.num_key_heads": linear.num_key_heads}


def _served(linear: Kinds, _hidden_size: int, _variant: None, dtype: DType) -> ServingState:
    """Serving state: the convolution's last inputs and the state H · K · V, which accumulates in fp32."""
    if isinstance(linear, LightningAttention):
        return ServingState(state_bytes=linear.num_heads * linear.head_dim**2 * DType.FP32.bytes)
    if isinstance(linear, MatrixLstm):
        return ServingState(state_bytes=linear.num_heads * (linear.key_dim * (linear.value_dim + 1) + 1) * DType.FP32.bytes)
    values = linear.num_value_heads * linear.value_dim
    convolved = (2 * linear.num_key_heads * linear.key_dim + values) * (linear.conv_kernel - 1)
    return ServingState(state_bytes=values * linear.key_dim * DType.FP32.bytes + convolved * dtype.bytes)


def _convolution(linear: Kinds) -> int | None:
    return None if isinstance(linear, WITHOUT_DELTA_RULE) else linear.conv_kernel


LINEAR_ATTENTION = Family(
    letter="G",
    title="linear attention",
    section="linear_attention",
    tensors=_tensors,
    program=_program,
    work=_work,
    formulas=FORMULAS,
    selective=_selective,
    full_refused="its delta rule would run twice; selective recomputes projections and convolutions alone",
    rules=_rules,
    sharded=_sharded,
    serving=_served,
    convolution=_convolution,
    execution_keys=frozenset({"chunk_size", "save_every"}),
    timed=False,
    last_own="dt_bias",
    in_pieces=True,
)
