"""Uneven routing that random initial weights alone cause, for the model whose replayed runs balance no routing.

python benchmarks/accuracy_megatron/routing.py [--models 24]     writes routing.json next to it; needs torch

The model of the `gpt3_moe_mcore_te_ep8` runs as Megatron-LM initialises it: normal weights of deviation 0.02, those that write to the
residual stream 0.02 / √(2 · layers). Its text is not published: tokens are drawn from Zipf's law over its vocabulary, and dropout is
left out. Every group of experts that a rank could hold is one draw of a rank.
"""

import argparse
import json
from pathlib import Path
from statistics import quantiles, stdev

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, linear, scaled_dot_product_attention

LAYERS, HIDDEN, HEADS, EXPERTS, TOP_K, WIDTH, VOCABULARY = 12, 512, 8, 8, 2, 1024, 50257
SEQUENCES, POSITIONS = 4, 1024
STD = 0.02
OUT_STD = STD / (2 * LAYERS) ** 0.5


def rows_of_experts(seed: int) -> Tensor:
    """Rows of each expert over all layers, for one draw of weights and tokens: [experts]."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int, std: float = STD) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    frequency = 1 / torch.arange(1, VOCABULARY + 1)
    tokens = torch.multinomial(frequency, SEQUENCES * POSITIONS, replacement=True, generator=generator).view(SEQUENCES, POSITIONS)
    stream = embedding(tokens, weight(VOCABULARY, HIDDEN)) + weight(POSITIONS, HIDDEN)
    rows = torch.zeros(EXPERTS, dtype=torch.int64)
    for _ in range(LAYERS):
        normed = layer_norm(stream, (HIDDEN,))
        heads = linear(normed, weight(3 * HIDDEN, HIDDEN)).view(SEQUENCES, POSITIONS, HEADS, 3, -1).permute(3, 0, 2, 1, 4)
        context = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        stream = stream + linear(context, weight(HIDDEN, HIDDEN, std=OUT_STD))
        normed = layer_norm(stream, (HIDDEN,)).flatten(0, 1)
        top, chosen = linear(normed, weight(EXPERTS, HIDDEN)).topk(TOP_K)
        made = torch.zeros_like(normed)
        for expert in range(EXPERTS):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            up, down = weight(WIDTH, HIDDEN), weight(HIDDEN, WIDTH, std=OUT_STD)
            output = linear(gelu(linear(normed[token], up)), down)
            made.index_add_(0, token, output * top.softmax(-1)[token, place, None])
            rows[expert] += len(token)
        stream = stream + made.view_as(stream)
    return rows


def spread(rows: Tensor, experts_per_rank: int) -> dict[str, float | int]:
    """Rows of every rank of every model as a ratio to the even share, [models, experts]."""
    groups = rows.view(len(rows), -1, experts_per_rank).sum(-1)
    shares = (groups / groups.float().mean(-1, keepdim=True)).flatten().tolist()
    cuts = quantiles(shares, n=20)
    return {
        "experts": experts_per_rank,
        "count": len(shares),
        "least": min(shares),
        "low": cuts[0],
        "high": cuts[-1],
        "most": max(shares),
        "deviation": stdev(shares),
    }


def main() -> None:
    """Draw, route, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=24)
    models = parser.parse_args().models
    with torch.inference_mode():
        rows = torch.stack([rows_of_experts(seed) for seed in range(models)])
    found = {"models": models, "tokens": SEQUENCES * POSITIONS, "ranks": [spread(rows, count) for count in (1, 2, 4)]}
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
