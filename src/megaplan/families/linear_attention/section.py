"""The section `model.linear_attention`: dimensions of G blocks."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megakernels.ops.matrix_lstm.facts import LARGEST_CAP
from megaplan.scalars import OptionsSection, PositiveFloat, PositiveInt, StrictBool

SoftCap = Annotated[float, Field(gt=0, le=LARGEST_CAP, allow_inf_nan=False, strict=True)]


class GatedDeltaNet(OptionsSection):
    """Gated delta net (arXiv:2412.06464): one decay per head and position.

    Attributes:
        kind: gated_delta.
        num_key_heads: Heads of queries and keys; a divisor of num_value_heads.
        num_value_heads: Heads of values, gates and states.
        key_dim: Width of a query and key head, the rows of a head's state.
        value_dim: Width of a value head, the columns of a head's state.
        conv_kernel: Taps of the causal convolution.
        negative_eigenvalues: The write strength is between 0 and 2 instead of 0 and 1 (arXiv:2411.12537).
        gated_norm_eps: Epsilon of the norm over each value head; null for the model's norm_eps.
        chunk_size: Positions that the delta rule computes at once.
        save_every: Positions between two saved states.
    """

    options: ClassVar[frozenset[str]] = frozenset({"gated_norm_eps"})

    kind: Literal["gated_delta"]
    num_key_heads: PositiveInt
    num_value_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    conv_kernel: PositiveInt = 4
    negative_eigenvalues: StrictBool = False
    gated_norm_eps: PositiveFloat | None = None
    chunk_size: PositiveInt = 64
    save_every: PositiveInt = 256

    @property
    def has_latents(self) -> bool:
        """True if latents give decay and gate."""
        return False


class LightningAttention(OptionsSection):
    """Lightning attention (arXiv:2401.04658): a state per head, which decays by a constant of the head and the layer.

    Attributes:
        kind: lightning.
        num_heads: Heads of queries, keys, values and states.
        head_dim: Width of a head.
        gated_norm_eps: Epsilon of the norm over all heads; null for the model's norm_eps.
        chunk_size: Positions that are computed at once, and between two saved states.
    """

    options: ClassVar[frozenset[str]] = frozenset({"gated_norm_eps"})

    kind: Literal["lightning"]
    num_heads: PositiveInt
    head_dim: PositiveInt
    gated_norm_eps: PositiveFloat | None = None
    chunk_size: PositiveInt = 256


class MatrixLstm(OptionsSection):
    """mLSTM (arXiv:2405.04517): a matrix state per head, which exponential input gates write and forget gates decay.

    Attributes:
        kind: mlstm.
        num_heads: Heads of queries, keys, values and states.
        key_dim: Width of a query and key head, the rows of a head's state.
        value_dim: Width of a value head, the columns of a head's state.
        gate_soft_cap: Bound c of both gates before exp and sigmoid: c · tanh(gate / c).
        chunk_size: Positions that are computed at once, and between two saved states.
    """

    options: ClassVar[frozenset[str]] = frozenset({"gate_soft_cap"})

    kind: Literal["mlstm"]
    num_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    gate_soft_cap: SoftCap = 15.0
    chunk_size: PositiveInt = 64


WITHOUT_DELTA_RULE = LightningAttention, MatrixLstm
"""Kinds with neither a delta rule nor convolutions."""


class KimiDeltaAttention(OptionsSection):
    """Kimi delta attention (arXiv:2510.26692): one decay per head, position and key dim; latents of head_dim give decay and gate.

    Attributes:
        kind: kda.
        num_heads: Heads of queries, keys, values and states.
        head_dim: Width of a query, key and value head, and of the latents of decay and gate.
        full_gates: Decay and gate are projections of the block's input, instead of latents.
        conv_kernel: Taps of the causal convolution.
        negative_eigenvalues: The write strength is between 0 and 2 instead of 0 and 1 (arXiv:2411.12537).
        chunk_size: Positions that the delta rule computes at once.
        save_every: Positions between two saved states.
    """

    options: ClassVar[frozenset[str]] = frozenset({"full_gates"})

    kind: Literal["kda"]
    num_heads: PositiveInt
    head_dim: PositiveInt
    full_gates: StrictBool = False
    conv_kernel: PositiveInt = 4
    negative_eigenvalues: StrictBool = False
    chunk_size: PositiveInt = 64
    save_every: PositiveInt = 256

    @property
    def num_key_heads(self) -> int:
        """Number of key heads, equal to the value heads."""
        return self.num_heads

    @property
    def num_value_heads(self) -> int:
        """Heads of values and states."""
        return self.num_heads

    @property
    def key_dim(self) -> int:
        """Width of a query and key head."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim

    @property
    def has_latents(self) -> bool:
        """True if latents give decay and gate."""
        return not self.full_gates
