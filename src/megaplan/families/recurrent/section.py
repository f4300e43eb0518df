"""The section `model.recurrent`: dimensions of R blocks."""

from typing import Literal

from megaplan.scalars import PositiveInt, Section


class MatrixRecurrence(Section):
    """M²RNN (arXiv:2603.14360): a non-linear recurrence over a matrix state per head.

    Attributes:
        kind: m2rnn.
        num_heads: Number of heads.
        key_dim: Rows of a head's state; queries and keys are shared by all heads.
        value_dim: Columns of a head's state.
        conv_kernel: Taps of the causal convolution.
        save_every: Positions between two saved states.
    """

    kind: Literal["m2rnn"]
    num_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    conv_kernel: PositiveInt = 4
    save_every: PositiveInt = 64
