"""Layers that read another one's keys and values compared with plain formulas, and parts of a packed tensor with their gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megaplan.blocks.payload import Payload
from megaplan.dtypes import DType
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.load import spec_from_document
from megaplan.spec.local import Boundary, Part
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.model.payload import pack_values, unpack_values

pytestmark = [pytest.mark.runtime, pytest.mark.requirement("R-14")]
H, HEADS, GROUPS, WIDTH, WORDS, LAYERS, EPS = 24, 4, 2, 6, 50, 4, 1e-5


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * scale


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, T, heads, D] each -> [B, T, heads · D], causal; each key head is for several query heads."""
    k, v = (each.repeat_interleave(HEADS // GROUPS, dim=2) for each in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH)
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(2)


def plain(parameters: dict[str, Tensor], tokens: Tensor, sources: dict[int, int]) -> Tensor:
    x, made = functional.embedding(tokens, parameters["embedding.weight"]), dict[int, tuple[Tensor, Tensor]]()
    for layer in range(LAYERS):
        own = {name.removeprefix(f"layers.{layer}."): value for name, value in parameters.items() if name.startswith(f"layers.{layer}.")}
        normed = rms(x, own["norm.weight"])
        q = rms((normed @ own["q_proj.weight"].t()).unflatten(-1, (-1, WIDTH)), own["q_norm.weight"])
        if layer not in sources:
            k, v = ((normed @ own[f"{name}_proj.weight"].t()).unflatten(-1, (-1, WIDTH)) for name in "kv")
            made[layer] = rms(k, own["k_norm.weight"]), v
        x = x + attend(q, *made[sources.get(layer, layer)]) @ own["o_proj.weight"].t()
    return rms(x, parameters["final_norm.weight"]) @ parameters["head.weight"].t()


@pytest.mark.parametrize("sources", [{1: 0, 2: 0, 3: 0}, {2: 0, 3: 1}, {3: 0}])
def test_readers_attend_to_their_sources_keys_and_values(sources: dict[int, int]) -> None:
    """Logits and every gradient; a reader has no projections of its own for them."""
    groups = [{"source": each, "layers": [layer for layer in sources if sources[layer] == each]} for each in sorted({*sources.values()})]
    heads = {"kind": "gqa", "num_heads": HEADS, "num_kv_heads": GROUPS, "head_dim": WIDTH, "qk_norm": True, "shared_keys": groups}
    model: dict[str, Any] = {"pattern": "A", "num_layers": LAYERS, "hidden_size": H, "vocab_size": WORDS, "norm_eps": EPS}
    model["attention"] = heads | {"nope_layers": list(range(LAYERS))}
    document = {"format": "megaplan.spec/1", "name": "keys", "model": model, "batch": {"micro_batch_size": 2, "seq_length": 7}}
    spec = spec_from_document(document | {"precision": {"params": "fp32"}, "host": {"kernels": "reference"}})
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, LAYERS)]).slots[0])
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 0)
    parameters = dict(stage.named_parameters())
    assert not [name for name in parameters for layer in sources if name.startswith((f"layers.{layer}.k_", f"layers.{layer}.v_"))]
    tokens = torch.randint(0, WORDS, (2, 7), generator=torch.Generator().manual_seed(2))
    logits, expected = stage(tokens), plain(parameters, tokens, sources)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    slope = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(each, list(parameters.values()), slope) for each in (logits, expected))
    for name, ours, other in zip(parameters, found, wanted, strict=True):
        assert (ours - other).norm() <= 2e-5 * other.norm() + 1e-9, name


def test_parts_of_a_packed_tensor_keep_their_bits_and_gradients() -> None:
    """Any dtype goes with the stream's, an odd number of elements too; integers have zeros for a gradient."""
    shapes = {(3, 5): DType.FP32, (1, 7): DType.BF16, (2, 3): DType.INT32}
    values = tuple(
        Part(Payload(f"v{index}", "value", 0, (2,), lambda _: (), has_gradient=dtype is not DType.INT32), shape, dtype)
        for index, (shape, dtype) in enumerate(shapes.items())
    )
    of = Boundary(Part(None, (2, 3, 5), DType.BF16), values)
    assert [part.bytes for part in of.parts] == [64, 64, 16, 32]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, generator=generator).bfloat16().requires_grad_()
    wide = torch.randn(3, 5, generator=generator).requires_grad_()
    narrow = torch.randn(1, 7, generator=generator).bfloat16().requires_grad_()
    whole = torch.randint(-(2**31), 2**31 - 1, (2, 3), dtype=torch.int32, generator=generator)
    sent = pack_values(x, [wide, narrow, whole], of)
    assert sent.shape == (of.bytes // 2,)
    arrived = sent.detach().requires_grad_()
    stream, found = unpack_values(arrived, of)
    parts = [stream, *found.values()]
    assert all(torch.equal(part, given) and part.dtype == given.dtype for part, given in zip(parts, (x, wide, narrow, whole), strict=True))
    slopes = [torch.randn(part.shape, generator=generator).to(part.dtype) for part in parts[:3]]
    torch.autograd.backward(parts[:3], slopes)
    assert arrived.grad is not None
    assert not arrived.grad[-16:].any()
    sent.backward(arrived.grad)
    assert all(torch.equal(given.grad, slope) for given, slope in zip((x, wide, narrow), slopes, strict=True) if given.grad is not None)
    assert whole.grad is None
