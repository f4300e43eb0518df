"""Side embeddings in plain torch: rows of hashed n-grams, and a gated addition with its explicit backward.

Table j of J has order n_j = 2 + j mod (N − 1). Its hash of the n_j tokens that end at a position is h ← (h · a_j + token + 1) mod P over
them, oldest first, from 0; a token that the row or its document does not have counts as −1. The tables are concatenated, the first
R mod J of them one row longer, and the row is h mod the table's length.

Source: polynomial hashing, Karp and Rabin (1987), with P = 2³¹ − 1, so that products fit 64 bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernels._common import upcast

MODULUS = 2**31 - 1
SPREAD = 0x9E3779B97F4A7C15  # 2⁶⁴ / golden ratio: consecutive tables get distinct multipliers


def ngram_rows(tokens: Tensor, before: Tensor, num_tables: int, num_rows: int) -> Tensor:
    """Returns int64 [B, t, J], each below num_rows."""
    lead, device = before.shape[1], tokens.device
    tables = range(num_tables)
    multipliers = torch.tensor([1 + ((table + 1) * SPREAD % 2**64 >> 33) % (MODULUS - 1) for table in tables], device=device)
    orders = torch.tensor([2 + table % lead for table in tables], device=device)
    sizes = torch.tensor([num_rows // num_tables + (table < num_rows % num_tables) for table in tables], device=device)
    found = torch.zeros(*tokens.shape, num_tables, dtype=torch.int64, device=device)
    for lag in range(lead, -1, -1):
        token = before[:, lag - 1] if lag else tokens
        found = torch.where(orders > lag, (found * multipliers + token.unsqueeze(-1) + 1) % MODULUS, found)
    return found % sizes + (sizes.cumsum(0) - sizes)


def gated_add_forward(x: Tensor, side: Tensor, gates: Tensor) -> Tensor:
    """Returns x + gates[1] · tanh(gates[0]) · side, in x's dtype."""
    scale, gate = _gates(gates)
    return (upcast(x) + scale * gate * upcast(side)).to(x.dtype).contiguous()


def gated_add_backward(grad_y: Tensor, side: Tensor, gates: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of x, side and gates."""
    scale, gate = _gates(gates)
    grad_side = (upcast(grad_y) * (scale * gate)).to(side.dtype).contiguous() if needs[1] else None
    grad_gates = None
    if needs[2]:
        total = (upcast(grad_y) * upcast(side)).sum()
        grad_gates = torch.stack([total * scale * (1 - gate * gate), total * gate]).to(gates.dtype)
    return grad_y.clone(memory_format=torch.contiguous_format) if needs[0] else None, grad_side, grad_gates


def _gates(gates: Tensor) -> tuple[Tensor, Tensor]:
    wide = upcast(gates)
    return wide[1], torch.tanh(wide[0])
