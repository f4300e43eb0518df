"""G blocks: mLSTM."""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from megakernels import mlstm
from megaplan.spec import models as spec
from megarun.model.mamba import Scale
from megarun.model.norm import MixerBlock, RMSNorm, RowLinear, gated, linear
from megarun.parallel.groups.tensor import ALONE, TensorParallel


class MatrixLstmBlock(MixerBlock):
    """G: projections → mLSTM → LayerNorm over each head, with a scale of all → gate → out_proj. Under TP a rank has a share of the heads.

    Source: arXiv:2405.04517, section 2.3; arXiv:2503.13427, section 3.
    """

    def __init__(self, config: spec.MatrixLstm, hidden_size: int, eps: float, tp: TensorParallel = ALONE) -> None:
        super().__init__()
        self.tp, self.eps, self.chunk_size, self.soft_cap = tp, eps, config.chunk_size, config.gate_soft_cap
        self.num_heads, self.key_dim, self.value_dim = tp.share(config.num_heads), config.key_dim, config.value_dim
        keys, values = self.num_heads * config.key_dim, self.num_heads * config.value_dim
        self.norm = RMSNorm(hidden_size, eps)
        self.qk_proj = linear(hidden_size, 2 * keys)
        self.v_proj = linear(hidden_size, values)
        self.gate_proj = linear(hidden_size, values)
        self.gates_proj = linear(hidden_size, 2 * self.num_heads, bias=True)
        self.head_norm = Scale(values)
        self.out_proj = RowLinear(values, hidden_size, tp=tp)

    def mix(self, normed: Tensor, starts: Tensor | None = None) -> Tensor:
        """[B, t, h] -> [B, T, H·V]: everything between the block's norm and out_proj."""
        y, gate = self.read_states(normed, starts)
        return gated(layer_norm(y, (self.value_dim,), eps=self.eps).flatten(2) * self.head_norm.weight, gate)

    def read_states(self, normed: Tensor, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[B, t, h] -> the heads' outputs [B, T, H, V], and the gate [B, T, H·V]."""
        qk, v, gate, gates = self.tp.project(normed, self.qk_proj, self.v_proj, self.gate_proj, self.gates_proj)
        q, k = (torch.unflatten(each, -1, (self.num_heads, self.key_dim)) for each in qk.chunk(2, dim=-1))
        v = torch.unflatten(v, -1, (self.num_heads, self.value_dim))
        of_input, of_forget = gates.chunk(2, dim=-1)
        return mlstm(q, k, v, of_input, of_forget, self.chunk_size, starts, soft_cap=self.soft_cap), gate
