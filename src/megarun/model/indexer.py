"""The indexer of an A block, which selects the keys that its queries attend to."""

import torch
from torch import Tensor, nn

from megaplan.spec import models as spec
from megarun.model.norm import linear
from megarun.parallel.groups.tensor import ALONE, TensorParallel


class LayerNormWeights(nn.Module):
    """Scale and bias [width] of a layer norm that the operation computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))


class Indexer(nn.Module):
    """Index queries, one index key for all heads, and the heads' weights.

    It is trained by its own loss, whose gradient is added in the attention core: its inputs are detached, so that this loss does not affect
    the rest of the model, and no other loss affects the indexer. Under TP every rank has the full indexer, projects its local tokens and
    gathers the results, because all ranks select the same keys; the loss is a sum over attention heads, to which each rank adds its own.

    Attributes:
        top_k: Number of keys that a query attends to.
        loss_factor: Coefficient of the loss over tokens of the batch and heads of all ranks.
        loss_scale: Factor of all losses, for gradients in fp16.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
    """

    def __init__(self, config: spec.Indexer, q_lora_rank: int, hidden_size: int, loss_factor: float, tp: TensorParallel = ALONE) -> None:
        super().__init__()
        self.tp, self.head_dim, self.top_k, self.loss_factor = tp, config.head_dim, config.top_k, loss_factor
        self.loss_scale = 1.0
        self.q_up = linear(q_lora_rank, config.num_heads * config.head_dim)
        self.k_proj = linear(hidden_size, config.head_dim)
        self.k_norm = LayerNormWeights(config.head_dim)
        self.head_weights = linear(hidden_size, config.num_heads)

    def project(self, query_latent: Tensor, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Local tokens [B, t, q_lora], [B, t, h] -> index queries [B, T, I, D], keys [B, T, D] before their norm, weights [B, T, I]."""
        query_latent, normed = query_latent.detach(), normed.detach()
        queries = torch.unflatten(self.tp.gather(self.q_up(query_latent)), -1, (-1, self.head_dim))
        return queries, self.tp.gather(self.k_proj(normed)), self.tp.gather(self.head_weights(normed))


def index_loss_factor(config: spec.Spec) -> float:
    """Factor of the losses of a spec's indexers: coefficient / (tokens of the batch · heads); 0 without an indexer."""
    attention = config.model.attention
    if not isinstance(attention, spec.LatentAttention) or attention.indexer is None:
        return 0.0
    return attention.indexer.loss_coefficient / (config.global_batch_tokens * attention.num_heads)
