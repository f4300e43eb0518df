"""Payload: a value of a layer that later layers read in addition to the residual stream.

A family states its payload in one place (`Family.payload`). A stage holds such a value until its last reader has run. A boundary between
the two carries it with the stream, in one tensor, and its gradient in the same way back; each value begins at a multiple of 16 bytes.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from megaplan.blocks.ops import INPUT, OUTPUT, Dims, Op, cut
from megaplan.dtypes import DType

PACK, UNPACK = "pack values", "unpack values"


class Payload(NamedTuple):
    """A value of one layer that later layers read.

    Attributes:
        name: Storage of its layer's program; its readers read `given(name)`.
        title: Name of the value in texts.
        source: Global index of the layer that passes it on.
        readers: Global indices of the layers that read it, rising; the number of layers for the last norm.
        shape: Function from a rank's sizes to the shape of one microbatch's value.
        kept: Way in which the layer that makes the value keeps it for backward: as its input, as a result kept except under full
            recompute, or not at all.
        dtype: Dtype; None for the dtype of its letter's activations.
        letter: Letter of the layer that passes it on; empty for the stream's dtype.
        has_gradient: False if no gradient flows back, as from a choice of keys.
    """

    name: str
    title: str
    source: int
    readers: Sequence[int]
    shape: Callable[[Dims], tuple[int, ...]]
    kept: Literal["input", "result", "no"] = "result"
    dtype: DType | None = None
    letter: str = ""
    has_gradient: bool = True

    def crosses(self, cut: int) -> bool:
        """True if a stage that begins with layer `cut` receives it."""
        return self.source < cut <= self.readers[-1]


def pack_op() -> Op:
    """The end of a stage that sends values after the stream. Gradients are views of the tensor that is received."""
    return Op(PACK, (INPUT,), (OUTPUT,), grads=())


def unpack_op() -> Op:
    """The start of a stage that receives values: views of the tensor that is received, whose gradients are joined."""
    return cut(UNPACK, INPUT, (OUTPUT,))
