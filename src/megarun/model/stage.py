"""One pipeline stage: the blocks of a slot, in order."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as linear_op

from megaplan.inventory.tensors import Family, Inventory
from megaplan.layout.values import Slot
from megaplan.spec import models as spec
from megarun.model.attention import GroupedQueryAttention, LatentAttention
from megarun.model.indexer import index_loss_factor
from megarun.model.mamba import Mamba2Block
from megarun.model.mamba3 import Mamba3Block
from megarun.model.mlp import DenseBlock
from megarun.model.moe import ExpertBlock
from megarun.model.norm import RMSNorm, linear
from megarun.model.recurrent import MatrixRecurrenceBlock
from megarun.model.rotary import Rotary, rotary_table, rotary_width
from megarun.model.router_losses import LossFactors, loss_factors
from megarun.parallel.context import WHOLE, ContextParallel
from megarun.parallel.expert import LOCAL, ExpertParallel
from megarun.parallel.tensor import ALONE, TensorParallel, column_parallel
from megarun.parallel.tensor_vocabulary import SlicedEmbedding


class Stage(nn.Module):
    """The modules of one slot, named as the inventory names them: `embedding`, `layers.{global index}`, `final_norm`, `head`.

    The first stage takes token ids [B, t] and the others the residual stream [B, t, h]; the last returns logits [B, t, V] and the others
    the residual stream; t counts the rank's own tokens. With `vocab_parallel` ids are of all tokens, [B, T], and logits of them for own
    words, [B, T, V / tp]. A tied head reads `embedding`; on the last of several stages that is a second copy.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        config: spec.Spec,
        inventory: Inventory,
        slot: Slot,
        tp: TensorParallel = ALONE,
        ep: ExpertParallel = LOCAL,
        cp: ContextParallel = WHOLE,
    ) -> None:
        super().__init__()
        model = config.model
        self.tp, self.cp, self.slices_words = tp, cp, config.mesh.vocab_parallel and tp.degree > 1
        num_words = tp.share(model.vocab_size) if self.slices_words else model.vocab_size
        self.index = slot.index
        self.embeds = slot.index == 0
        self.predicts = "final_norm" in slot.blocks
        if "embedding" in slot.blocks:
            sliced = self.slices_words
            self.embedding = SlicedEmbedding(num_words, model.hidden_size, tp) if sliced else nn.Embedding(num_words, model.hidden_size)
        layers = range(slot.start, slot.stop)
        families, factors, index = inventory.layers, loss_factors(config), index_loss_factor(config)
        self.layers = nn.ModuleDict({str(i): build_block(config, families[i].family, i, tp, ep, cp, factors, index) for i in layers})
        if self.predicts:
            self.final_norm = RMSNorm(model.hidden_size, model.norm_eps)
        if "head" in slot.blocks:
            self.head = linear(model.hidden_size, num_words)
        attends = any(inventory.layers[index].family is Family.A for index in layers)
        self.attention = model.attention if attends else None
        self.seq_length = config.batch.seq_length

    def add_rotary(self, device: torch.device) -> None:
        """Create the stage's rotary tables on `device`, if it attends: fp32 buffers, never in a checkpoint."""
        if self.attention is not None:
            table = rotary_table(self.cp.positions(self.seq_length), rotary_width(self.attention), self.attention.rope_theta, device)
            self.register_buffer("rope_cos", table.cos, persistent=False)
            self.register_buffer("rope_sin", table.sin, persistent=False)

    def add_buffers(self, device: torch.device) -> None:
        """Create what is neither a parameter nor in a checkpoint: rotary tables, sums of router losses."""
        self.add_rotary(device)
        for block in self.layers.values():
            if isinstance(block, ExpertBlock):
                block.add_losses(device)

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """Token ids or residual stream in, residual stream or logits out.

        Args:
            x: Token ids or residual stream.
            starts: int32 [B, T], the first position of each position's document, where rows hold several; None is one a row. Under CP
                `ContextParallel.own_starts` of these.
        """
        if self.embeds:
            x = self.embedding(x)
        rotary = Rotary(self.rope_cos, self.rope_sin) if self.attention is not None else None
        for block in self.layers.values():
            x = block(x, rotary, starts)
        if self.predicts:
            x = self.logits(self.final_norm(x))
        return x

    def logits(self, normed: Tensor) -> Tensor:
        """Own tokens [B, t, h] -> their logits [B, t, V], or logits of all tokens for own words [B, T, V / tp]."""
        weight = (self.head if hasattr(self, "head") else self.embedding).weight
        if not self.slices_words:
            return linear_op(normed, weight)
        # a pending gradient would keep the gradient of the logits
        return column_parallel(self.tp, normed, [weight], may_wait=False)[0]


def build_block(
    whole: spec.Spec,
    family: Family,
    layer: int,
    tp: TensorParallel,
    ep: ExpertParallel,
    cp: ContextParallel,
    factors: LossFactors | None,
    index: float,
) -> nn.Module:
    """The module of layer `layer` (global index), which belongs to `family`: a TP and EP rank's part; with factors of its own losses."""
    model = whole.model
    hidden, eps = model.hidden_size, model.norm_eps
    match family, model.attention, model.mamba, model.moe, model.recurrent, model.mlp:
        case (Family.A, spec.GroupedQueryAttention() as config, *_):
            return GroupedQueryAttention(config, hidden, eps, layer, tp, cp)
        case (Family.A, spec.LatentAttention() as config, *_):
            return LatentAttention(config, hidden, eps, layer, tp, cp, index)
        case (Family.M, _, spec.Mamba2() | spec.Mamba3() as config, *_):
            return Mamba2Block(config, hidden, eps, tp, cp) if isinstance(config, spec.Mamba2) else Mamba3Block(config, hidden, eps, tp)
        case (Family.E, _, _, spec.MixtureOfExperts() as config, *_):
            return ExpertBlock(config, hidden, eps, tp, ep, factors, cp, gathers=whole.host.kernels == "triton")
        case (Family.R, _, _, _, spec.MatrixRecurrence() as config, _):
            return MatrixRecurrenceBlock(config, hidden, eps, tp, cp)
        case (Family.D, _, _, _, _, spec.Mlp() as config):
            return DenseBlock(hidden, config.ffn_hidden_size, config.activation, eps, tp)
    raise ValueError(f"layer {layer}: no module for family {family}; megarun.support should have refused the spec")
