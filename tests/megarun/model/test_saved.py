"""A block keeps for backward exactly the union of its operations' saved sets, by storage and by live bytes."""

from typing import Any

import pytest
import torch
from saved_storages import SavedStorage, saved_storages
from torch import nn

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.engine.build import build_stage, materialise
from megarun.engine.initialise import initialise
from megarun.model.rotary import Rotary, rotary_table

pytestmark = pytest.mark.runtime
B, T, H = 2, 24, 32
CHUNKS = SEGMENTS = 3
F32, I32 = torch.float32, torch.int32
NORM = [((B, T), F32), ((B, T, H), F32)]  # rstd, and the normed input that the first linear keeps

# Shapes follow docs/reference/ops.md; the block's input belongs to the block before it.
GQA = [
    *NORM,
    *[((B, T, 4, 8), F32), ((B, T, 2, 8), F32), ((B, T, 2 * 8), F32)],  # q and k after rope, v
    *[((B, T, 4, 8), F32), ((B, 4, T), F32)],  # out, lse
]
GQA_QK_NORM = [
    *NORM,
    *[((B, T, 4 * 8), F32), ((B, T, 4), F32), ((B, T, 2 * 8), F32), ((B, T, 2), F32)],  # q and k before their norms, rstds
    *[((B, T, 4, 8), F32), ((B, T, 2, 8), F32), ((B, T, 2 * 8), F32)],
    *[((B, T, 4, 8), F32), ((B, 4, T), F32)],
]
MLA = [
    *NORM,
    *[((B, T, 8), F32), ((B, T), F32), ((B, T, 8), F32)],  # q latent, rstd, normed q latent
    *[((B, T, 10 + 4), F32), ((B, T), F32), ((B, T, 10), F32)],  # kv_down's output whole, rstd, normed latent
    *[((B, T, 2, 12), F32), ((B, T, 2, 12), F32), ((B, T, 2, 6), F32)],  # q, k, v
    *[((B, T, 2, 6), F32), ((B, 2, T), F32)],
]
INNER, GROUPS, HEADS = 64, 2 * 8, 4
M = [
    *NORM,
    *[((B, T, 2 * INNER + 2 * GROUPS + HEADS), F32), ((B, T, INNER + 2 * GROUPS), F32)],  # in_proj's output whole, convolved
    *[((B, CHUNKS, HEADS, 16, 8), F32)],
    *[((B, T, HEADS, 16), F32), ((B, T, 2), F32), ((B, T, INNER), F32)],  # y, rstd of each group, out_proj's input
]
N, K, E, WIDTH = B * T, 2, 4, 24
E_SWIGLU = [
    *NORM,
    *[((N, E), F32), ((N, K), I32), ((N * K,), I32)],  # probs, indices, rows
    *[((N * K, H), F32), ((N, K), F32), ((E,), I32), ((N * K, WIDTH), F32), ((N * K, WIDTH), F32)],
    *[((B, T, 16), F32)] * 3,  # shared expert: gate, up, down_proj's input
]
E_RELU2 = [
    *NORM,
    *[((N, E), F32), ((N, K), I32), ((N * K,), I32)],
    *[((N * K, H), F32), ((N, K), F32), ((E,), I32), ((N * K, WIDTH), F32)],
]
D_SWIGLU = [*NORM, *[((B, T, 40), F32)] * 3]
D_GELU = [*NORM, *[((B, T, 40), F32)] * 2]
R = [
    *NORM,
    *[((B, T, 2 * 4), F32), ((B, T, 3 * 4), F32)],  # the convolutions' inputs
    *[((B, T, 2 * 4), F32), ((B, T, 3 * 4), F32), ((B, T, 3), F32), ((B, SEGMENTS + 1, 3, 4, 4), F32)],  # q | k, v, f, states
    *[((B, T, 3, 4), F32), ((B, T, 3 * 4), F32), ((B, T, 1), F32), ((B, T, 3 * 4), F32)],  # y, gate, rstd, out_proj's input
]
MLA_SECTION = {
    "kind": "mla",
    "num_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}


class AloneBlock(nn.Module):
    """A block with the rotary table its stage would give it."""

    def __init__(self, block: nn.Module, table: Rotary) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("cos", table.cos)
        self.register_buffer("sin", table.sin)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, Rotary(self.cos, self.sin))


def first_stage(spec: Spec) -> nn.Module:
    inventory = build_inventory(spec)
    stage = build_stage(spec, inventory, build_layout(spec, inventory, [(0, spec.model.num_layers)]).slots[0])
    materialise(stage, torch.device("cpu"))
    initialise(stage, inventory, 0)
    return stage


def sizes(storages: list[tuple[tuple[int, ...], torch.dtype]]) -> list[tuple[int, torch.dtype]]:
    return sorted(((torch.Size(shape).numel() * dtype.itemsize, dtype) for shape, dtype in storages), key=str)


@pytest.mark.parametrize(
    ("letter", "overrides", "expected"),
    [
        ("A", {}, GQA),
        ("A", {"model.attention.window_size": 5}, GQA),
        ("A", {"model.attention.qk_norm": True}, GQA_QK_NORM),
        ("A", {"model.attention.qk_norm": True, "model.attention.bias": True}, GQA_QK_NORM),
        ("A", {"model.attention": MLA_SECTION}, MLA),
        ("M", {}, M),
        ("E", {}, E_SWIGLU),
        ("E", {"model.moe.activation": "relu2", "model.moe.shared_ffn_hidden_size": 0}, E_RELU2),
        ("D", {}, D_SWIGLU),
        ("D", {"model.mlp.activation": "gelu"}, D_GELU),
        ("R", {}, R),
    ],
)
def test_a_block_keeps_its_operations_saved_sets(letter: str, overrides: dict[str, Any], expected: Any, spec_with: Any) -> None:
    """Storage by storage, and to the byte of what the allocator holds after the forward."""
    spec = Spec.model_validate(spec_with({"model.pattern": letter, "model.num_layers": 1, **overrides}))
    stage = first_stage(spec)
    width = 4 if "qk_rope_head_dim" in overrides.get("model.attention", {}) else 8
    block = AloneBlock(stage.layers["0"], rotary_table(torch.arange(T), width, 1e4, torch.device("cpu")))
    found = saved_storages(block, (torch.randn(B, T, H, requires_grad=True),))
    kept = [storage for storage in found.storages if not storage.is_input]
    assert sorted(((storage.nbytes, storage.dtype) for storage in kept), key=str) == sizes(expected)
    assert found.output_bytes == B * T * H * 4
    assert found.live_bytes == found.saved_bytes + found.output_bytes


def test_bf16_keeps_bf16(spec_with: Any) -> None:
    """In bf16 only the statistics of norms, attention and routing, and R's states, are kept in fp32."""
    for letter, num_wide in {"A": 2, "M": 2, "E": 3, "D": 1, "R": 3}.items():
        overrides = {f"precision.{role}": "bf16" for role in ("params", "grads", "master", "moments", "reduce")}
        spec = Spec.model_validate(spec_with({"model.pattern": letter, "model.num_layers": 1, **overrides}))
        block = AloneBlock(first_stage(spec).layers["0"], rotary_table(torch.arange(T), 8, 1e4, torch.device("cpu")))
        found = saved_storages(block, (torch.randn(B, T, H, dtype=torch.bfloat16, requires_grad=True),))
        wide = [storage for storage in found.storages if storage.dtype == torch.float32]
        assert len(wide) == num_wide, (letter, wide)
        assert found.live_bytes == found.saved_bytes + found.output_bytes


def test_embedding_and_head(spec_with: Any) -> None:
    """The embedding keeps its token ids; the final norm and the head keep rstd and the normed stream, and logits are the output."""
    spec = Spec.model_validate(spec_with({"model.pattern": "D", "model.num_layers": 1}))
    found = saved_storages(first_stage(spec), (torch.randint(0, 61, (B, T)),))
    kept = [storage for storage in found.storages if not storage.is_input]
    block_outputs = [((B, T, H), F32)] * 2  # the embedding's, which the block's norm keeps, and the block's, which the final norm keeps
    assert sorted(((s.nbytes, s.dtype) for s in kept), key=str) == sizes([*D_SWIGLU, *block_outputs, *NORM])
    assert [storage for storage in found.storages if storage.is_input] == [SavedStorage(B * T * 8, torch.int64, (B, T), True)]
    assert found.output_bytes == B * T * 61 * 4
    assert found.live_bytes == found.saved_bytes + found.output_bytes


def test_the_measure_sees_what_hooks_do_not() -> None:
    """A tensor kept as an attribute is not a saved tensor, and both what survives and the live bytes show it."""

    class Hoarder(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = x * 2
            return x + 1

    found = saved_storages(Hoarder(), (torch.randn(10, requires_grad=True),))
    assert found.storages == ()
    assert [storage.shape for storage in found.cached] == [(10,)]
    assert found.live_bytes > found.output_bytes
