"""Attention of every position to all of its row: values and gradients against its definition, facts, and what it refuses."""

import pytest
import torch
from attention_exact import BATCH, HEADS, KEY_HEADS, LENGTH, SCALE, WIDTH, assert_same, exact_attention, random_inputs

from megakernels import attention
from megakernels.ops.attention import facts, reference
from megakernels.ops.attention.inputs import Attention
from megakernels.ops.attention.sizes import accepts, sizes_of


@pytest.mark.parametrize("rows", [64, 5])
@pytest.mark.parametrize("cap", [None, 0.7])
def test_every_position_sees_all(monkeypatch: pytest.MonkeyPatch, rows: int, cap: float | None) -> None:
    """In blocks of queries too: the keys of each are the whole row."""
    monkeypatch.setattr(reference, "PLAIN_QUERIES", rows)
    tensors = random_inputs()
    found = attention(*tensors[:3], SCALE, sinks=tensors[3], cap=cap, causal=False)
    assert_same(found, exact_attention(*tensors[:4], None, cap=cap, causal=False), tensors[:4])


def test_torch_runs_it_and_facts_say_so() -> None:
    q, k, v = (each.detach().bfloat16() for each in random_inputs()[:3])
    given = Attention(q, k, v, None, SCALE, None, causal=False)
    sizes = sizes_of(given)
    assert sizes == facts.AttentionSizes(BATCH, LENGTH, LENGTH, HEADS, KEY_HEADS, WIDTH, WIDTH, 2, causal=False)
    assert not sizes.accepted
    assert not accepts(given)
    assert accepts(given._replace(causal=True))
    assert sizes.work().forward == 2 * LENGTH * HEADS * 2 * WIDTH


@pytest.mark.parametrize("more", [{"window": 4}, {"starts": torch.zeros(BATCH, LENGTH, dtype=torch.int32)}])
def test_neither_a_window_nor_documents(more: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="neither a window nor starts"):
        attention(*random_inputs()[:3], SCALE, causal=False, **more)
