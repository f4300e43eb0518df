"""Multi-token prediction: depths after the layers, each predicting one token further than the previous.

Depth d reads the hidden state of depth d − 1 (for the first depth the residual stream after the last layer), before or after its norm, and
the embedding of the token d positions after. Token embedding and head are the model's; on the last of several stages the embedding is a
second copy, whose gradient is summed with the first's (R-10, R-62).

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megarun.model.norm import Block, RMSNorm, linear
from megarun.model.rotary import Rotary


class Ends(NamedTuple):
    """Token embedding and loss of the model, as a depth uses them.

    Attributes:
        embed: Function of token ids -> [B, t, h].
        loss: Function of normed [B, t, h] and targets [B, t] -> summed loss.
    """

    embed: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


class PredictionDepth(nn.Module):
    """One depth: [norm(hidden); norm(embedding)] projected, then its blocks; `output_norm` precedes the head."""

    def __init__(self, blocks: Mapping[str, Block], hidden_size: int, eps: float, *, passes_normed: bool) -> None:
        super().__init__()
        self.names, self.passes_normed = tuple(blocks), passes_normed
        for name, block in blocks.items():
            self.add_module(name, block)
        self.proj = linear(2 * hidden_size, hidden_size)
        self.hidden_norm, self.embedding_norm = RMSNorm(hidden_size, eps), RMSNorm(hidden_size, eps)
        self.output_norm = RMSNorm(hidden_size, eps)

    def forward(
        self, x: Tensor, following: Tensor, targets: Tensor, ends: Ends, rotary: Rotary | None, starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return this depth's hidden state, normed if the next depth reads it normed, and its loss.

        Args:
            x: Hidden state that the previous depth passes on, local tokens [B, t, h].
            following: int64 [B, t], tokens whose embedding is concatenated: the targets of the previous depth; -100 for none.
            targets: int64 [B, t], the next tokens, -100 for none.
            ends: Token embedding, and head with its loss.
            rotary: Rotary tables of the stage.
            starts: Document starts of packed rows.

        Returns:
            [B, t, h], and the sum over tokens, fp32 scalar.
        """
        ids = following.clamp(min=0)  # any id for a missing token: no target reads it
        hidden: Tensor = self.proj(torch.cat([self.hidden_norm(x), self.embedding_norm(ends.embed(ids))], -1))
        for name in self.names:
            hidden = self.get_submodule(name)(hidden, rotary, starts)
        normed = self.output_norm(hidden)
        return normed if self.passes_normed else hidden, ends.loss(normed, targets)
