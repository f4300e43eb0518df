"""Hyper-connections: learned weights by which a block, or the last norm, reads several residual streams, and streams get its output."""

import torch
from torch import Tensor, nn

from megakernels import collapse_streams, expand_streams
from megaplan.families.streams import Streams


class StreamConnections(nn.Module):
    """The connections of one block; with `last`, of the norm before the head, which only reads."""

    def __init__(self, streams: Streams, hidden_size: int, norm_eps: float, *, last: bool = False) -> None:
        super().__init__()
        self.how = streams.connection(norm_eps)
        self._open: tuple[Tensor, Tensor] | None = None
        numbers, factors = (streams.count, 1) if last else (streams.numbers, streams.factors)
        self.weight = nn.Parameter(torch.empty(numbers, streams.count * hidden_size))
        self.base, self.scale = nn.Parameter(torch.empty(numbers)), nn.Parameter(torch.empty(factors))

    def forward(self, x: Tensor) -> Tensor:
        """Streams [B, t, n · h] -> the one to read [B, t, h]; the streams and their weights are kept until the block's output exists."""
        read, weights = collapse_streams(x, self.weight, self.base, self.scale, self.how)
        self._open = (x, weights) if weights.shape[-1] else None
        return read

    def expand(self, made: Tensor, factor: float) -> Tensor:
        """A block's output [B, t, h] -> new streams [B, t, n · h]: mixed input streams of `forward` plus the weighted output."""
        found, self._open = self._open, None
        if found is None:
            raise RuntimeError("the block has read no streams")
        return expand_streams(found[0], made, found[1], self.how.num_streams, factor)
