"""A blocks: grouped-query attention (MHA and MQA too) and multi-head latent attention.

Under TP a rank has a share of the heads; with MLA every rank has the full down projections and applies them to its local tokens. Under CP
it attends from its local tokens to those of all ranks.
"""

from functools import partial

import torch
from torch import Tensor, nn

from megakernels import fp8_attention, mla_kv, rms_norm, rope
from megaplan.spec import models as spec
from megarun.model.indexer import Indexer
from megarun.model.norm import Block, PlainNorm, RMSNorm, RowLinear, gated, linear
from megarun.model.relation import Relations
from megarun.model.rotary import Rotary, unrotated
from megarun.parallel.groups.context import WHOLE, ContextParallel
from megarun.parallel.groups.context_indexer import (
    IndexerSettings,
    context_chosen_attention,
    context_indexed_attention,
    context_indexed_attention_choice,
)
from megarun.parallel.groups.context_latent import LatentCore
from megarun.parallel.groups.tensor import ALONE, TensorParallel
from megarun.parallel.groups.tensor_norm import row_rms_norm


class GroupedQueryAttention(Block):
    """Softmax attention with num_kv_heads key and value heads, each shared by a group of query heads.

    Source: arXiv:2305.13245.
    """

    def __init__(
        self,
        config: spec.GroupedQueryAttention,
        hidden_size: int,
        eps: float,
        layer: int,
        tp: TensorParallel = ALONE,
        cp: ContextParallel = WHOLE,
    ) -> None:
        super().__init__()
        config = config.with_heads(config.heads_of(layer))
        heads, groups = tp.share(config.num_heads), tp.share(config.num_kv_heads)
        query, key_value, made = heads * config.head_dim, groups * config.head_dim, heads * config.value_width
        self.tp, self.cp, self.head_dim, self.scale = tp, cp, config.head_dim, config.score_factor
        self.value_dim, self.by_head = config.value_width, config.gate_width == "head"
        self.window, self.cap = config.window(layer), config.score_cap
        self.low_gradients: str | None = None  # the format of gradients if the attention of a recipe multiplies in eight bits
        self.rotates = layer not in config.nope_layers
        self.norm = RMSNorm(hidden_size, eps)
        self.q_proj = linear(hidden_size, query, config.bias)
        self.reads_keys = any(layer in shared.layers for shared in config.shared_keys)
        self.k_proj = None if self.reads_keys else linear(hidden_size, key_value, config.bias)
        self.norms_values, self.eps = config.value_norm, eps
        own_values = not self.reads_keys and not config.values_from_keys
        self.v_proj = linear(hidden_size, groups * config.value_width, config.bias) if own_values else None
        self.gate_proj = linear(hidden_size, heads * config.gate_values) if config.gate else None
        self.o_proj = RowLinear(made, hidden_size, config.output_bias, tp)
        self.norms_rows = config.qk_norm_width == "all_heads"
        widths = (query, key_value) if self.norms_rows else (config.head_dim, config.head_dim)
        self.gate_bias = nn.Parameter(torch.empty(heads)) if config.gate_bias else None
        self.sinks = nn.Parameter(torch.empty(heads)) if config.sinks else None
        self.q_norm, self.k_norm = _norms(config, widths, eps, keys=not self.reads_keys)
        self.o_norm = RMSNorm(made, eps) if config.output_norm else None

    def forward(self, x: Tensor, rotary: Rotary, starts: Tensor | None = None) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """Residual stream, local tokens [B, t, h], in and out; document starts of all tokens [B, T] where rows are packed.

        With `sends_values` keys [B, T, Hkv, D] and values [B, T, Hkv, Dv], too, rotated as other layers read them.
        """
        normed = self.norm(x)
        gates = () if self.gate_proj is None else (self.gate_proj,)
        if self.k_proj is None:
            q, *gate = self.tp.project(normed, self.q_proj, *gates)
            q, (k, v) = self.queries(q, rotary), rotary.given
            return self.add(x, self.core(q, k, v, starts, rotary.relations, *gate))
        values = () if self.v_proj is None else (self.v_proj,)
        q, k, *gate = self.tp.project(normed, self.q_proj, self.k_proj, *values, *gates)
        v = gate.pop(0) if values else k
        if self.norms_rows and isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            q, k = (row_rms_norm(self.tp, flat, norm.weight, norm.eps) for flat, norm in ((q, self.q_norm), (k, self.k_norm)))
        q, k = (torch.unflatten(flat, -1, (-1, self.head_dim)) for flat in (q, k))
        v = torch.unflatten(v, -1, (-1, self.value_dim))
        if not self.norms_rows and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.norms_values:
            v = rms_norm(v, torch.ones(self.value_dim, dtype=v.dtype, device=v.device), self.eps)
        if self.rotates:
            cos, sin = rotary.of(self.window)
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        made = self.add(x, self.core(q, k, v, starts, rotary.relations, *gate))
        return (made, (k, v)) if self.sends_values else made

    def queries(self, flat: Tensor, rotary: Rotary) -> Tensor:
        """Projected queries [B, T, Hq · D] of a layer that reads another one's keys -> heads [B, T, Hq, D], normed and rotated."""
        q = torch.unflatten(flat, -1, (-1, self.head_dim))
        q = q if self.q_norm is None else self.q_norm(q)
        return rope(q, *rotary.of(self.window)) if self.rotates else q

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, relations: Relations | None = None, gate: Tensor | None = None
    ) -> Tensor:
        """Heads [B, T, Hq, D], [B, T, Hkv, D], [B, T, Hkv, Dv] -> [B, t, h]: attention, its gate [B, T, Hq · Dv] and output projection.

        A gate may have one value a head, [B, T, Hq].
        """
        # attention's output has no local name: under recompute it is freed while the projection's output is reduced
        if self.low_gradients is not None and self.cp.continued is None:
            attend = partial(fp8_attention, q, k, v, self.scale, self.window, starts, self.cap, self.low_gradients)
        else:
            attend = partial(self.cp.attention, q, k, v, self.scale, self.window, starts, self.sinks, relations, self.cap)
        return self.o_proj.reduce(self.o_proj(gated(self.normed(attend().flatten(2)), gate, by_head=self.by_head, bias=self.gate_bias)))

    def normed(self, heads: Tensor) -> Tensor:
        """Outputs of the rank's heads [B, T, Hq · Dv], normed over all heads if the block has that norm."""
        return heads if self.o_norm is None else row_rms_norm(self.tp, heads, self.o_norm.weight, self.o_norm.eps)


def _norms(
    config: spec.GroupedQueryAttention, widths: tuple[int, int], eps: float, *, keys: bool
) -> tuple[RMSNorm | PlainNorm | None, RMSNorm | PlainNorm | None]:
    """Norms of queries and, with `keys`, of keys, of these widths; None for none."""
    norm = RMSNorm if config.qk_norm_scale else PlainNorm
    query = norm(widths[0], eps) if config.qk_norm else None
    return query, norm(widths[1], eps) if config.qk_norm and keys else None


class LatentAttention(Block):
    """Attention whose keys and values come from one low-rank latent per token, with a rotary key shared by all heads.

    Source: arXiv:2405.04434, section 2.1.
    """

    def __init__(
        self,
        config: spec.LatentAttention,
        hidden_size: int,
        eps: float,
        layer: int,
        tp: TensorParallel = ALONE,
        cp: ContextParallel = WHOLE,
        index_loss_factor: float = 0.0,
    ) -> None:
        super().__init__()
        self.tp, self.cp, self.num_heads, self.scale = tp, cp, tp.share(config.num_heads), config.score_factor
        self.nope_dim, self.rope_dim, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.kv_lora_rank = config.kv_lora_rank
        self.window = config.window(layer)
        self.low_gradients: str | None = None  # as of the other kind
        self.rotates = layer not in config.nope_layers
        q_width = self.num_heads * (self.nope_dim + self.rope_dim)
        self.eps = latent_eps = config.latent_norm_eps or eps
        self.norm = RMSNorm(hidden_size, eps)
        self.low_rank_query = config.q_lora_rank is not None
        if config.q_lora_rank is not None:
            self.q_down = linear(hidden_size, config.q_lora_rank, config.bias)
            self.q_latent_norm = RMSNorm(config.q_lora_rank, latent_eps)
            self.q_up = linear(config.q_lora_rank, q_width)
        else:
            self.q_proj = linear(hidden_size, q_width)
        self.kv_down = linear(hidden_size, config.kv_lora_rank + self.rope_dim, config.bias)
        self.kv_latent_norm = RMSNorm(config.kv_lora_rank, latent_eps)
        self.kv_up = linear(config.kv_lora_rank, self.num_heads * (self.nope_dim + self.v_dim))
        self.gate_proj = linear(hidden_size, self.num_heads * config.gate_values) if config.gate else None
        self.by_head = config.gate_width == "head"
        self.sinks = nn.Parameter(torch.empty(self.num_heads)) if config.sinks else None
        self.o_proj = RowLinear(self.num_heads * self.v_dim, hidden_size, config.bias or config.output_bias, tp)
        self.indexer: Indexer | None = None
        if config.indexer is not None and layer in config.indexer.layers and config.q_lora_rank is not None:
            self.indexer = Indexer(config.indexer, config.q_lora_rank, hidden_size, index_loss_factor, tp)
        self.reads_choice = config.indexer is not None and layer in config.indexer.shared_layers
        late = cp.gathers_latents and self.indexer is None and not self.reads_choice
        self.late = LatentCore(tp, cp, self.nope_dim, self.scale, self.window) if late else None

    def forward(self, x: Tensor, rotary: Rotary, starts: Tensor | None = None) -> Tensor | tuple[Tensor, tuple[Tensor]]:
        """Residual stream, local tokens [B, t, h], in and out; document starts of all tokens [B, T] where rows are packed.

        With `sends_values` the chosen keys too, int32 [B, T, words].
        """
        table = rotary if self.rotates else unrotated(rotary)
        normed, heads = self.norm(x), (self.num_heads, -1)
        gates = () if self.gate_proj is None else (self.gate_proj,)
        if self.low_rank_query:
            gate = self.tp.project(normed, *gates) if gates else []
            query_latent = self.q_latent_norm(self.q_down(normed))
            (flat_q,) = self.tp.project(query_latent, self.q_up)
        else:
            flat_q, *gate = self.tp.project(normed, self.q_proj, *gates)
        q = torch.unflatten(flat_q, -1, heads)
        if self.rotates:
            q = rope(q, table.cos, table.sin)
        latent, k_rope = self.kv_down(normed).split([self.kv_lora_rank, self.rope_dim], dim=-1)
        if self.late is not None:
            keys = self.kv_latent_norm(latent), self._rotated(k_rope, table)
            return self.add(x, self.core(q, *keys, starts, rotary.relations, None, *gate))
        kv = torch.unflatten(self.tp.project(self.kv_latent_norm(latent), self.kv_up)[0], -1, heads)
        k, v = mla_kv(kv, self.tp.gather(k_rope), table.cos, table.sin, self.nope_dim)
        del kv  # not saved for backward
        if self.indexer is None:
            return self.add(x, self.core(q, k, v, starts, rotary.relations, rotary.given[0] if self.reads_choice else None, *gate))
        made, choice = self.indexed_core(q, k, v, *self.indexer.project(query_latent, normed), table.cos, table.sin, starts, *gate)
        return self.add(x, made) if choice is None else (self.add(x, made), (choice,))

    def _rotated(self, k_rope: Tensor, table: Rotary) -> Tensor:
        """Rotary keys of local tokens [B, t, R] -> of the rank's positions [B, T / cp, R], rotated."""
        keys = self.tp.gather(k_rope)
        return rope(keys.unsqueeze(2), table.cos, table.sin).squeeze(2) if self.rotates else keys

    def core(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor | None = None,
        relations: Relations | None = None,
        choice: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Heads [B, T, H, n + R], the same, [B, T, H, v] -> [B, t, h]: attention, to chosen keys if given, and its output projection.

        With `mesh.context_exchange: latents` k and v are latents of the rank's own tokens [B, t, latent] and rotated keys [B, T, R].
        """
        if self.late is not None:
            attend = partial(self.late.attend, q, k, v, self.kv_up, starts, self.sinks, relations)
        elif self.low_gradients is not None and self.cp.continued is None:
            attend = partial(fp8_attention, q, k, v, self.scale, self.window, starts, None, self.low_gradients)
        elif choice is None:
            attend = partial(self.cp.attention, q, k, v, self.scale, self.window, starts, self.sinks, relations)
        else:
            attend = partial(context_chosen_attention, self.cp, q, k, v, choice, self.scale, self.window, starts, self.sinks)
        return self.o_proj.reduce(self.o_proj(gated(attend().flatten(2), gate, by_head=self.by_head)))

    def indexed_core(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        cos: Tensor,
        sin: Tensor,
        starts: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run `core` over the keys that the indexer selects from its outputs and the rotary table; return the keys too, if sent."""
        if self.indexer is None:
            raise RuntimeError("a layer without an indexer attends to all keys")
        choice = IndexerSettings(self.scale, self.indexer.top_k, self.indexer.loss_factor * self.indexer.loss_scale, self.eps, self.window)
        attend = context_indexed_attention_choice if self.sends_values else context_indexed_attention
        norm = self.indexer.k_norm
        # avoid local names that extend lifetimes: attention's output is popped from the list
        made = [*attend(self.cp, choice, starts, self.sinks, q, k, v, index_q, index_k, index_weights, norm.weight, norm.bias, cos, sin)]
        joined = self.o_proj.reduce(self.o_proj(gated(made.pop(0).flatten(2), gate, by_head=self.by_head)))
        return joined, made[0] if made else None
