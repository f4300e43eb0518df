"""Attention residuals compared with the paper's formula: losses and every gradient of a small model."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.load import spec_from_document
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.model.stage import Stage

pytestmark = pytest.mark.runtime
H, F, WORDS, LAYERS, EPS = 24, 40, 50, 5, 1e-5


def stage_of(group: int, **model: Any) -> Stage:
    """A stage of five dense layers whose queries are not zero."""
    sizes = {"pattern": "D", "num_layers": LAYERS, "hidden_size": H, "vocab_size": WORDS, "norm_eps": EPS}
    sizes |= {"mlp": {"ffn_hidden_size": F, "activation": "gelu"}, "attention_residuals": {"group_layers": group}}
    document = {"format": "megaplan.spec/1", "name": "depth", "model": sizes | model, "batch": {"micro_batch_size": 2, "seq_length": 7}}
    document |= {"precision": {"params": "fp32"}, "host": {"kernels": "reference"}}
    spec = spec_from_document(document)
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, LAYERS)]).slots[0])
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if "depth" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    return stage


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * scale


def block_attention(blocks: list[Tensor], partial: Tensor | None, query: Tensor, scale: Tensor) -> Tensor:
    """The sum of completed blocks and the partial one by the softmax of query · norm(value)."""
    values = torch.stack([*blocks, *([] if partial is None else [partial])])
    logits = torch.einsum("d,nbtd->nbt", query, rms(values, scale))
    return torch.einsum("nbt,nbtd->btd", logits.softmax(0), values)


def paper(parameters: dict[str, Tensor], tokens: Tensor, group: int) -> Tensor:
    """Logits by the paper's pseudocode: blocks so far, and the sum of the block that is being made."""
    blocks: list[Tensor] = []
    partial: Tensor | None = functional.embedding(tokens, parameters["embedding.weight"])
    for layer in range(LAYERS):
        own = {name.removeprefix(f"layers.{layer}."): value for name, value in parameters.items() if name.startswith(f"layers.{layer}.")}
        read = block_attention(blocks, partial, own["depth.query"], own["depth.scale"])
        if layer % group == 0 and partial is not None:
            blocks.append(partial)
            partial = None
        normed = rms(read, own["norm.weight"])
        made = functional.gelu(normed @ own["up_proj.weight"].t(), approximate="tanh") @ own["down_proj.weight"].t()
        partial = made if partial is None else partial + made
    last = block_attention(blocks, partial, parameters["final_norm.depth.query"], parameters["final_norm.depth.scale"])
    return rms(last, parameters["final_norm.weight"]) @ parameters["head.weight"].t()


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_a_model_is_the_papers(group: int) -> None:
    stage = stage_of(group)
    tokens = torch.randint(0, WORDS, (2, 7), generator=torch.Generator().manual_seed(2))
    logits = stage(tokens)
    parameters = dict(stage.named_parameters())
    expected = paper(parameters, tokens, group)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    slope = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(each, list(parameters.values()), slope) for each in (logits, expected))
    for name, ours, other in zip(parameters, found, wanted, strict=True):
        assert (ours - other).norm() <= 2e-5 * other.norm() + 1e-9, name


def test_queries_start_at_zero_so_that_all_values_weigh_the_same() -> None:
    stage = stage_of(1)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name.endswith("depth.query"):
                parameter.zero_()
    values = tuple(torch.randn(2, 7, H) for _ in range(4))
    torch.testing.assert_close(stage.layers["3"].depth(values), torch.stack(values).mean(0))
