"""A blocks: grouped-query attention (MHA and MQA too) and multi-head latent attention."""

from __future__ import annotations

from torch import Tensor, nn

from megakernels.attention import attention
from megakernels.rope import mla_kv, rope
from megaplan.spec import models as spec
from megarun.model.norm import RMSNorm, linear
from megarun.model.rotary import Rotary, unrotated


class GroupedQueryAttention(nn.Module):
    """Softmax attention whose num_kv_heads key and value heads each serve a group of query heads.

    Source: arXiv:2305.13245.
    """

    def __init__(self, config: spec.GroupedQueryAttention, hidden_size: int, eps: float, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = config.window_size
        self.rotates = layer not in config.nope_layers
        self.norm = RMSNorm(hidden_size, eps)
        self.q_proj = linear(hidden_size, config.num_heads * config.head_dim, config.bias)
        self.k_proj = linear(hidden_size, config.num_kv_heads * config.head_dim, config.bias)
        self.v_proj = linear(hidden_size, config.num_kv_heads * config.head_dim, config.bias)
        self.o_proj = linear(config.num_heads * config.head_dim, hidden_size)
        self.q_norm = RMSNorm(config.head_dim, eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Residual stream [B, T, h] in and out."""
        normed = self.norm(x)
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = self.q_proj(normed).view(heads), self.k_proj(normed).view(heads), self.v_proj(normed).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = rope(q, rotary.cos, rotary.sin), rope(k, rotary.cos, rotary.sin)
        return x + self.core(q, k, v)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Heads [B, T, Hq, D], [B, T, Hkv, D], [B, T, Hkv, D] -> [B, T, h]: attention and its output projection."""
        out: Tensor = self.o_proj(attention(q, k, v, self.head_dim**-0.5, self.window).flatten(2))
        return out


class LatentAttention(nn.Module):
    """Attention whose keys and values come from one low-rank latent per token, with a rotary key shared by all heads.

    Source: arXiv:2405.04434, section 2.1.
    """

    def __init__(self, config: spec.LatentAttention, hidden_size: int, eps: float, layer: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.nope_dim, self.rope_dim, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.kv_lora_rank = config.kv_lora_rank
        self.window = config.window_size
        self.rotates = layer not in config.nope_layers
        q_width = config.num_heads * (self.nope_dim + self.rope_dim)
        self.norm = RMSNorm(hidden_size, eps)
        self.low_rank_query = config.q_lora_rank is not None
        if config.q_lora_rank is not None:
            self.q_down = linear(hidden_size, config.q_lora_rank)
            self.q_latent_norm = RMSNorm(config.q_lora_rank, eps)
            self.q_up = linear(config.q_lora_rank, q_width)
        else:
            self.q_proj = linear(hidden_size, q_width)
        self.kv_down = linear(hidden_size, config.kv_lora_rank + self.rope_dim)
        self.kv_latent_norm = RMSNorm(config.kv_lora_rank, eps)
        self.kv_up = linear(config.kv_lora_rank, config.num_heads * (self.nope_dim + self.v_dim))
        self.o_proj = linear(config.num_heads * self.v_dim, hidden_size)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Residual stream [B, T, h] in and out."""
        table = rotary if self.rotates else unrotated(rotary)
        normed = self.norm(x)
        heads = (*x.shape[:2], self.num_heads, -1)
        flat_q = self.q_up(self.q_latent_norm(self.q_down(normed))) if self.low_rank_query else self.q_proj(normed)
        q = flat_q.view(heads)
        if self.rotates:
            q = rope(q, table.cos, table.sin)
        latent, k_rope = self.kv_down(normed).split([self.kv_lora_rank, self.rope_dim], dim=-1)
        k, v = mla_kv(self.kv_up(self.kv_latent_norm(latent)).view(heads), k_rope, table.cos, table.sin, self.nope_dim)
        return x + self.core(q, k, v)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Heads [B, T, H, n + R], the same, [B, T, H, v] -> [B, T, h]: attention and its output projection."""
        out: Tensor = self.o_proj(attention(q, k, v, (self.nope_dim + self.rope_dim) ** -0.5, self.window).flatten(2))
        return out
