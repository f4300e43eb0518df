"""Layers that attend within a window."""

import pytest

from megaplan.spec.models import GroupedQueryAttention, LatentAttention, LayerWindow

WINDOW = {"window_size": 5, "full_layers": (2, 4)}


@pytest.mark.parametrize(
    "attention",
    [
        GroupedQueryAttention(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=8, **WINDOW),
        LatentAttention(
            kind="mla", num_heads=4, q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, **WINDOW
        ),
    ],
    ids=["grouped", "latent"],
)
def test_a_layer_by_its_global_index(attention: GroupedQueryAttention | LatentAttention) -> None:
    """Blocks past the layers, such as a prediction depth, have the window too."""
    assert [attention.window(layer) for layer in (0, 2, 3, 4, 99)] == [5, None, 5, None, 5]
    several = attention.model_copy(update={"windows": (LayerWindow(size=9, layers=(0, 6)), LayerWindow(size=2, layers=(3,)))})
    assert [several.window(layer) for layer in (0, 1, 2, 3, 6, 99)] == [9, 5, None, 2, 9, 5]
    everywhere = attention.model_copy(update={"window_size": None, "full_layers": ()})
    assert everywhere.window(2) is None
