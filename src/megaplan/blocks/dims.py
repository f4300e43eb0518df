"""Local sizes of one rank: what TP, SP and CP leave of batch, sequence and width, and the dtypes of activations."""

from __future__ import annotations

from typing import NamedTuple

from megaplan.dtypes import DType


class Dims(NamedTuple):
    """Local sizes, per microbatch.

    Attributes:
        batch: Sequences B.
        tokens: Positions of a sequence inside a tensor-parallel region: seq_length / cp.
        residual_tokens: Positions of the residual stream and its norms: with SP (tp > 1) seq_length / (cp · tp).
        hidden: Residual width h.
        tp: Tensor-parallel degree; widths of heads and MLPs are divided by it.
        cp: Context-parallel degree.
        dtype: Dtype of activations: `precision.params`, bf16 if that is fp8.
        stat_dtype: Dtype of statistics and states: fp32.
        packed: True if rows hold several documents, each position with the int32 place at which its own begins.
        is_last_cp_rank: True for the last rank of a CP group, where the walk over the pieces reverses.
        ep: Ranks over which experts are spread.
        etp: Ranks over which each expert is sharded.
        kernels: True if Triton's kernels run the operations.
        gathers: True if experts read rows where they are, instead of sorted copies.
        frozen: True if the parameters of blocks have no gradients (`lora`).
        relations: Rows of the relation bias that attention adds to scores; 0 without one.
    """

    batch: int
    tokens: int
    residual_tokens: int
    hidden: int
    tp: int
    cp: int
    dtype: DType
    stat_dtype: DType = DType.FP32
    packed: bool = False
    is_last_cp_rank: bool = True
    ep: int = 1
    etp: int = 1
    kernels: bool = False
    gathers: bool = False
    frozen: bool = False
    relations: int = 0

    @property
    def residual(self) -> tuple[int, int, int]:
        """Shape of the residual stream."""
        return (self.batch, self.residual_tokens, self.hidden)

    @property
    def gathered(self) -> tuple[int, int, int]:
        """Shape of a normed input gathered over TP."""
        return (self.batch, self.tokens, self.hidden)

    def wide(self, *widths: int) -> tuple[int, ...]:
        """[B, T, *widths] inside the tensor-parallel region."""
        return (self.batch, self.tokens, *widths)
