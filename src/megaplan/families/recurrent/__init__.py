"""R blocks: M²RNN, a non-linear recurrence over a matrix state."""

from megaplan.dtypes import DType
from megaplan.families.family import Family, ServingState
from megaplan.families.recurrent.formulas import FORMULAS
from megaplan.families.recurrent.program import recurrent_program, recurrent_selective, recurrent_work
from megaplan.families.recurrent.section import MatrixRecurrence
from megaplan.families.recurrent.tensors import recurrent_tensors


def _sharded(recurrent: MatrixRecurrence, _hidden_size: int) -> dict[str, int]:
    return {"recurrent.num_heads": recurrent.num_heads}


def _served(recurrent: MatrixRecurrence, _hidden_size: int, _variant: None, dtype: DType) -> ServingState:
    """Serving state: the convolutions' last inputs and the state H · K · V, which accumulates in fp32."""
    values = recurrent.num_heads * recurrent.value_dim
    convolved = (2 * recurrent.key_dim + values) * (recurrent.conv_kernel - 1)
    return ServingState(state_bytes=values * recurrent.key_dim * DType.FP32.bytes + convolved * dtype.bytes)


def _convolution(recurrent: MatrixRecurrence) -> int:
    return recurrent.conv_kernel


RECURRENT = Family(
    letter="R",
    title="recurrent",
    section="recurrent",
    tensors=recurrent_tensors,
    program=recurrent_program,
    work=recurrent_work,
    formulas=FORMULAS,
    selective=recurrent_selective,
    sharded=_sharded,
    serving=_served,
    convolution=_convolution,
    execution_keys=frozenset({"save_every"}),
    timed=False,
    last_own="A_log",
    in_pieces=True,
    region="MP338",
)
