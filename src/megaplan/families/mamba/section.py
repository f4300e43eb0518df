"""The section `model.mamba`: dimensions of M blocks."""

from typing import ClassVar, Literal

from megaplan.scalars import MimoRank, NaturalInt, NonNegativeFloat, OptionsSection, PositiveFloat, PositiveInt, Section, StrictBool


class Mamba1(OptionsSection):
    """Mamba-1 (arXiv:2312.00752): every channel has its own state.

    Attributes:
        kind: mamba1.
        expand: Inner width over hidden_size.
        state_dim: Width of a channel's state.
        dt_rank: Width of the latent from which steps are projected; null for hidden_size / 16, rounded up.
        conv_kernel: Taps of the causal convolution.
        conv_bias: Bias of the convolution.
        bias: Bias on the input and output projections.
        inner_norm: RMSNorms over the step's latent, B and C: none, without a scale (plain), or with one (scaled).
        inner_norm_eps: Epsilon of these norms; null for the model's norm_eps.
        save_every: Positions between two saved states of the scan.
    """

    options: ClassVar[frozenset[str]] = frozenset({"bias", "inner_norm", "inner_norm_eps"})

    kind: Literal["mamba1"]
    expand: PositiveInt = 2
    state_dim: PositiveInt = 16
    dt_rank: PositiveInt | None = None
    conv_kernel: PositiveInt = 4
    conv_bias: StrictBool = True
    bias: StrictBool = False
    inner_norm: Literal["none", "plain", "scaled"] = "none"
    inner_norm_eps: PositiveFloat | None = None
    save_every: PositiveInt = 256

    def step_width(self, hidden_size: int) -> int:
        """Width of the steps' latent: `dt_rank`, or hidden_size / 16 rounded up.

        Source: arXiv:2312.00752, section 3.6.
        """
        return -(-hidden_size // 16) if self.dt_rank is None else self.dt_rank


class Mamba2(OptionsSection):
    """Mamba-2 (arXiv:2405.21060).

    Attributes:
        kind: mamba2.
        expand: Inner width over hidden_size, if num_heads is null.
        head_dim: Width of a head.
        num_heads: Heads; null for expand · hidden_size / head_dim.
        state_dim: Width of a head's state.
        num_groups: Groups that share B and C; a divisor of the heads.
        conv_kernel: Taps of the causal convolution.
        conv_bias: Bias of the convolution.
        bias: Bias on the input and output projections.
        gated_norm: RMSNorm of the gated output; without it the gate is silu alone.
        part_multipliers: Factors of the input projection's parts: z, x, B, C and dt.
        output_multiplier: Factor of the block's output, before it is added to the stream.
        time_step_min: Smallest step of the scan; smaller ones are raised to it.
        time_step_max: Largest step of the scan; null for none.
        chunk_size: Positions between two saved states of the scan.
    """

    options: ClassVar[frozenset[str]] = frozenset({"bias", "gated_norm", "part_multipliers", "output_multiplier"})

    kind: Literal["mamba2"]
    expand: PositiveInt = 2
    head_dim: PositiveInt = 64
    num_heads: PositiveInt | None = None
    state_dim: PositiveInt = 128
    num_groups: PositiveInt = 1
    conv_kernel: PositiveInt = 4
    conv_bias: StrictBool = True
    bias: StrictBool = False
    gated_norm: StrictBool = True
    part_multipliers: tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat] | None = None
    output_multiplier: PositiveFloat = 1.0
    time_step_min: NonNegativeFloat = 0.0
    time_step_max: PositiveFloat | None = None
    chunk_size: PositiveInt = 256


class Mamba3(Section):
    """Mamba-3 (arXiv:2603.15569), single-input or MIMO.

    Attributes:
        kind: mamba3.
        expand: Inner width over hidden_size.
        head_dim: Width of a head.
        state_dim: Width of a head's state.
        num_groups: Groups that share B and C; a divisor of the heads.
        mimo_rank: Inputs and outputs of a head's state; 1 for the single-input form.
        num_angles: Rotary angles of the state, one per two of its dims; 0 for none.
        rate_activation: Function from the projection to the rate of decay: softplus, or heavy_tail, 1 + x above 0 and 1 / (1 - x) below.
        chunk_size: Positions that the scan computes together; null for 64 / mimo_rank.
        save_every: Positions between two saved states of the scan.
    """

    kind: Literal["mamba3"]
    expand: PositiveInt = 2
    head_dim: PositiveInt = 64
    state_dim: PositiveInt = 128
    num_groups: PositiveInt = 1
    mimo_rank: MimoRank = 1
    num_angles: NaturalInt = 0
    rate_activation: Literal["softplus", "heavy_tail"] = "softplus"
    chunk_size: PositiveInt | None = None
    save_every: PositiveInt = 256

    @property
    def chunk_positions(self) -> int:
        """Positions that the scan computes together: by default 64 rows, with mimo_rank rows per position.

        Source: the advice on `chunk_size` in state-spaces/mamba, `mamba_ssm/modules/mamba3.py`.
        """
        return max(1, 64 // self.mimo_rank) if self.chunk_size is None else self.chunk_size


def num_mamba_heads(mamba: Mamba2 | Mamba3, hidden_size: int) -> int:
    """Heads of an M block: as given (Mamba-2), else expand · hidden_size / head_dim."""
    if isinstance(mamba, Mamba2) and mamba.num_heads is not None:
        return mamba.num_heads
    return mamba.expand * hidden_size // mamba.head_dim
