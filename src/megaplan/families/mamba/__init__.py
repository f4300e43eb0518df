"""M blocks: Mamba-1, Mamba-2 and Mamba-3."""

from megaplan.dtypes import DType
from megaplan.families.family import Family, ServingState
from megaplan.families.mamba.formulas import FORMULAS
from megaplan.families.mamba.program import mamba_program, mamba_selective, mamba_work
from megaplan.families.mamba.rules import mamba_rules, mamba_width
from megaplan.families.mamba.section import Mamba1, Mamba2, Mamba3, num_mamba_heads
from megaplan.families.mamba.tensors import mamba_tensors


def _sharded(mamba: Mamba1 | Mamba2 | Mamba3, hidden_size: int) -> dict[str, int]:
    if isinstance(mamba, Mamba1):
        return {"mamba.expand · hidden_size": mamba.expand * hidden_size}
    width = mamba_width(mamba, hidden_size)
    return {} if width is None else {width[0]: width[1], "mamba.num_groups": mamba.num_groups}


def _served(mamba: Mamba1 | Mamba2 | Mamba3, hidden_size: int, _variant: None, dtype: DType) -> ServingState:
    """Mamba-1 and 2 keep the last kernel − 1 inputs of the convolution and the fp32 state I · S or H · P · S.

    Mamba-3 has no convolution; its trapezoidal rule keeps the previous position (x, and B of every rank) and the sum of its angles.
    """
    if isinstance(mamba, Mamba1):
        channels = mamba.expand * hidden_size
        return ServingState(state_bytes=channels * (mamba.state_dim * DType.FP32.bytes + (mamba.conv_kernel - 1) * dtype.bytes))
    heads, wide = num_mamba_heads(mamba, hidden_size), DType.FP32.bytes
    state = heads * mamba.head_dim * mamba.state_dim * wide
    inner, group = heads * mamba.head_dim, mamba.num_groups * mamba.state_dim
    if isinstance(mamba, Mamba2):
        return ServingState(state_bytes=state + (inner + 2 * group) * (mamba.conv_kernel - 1) * dtype.bytes)
    return ServingState(state_bytes=state + (inner + group * mamba.mimo_rank) * dtype.bytes + heads * mamba.num_angles * wide)


def _convolution(mamba: Mamba1 | Mamba2 | Mamba3) -> int | None:
    return None if isinstance(mamba, Mamba3) else mamba.conv_kernel


MAMBA = Family(
    letter="M",
    title="Mamba",
    section="mamba",
    tensors=mamba_tensors,
    program=mamba_program,
    work=mamba_work,
    formulas=FORMULAS,
    selective=mamba_selective,
    full_refused="its scan would run twice; selective recomputes convolution and in-projection alone",
    rules=mamba_rules,
    sharded=_sharded,
    serving=_served,
    convolution=_convolution,
    execution_keys=frozenset({"chunk_size", "save_every"}),
    last_own="D",
    in_pieces=True,
)
