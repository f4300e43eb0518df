"""Side embeddings of the first stage: hashed n-grams, structure classes and platforms, added to the token embedding (R-9, R-18).

Every rank computes them for its local tokens from the batch: row ids from the token ids, classes and platforms from the token file.
Checkpoints have only the parameters.
"""

import torch
from torch import Tensor, nn

from megakernels import gated_add, ngram_rows
from megaplan.spec import models as spec
from megarun.model.norm import linear


class NgramEmbedding(nn.Module):
    """x + projection of the concatenation of one row of every hashed table."""

    def __init__(self, config: spec.Ngram, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.tables = nn.Embedding(config.num_rows, config.dim)
        self.proj = linear(config.num_tables * config.dim, hidden_size)

    def forward(self, x: Tensor, tokens: Tensor, before: Tensor) -> Tensor:
        """Residual stream, local tokens [B, t, h], in and out.

        Args:
            x: Residual stream.
            tokens: int64 [B, t], local tokens.
            before: int64 [B, n − 1, t], the tokens 1, 2, … positions before them, -1 for none.
        """
        config = self.config
        rows = ngram_rows(tokens, before, config.num_tables, config.num_rows)
        out: Tensor = x + self.proj(self.tables(rows).flatten(2))
        return out


class CategoryEmbedding(nn.Module):
    """x + gates[1] · tanh(gates[0]) · projection of a category's row."""

    def __init__(self, config: spec.CategoryEmbedding, hidden_size: int) -> None:
        super().__init__()
        self.categories = nn.Embedding(config.num_categories, config.bottleneck)
        self.proj = linear(config.bottleneck, hidden_size)
        self.gates = nn.Parameter(torch.empty(2))

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """Residual stream, local tokens [B, t, h], in and out; classes uint8 [B, t]."""
        return gated_add(x, self.proj(self.categories(classes.long())), self.gates)
