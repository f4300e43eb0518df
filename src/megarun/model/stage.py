"""One pipeline stage: the blocks of a slot, in order."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as linear_op

from megaplan.inventory.tensors import Family, Inventory
from megaplan.layout.values import Slot
from megaplan.spec import models as spec
from megarun.model.attention import GroupedQueryAttention, LatentAttention
from megarun.model.mamba import Mamba2Block
from megarun.model.mlp import DenseBlock
from megarun.model.moe import ExpertBlock
from megarun.model.norm import RMSNorm, linear
from megarun.model.recurrent import MatrixRecurrenceBlock
from megarun.model.rotary import Rotary, rotary_table, rotary_width


class Stage(nn.Module):
    """The modules of one slot, named as the inventory names them: `embedding`, `layers.{global index}`, `final_norm`, `head`.

    The first stage takes token ids [B, T] and the others the residual stream [B, T, h]; the last returns logits [B, T, V] and the others
    the residual stream. A tied head reads `embedding`; on the last of several stages that is a second copy.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: spec.Spec, inventory: Inventory, slot: Slot) -> None:
        super().__init__()
        model = config.model
        self.index = slot.index
        self.embeds = slot.index == 0
        self.predicts = "final_norm" in slot.blocks
        if "embedding" in slot.blocks:
            self.embedding = nn.Embedding(model.vocab_size, model.hidden_size)
        layers = range(slot.start, slot.stop)
        self.layers = nn.ModuleDict({str(index): build_block(model, inventory.layers[index].family, index) for index in layers})
        if self.predicts:
            self.final_norm = RMSNorm(model.hidden_size, model.norm_eps)
        if "head" in slot.blocks:
            self.head = linear(model.hidden_size, model.vocab_size)
        attends = any(inventory.layers[index].family is Family.A for index in layers)
        self.attention = model.attention if attends else None
        self.seq_length = config.batch.seq_length

    def add_rotary(self, device: torch.device) -> None:
        """Create the stage's rotary tables on `device`, if it attends: fp32 buffers, never in a checkpoint."""
        if self.attention is not None:
            table = rotary_table(self.seq_length, rotary_width(self.attention), self.attention.rope_theta, device)
            self.register_buffer("rope_cos", table.cos, persistent=False)
            self.register_buffer("rope_sin", table.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids or residual stream in, residual stream or logits out."""
        if self.embeds:
            x = self.embedding(x)
        rotary = Rotary(self.rope_cos, self.rope_sin) if self.attention is not None else None
        for block in self.layers.values():
            x = block(x, rotary)
        if self.predicts:
            head = self.head if hasattr(self, "head") else self.embedding
            x = linear_op(self.final_norm(x), head.weight)
        return x


def build_block(model: spec.Model, family: Family, layer: int) -> nn.Module:
    """The module of layer `layer` (global index), which belongs to `family`."""
    hidden, eps = model.hidden_size, model.norm_eps
    match family, model.attention, model.mamba, model.moe, model.recurrent, model.mlp:
        case (Family.A, spec.GroupedQueryAttention() as config, *_):
            return GroupedQueryAttention(config, hidden, eps, layer)
        case (Family.A, spec.LatentAttention() as config, *_):
            return LatentAttention(config, hidden, eps, layer)
        case (Family.M, _, spec.Mamba2() as config, *_):
            return Mamba2Block(config, hidden, eps)
        case (Family.E, _, _, spec.MixtureOfExperts() as config, *_):
            return ExpertBlock(config, hidden, eps)
        case (Family.R, _, _, _, spec.MatrixRecurrence() as config, _):
            return MatrixRecurrenceBlock(config, hidden, eps)
        case (Family.D, _, _, _, _, spec.Mlp() as config):
            return DenseBlock(hidden, config.ffn_hidden_size, config.activation, eps)
    raise ValueError(f"layer {layer}: no module for family {family}; megarun.support should have refused the spec")
