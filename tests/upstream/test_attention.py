"""Attention, rotary embedding and the indexer beside transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from upstream_checks import compare, normal, note, rms_ratio

pytest.importorskip("transformers")
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_32
from transformers.models.llama import modeling_llama as llama

from megakernels import attention, indexed_attention, rope
from megaplan.spec import models as spec
from megarun.model.attention import LatentAttention
from megarun.model.rotary import Rotary, rotary_table

SCALE = 0.3


class Groups(nn.Module):
    """Attributes that transformers' attention asks of a layer."""

    def __init__(self, num_key_value_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups


def mask_of(length: int, window: int | None) -> Tensor:
    """Additive, [1, 1, T, T]."""
    visible = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    at = torch.arange(length)
    seen = visible(torch.tensor(0), torch.tensor(0), at[:, None], at[None, :])
    return torch.zeros(length, length).masked_fill(~seen, -torch.inf)[None, None]


def eager(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    out, _ = llama.eager_attention_forward(module, *(each.transpose(1, 2) for each in (q, k, v)), mask, scale)
    return out


@pytest.mark.parametrize(("heads", "groups", "window"), [(4, 4, None), (6, 2, None), (4, 1, 9), (6, 3, 1)])
@pytest.mark.parametrize("length", [1, 37])
def test_grouped_query_attention(heads: int, groups: int, window: int | None, length: int) -> None:
    inputs = {"q": normal(0, 2, length, heads, 12), "k": normal(1, 2, length, groups, 12), "v": normal(2, 2, length, groups, 12)}
    compare(
        f"attention {heads}/{groups} window {window}",
        "transformers llama eager_attention_forward",
        lambda q, k, v: attention(q, k, v, SCALE, window),
        lambda q, k, v: eager(Groups(heads // groups), q, k, v, mask_of(length, window), SCALE),
        inputs,
    )


def table_of(length: int, width: int) -> tuple[Rotary, tuple[Tensor, Tensor]]:
    """Ours, and cos and sin as transformers has them, both halves alike."""
    ours = rotary_table(torch.arange(length), width, 10_000.0, torch.device("cpu"))
    module = llama.LlamaRotaryEmbedding(
        llama.LlamaConfig(hidden_size=width, num_attention_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    )
    return ours, module(torch.zeros(1, length, width), torch.arange(length)[None])


@pytest.mark.parametrize("length", [1, 37])
def test_rotary_embedding(length: int) -> None:
    ours, (cos, sin) = table_of(length, 10)
    compare(
        "rope",
        "transformers llama apply_rotary_pos_emb",
        lambda x: rope(x, ours.cos, ours.sin),
        lambda x: llama.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0],
        {"x": normal(0, 2, length, 3, 10)},
    )


LATENT = {"q_down": "q_a_proj", "q_latent_norm": "q_a_layernorm", "q_up": "q_b_proj", "kv_down": "kv_a_proj_with_mqa"}
LATENT |= {"kv_latent_norm": "kv_a_layernorm", "kv_up": "kv_b_proj", "o_proj": "o_proj"}
WIDTHS = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


@pytest.mark.parametrize("length", [1, 29])
def test_latent_attention(length: int) -> None:
    """The whole block but its first norm and residual: every gradient is one of `mla_kv`, `rope`, `attention` or a linear."""
    ours = LatentAttention(spec.LatentAttention(kind="mla", num_heads=3, **WIDTHS), 16, 1e-6, 0)
    config = deepseek.DeepseekV3Config(
        hidden_size=16, num_attention_heads=3, num_key_value_heads=3, attn_implementation="eager", rope_interleave=False, **WIDTHS
    )
    config._attn_implementation = "eager"
    theirs = deepseek.DeepseekV3Attention(config, 0)
    weights = {"norm": torch.ones(16)} | {
        name: normal(index, *ours.get_submodule(name).weight.shape) / 3 for index, name in enumerate(LATENT)
    }
    table, (cos, sin) = table_of(length, 4)

    def whole(x: Tensor, **given: Tensor) -> Tensor:
        named = {f"{name}.weight": tensor for name, tensor in given.items()} | {"norm.weight": weights["norm"]}
        return torch.func.functional_call(ours, named, (x, table)) - x

    def published(x: Tensor, **given: Tensor) -> Tensor:
        normed = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        named = {f"{LATENT[name]}.weight": tensor for name, tensor in given.items()}
        return torch.func.functional_call(theirs, named, (normed, (cos, sin), mask_of(length, None)))[0]

    given = {name: tensor for name, tensor in weights.items() if name != "norm"}
    compare("mla", "transformers DeepseekV3Attention", whole, published, {"x": normal(9, 2, length, 16), **given})


class Scores(TorchFunctionMode):
    """The scores among which torch's `topk` chooses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.topk:
            self.found = args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("length", "heads"), [(1, 2), (33, 2), (33, 5)])
def test_indexer(length: int, heads: int) -> None:
    """Keys as DeepSeek-V3.2's indexer chooses them: with two heads many scores are zero, and equal."""
    hidden, rank, width, top_k = 16, 12, 8, 7
    config = deepseek_32.DeepseekV32Config(
        hidden_size=hidden, q_lora_rank=rank, index_n_heads=heads, index_head_dim=width, index_topk=top_k, qk_rope_head_dim=4
    )
    indexer = deepseek_32.DeepseekV32Indexer(config, 0)
    for index, parameter in enumerate(indexer.parameters()):
        parameter.data = normal(index, *parameter.shape)
    x, latent = normal(20, 2, length, hidden), normal(21, 2, length, rank)
    table, cos_sin = table_of(length, 4)
    mask = mask_of(length, None)
    with Scores() as scores:
        chosen = indexer(x, latent, cos_sin, mask[:, 0].expand(2, -1, -1), None).long()
    ranked = scores.found.sort(dim=-1, descending=True, stable=True)
    first = ranked.indices[..., :top_k]
    # of equal scores torch takes any
    decided = (
        ranked.values[..., :top_k].amin(-1) > ranked.values[..., top_k : top_k + 1].amax(-1)
        if length > top_k
        else torch.ones(2, length) > 0
    )
    assert torch.equal(chosen.sort(-1).values[decided], first.sort(-1).values[decided])
    sparse = torch.full((2, 1, length, length), -torch.inf).scatter(-1, first[:, None], 0.0) + mask
    given = (indexer.wq_b(latent).unflatten(-1, (heads, width)), indexer.wk(x), indexer.weights_proj(x))
    norm, numbers = indexer.k_norm, {"scale": SCALE, "top_k": top_k, "loss_factor": 1.0, "eps": 1e-6}
    assert (sparse > -torch.inf).sum(-1).max() == min(top_k, length)
    compare(
        f"indexed_attention {heads} heads",
        "transformers DeepseekV32Indexer, llama eager attention",
        lambda q, k, v: indexed_attention(q, k, v, *given, norm.weight, norm.bias, table.cos, table.sin, **numbers),
        lambda q, k, v: eager(Groups(1), q, k, v, sparse, SCALE),
        {name: normal(30 + index, 2, length, 3, 6) for index, name in enumerate("qkv")},
    )


def test_scores_of_the_indexer() -> None:
    """No published implementation of the indexer's training differentiates; its scores' softmax is held by the log-sum-exp."""
    pytest.importorskip("fla")
    from fla.ops.dsa.naive import naive_dsa_indexer  # noqa: PLC0415

    from megakernels.ops.indexed_attention.op import _indexed_attention  # noqa: PLC0415

    q, k, weights = normal(0, 1, 23, 4, 8), normal(1, 1, 23, 8), normal(2, 1, 23, 4)
    heads, one, zero = normal(3, 1, 23, 2, 6), torch.ones(8), torch.zeros(8)
    normed = nn.functional.layer_norm(k, (8,))
    flat = torch.ones(23, 1), torch.zeros(23, 1)
    made = _indexed_attention(heads, heads, heads, q, k, weights, one, zero, *flat, None, SCALE, 5, 1.0, 1e-5, None, None)
    chosen = naive_dsa_indexer(q, normed, weights, topk=5, activation="relu")
    scores = torch.einsum("bth,bths->bts", weights, torch.einsum("bthd,bsd->bths", q, normed).relu()) / (4 * 8) ** 0.5
    kept = (
        torch.full_like(scores, -torch.inf).scatter(-1, chosen.clamp(min=0), 0.0).masked_fill(~torch.ones(23, 23).tril().bool(), -torch.inf)
    )
    note(
        "indexed_attention, log-sum-exps",
        "flash-linear-attention naive_dsa_indexer",
        {"index_lse": rms_ratio(made[3], (scores + kept).logsumexp(-1))},
    )
