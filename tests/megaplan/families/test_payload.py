"""Values that layers pass on: bytes of a boundary by rank, of receive buffers, outputs and traffic, and cuts before their readers."""

from typing import Any

import pytest

import megaplan
from megaplan.budget.megarun import slot_chunks
from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megaplan.errors import MegaplanError
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.layout.traffic import traffic_of
from megaplan.schedules import shared_buffers
from megaplan.spec.load import spec_from_document
from megaplan.spec.local import boundary, boundary_sizes, local_dims
from megaplan.spec.models import Spec

pytestmark = pytest.mark.requirement("R-14")
H, B, T, GROUPS, WIDTH = 64, 2, 128, 4, 8
STREAM, KEYS = B * T * H * 2, B * T * GROUPS * 2 * WIDTH * 2
"""Bytes of the residual stream, and of keys and values of one layer, in bf16."""
HEADS = {"kind": "gqa", "num_heads": 4, "num_kv_heads": GROUPS, "head_dim": WIDTH}
LATENTS = {"kind": "mla", "num_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
LATENTS["v_head_dim"] = 8


def made(attention: dict[str, Any], layers: int = 8, **sections: Any) -> Spec:
    model = {"pattern": "AD", "num_layers": layers, "hidden_size": H, "vocab_size": 128, "attention": attention}
    model |= {"mlp": {"ffn_hidden_size": 96}} | sections.pop("model", {})
    document = {"format": "megaplan.spec/1", "name": "p", "model": model, "batch": {"micro_batch_size": B, "seq_length": T}}
    return spec_from_document(document | sections)


def keys(*groups: tuple[int, list[int]]) -> dict[str, Any]:
    return HEADS | {"shared_keys": [{"source": source, "layers": layers} for source, layers in groups]}


def carried(spec: Spec) -> list[int]:
    """Bytes beyond the stream before each layer."""
    cuts = [boundary(spec, local_dims(spec), cut) for cut in range(1, spec.model.num_layers)]
    assert boundary_sizes(spec, local_dims(spec)) == [cut.bytes for cut in cuts]
    return [cut.bytes - cut.stream.own_bytes for cut in cuts]


def test_a_value_crosses_every_boundary_between_its_layer_and_its_last_reader() -> None:
    assert carried(made(keys((0, [2, 6])))) == [KEYS] * 6 + [0]
    assert carried(made(keys((0, [4]), (2, [6])))) == [KEYS, KEYS, 2 * KEYS, 2 * KEYS, KEYS, KEYS, 0]
    values = [STREAM, STREAM, 2 * STREAM]  # of attention residuals in groups of three
    assert carried(made(HEADS, 4, model={"attention_residuals": {"group_layers": 3}})) == [STREAM, STREAM, STREAM]
    assert carried(made(keys((0, [2])), 5, model={"attention_residuals": {"group_layers": 3}})) == [
        KEYS + values[0], KEYS + values[1], STREAM, 2 * STREAM
    ]  # fmt: skip


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_bytes_by_rank(tp: int, cp: int) -> None:
    """A tensor rank has its heads, a context rank its tokens; every tensor rank has a context rank's whole choice."""
    mesh = {"mesh": {"tp": tp, "cp": cp}}
    assert carried(made(keys((0, [2])), **mesh))[0] == KEYS // (tp * cp)
    indexer = {"num_heads": 2, "head_dim": 8, "layers": [0], "shared_layers": [2]}
    assert carried(made(LATENTS | {"indexer": indexer}, **mesh))[0] == B * (T // cp) * 4 * 4


def test_stages_receive_and_send_what_later_layers_read() -> None:
    """Receive buffers of each rank, its kept outputs, and traffic; a stage that only passes a value on, too."""
    document = {"mesh": {"pp": 4}, "schedule": {"kind": "1f1b", "num_microbatches": 4}}
    spec = made(keys((0, [6])), **document)
    inventory, spans = build_inventory(spec), [(0, 1), (1, 3), (3, 5), (5, 8)]
    layout = build_layout(spec, inventory, spans)
    chunks = slot_chunks(spec, inventory, layout)
    wide = STREAM + KEYS
    assert [(chunk.input_bytes, chunk.output_bytes) for chunk in chunks] == [(0, wide), (wide, wide), (wide, wide), (wide, 0)]
    budget = build_budget(spec, inventory, layout)
    received = [each.cells[Phase.OPTIMIZER][Column.COMMUNICATION] for each in sorted(budget.ranks, key=lambda each: each.ranks)]
    buffers = shared_buffers("1f1b", 4, 1, 4)
    assert received == [wide * sum(buffers[rank][0]) for rank in range(4)]
    (sent,) = [row for row in traffic_of(spec, inventory, spans) if row.axis == "pp"]
    assert sent.rank_bytes == 2 * 4 * 3 * wide // 4


def test_a_layer_that_runs_again_as_a_whole_leaves_its_values_to_the_first_reader_of_its_stage() -> None:
    """In another stage a reader keeps none: there they are in a receive buffer."""
    again = {"recompute": {"blocks": {"A": "full"}}, "mesh": {"pp": 2}, "schedule": {"num_microbatches": 2}}

    def kept(spec: Spec, cut: int) -> list[int]:
        inventory = build_inventory(spec)
        return [chunk.saved_bytes for chunk in slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, cut), (cut, 8)]))]

    alone, shared = made(HEADS, **again), made(keys((0, [2])), **again)
    assert [more - less for more, less in zip(kept(shared, 4), kept(alone, 4), strict=True)] == [KEYS, 0]
    assert [more - less for more, less in zip(kept(shared, 2), kept(alone, 2), strict=True)] == [KEYS, 0]  # of the stage's output


def test_cuts_may_part_readers_where_the_host_carries_values() -> None:
    """All readers but the last layers read the first one's keys: no cut that parts none would leave two stages alike."""
    pipeline = {"mesh": {"pp": 2}, "schedule": {"num_microbatches": 4}}
    spec = made(keys((0, [2, 4, 6])), **pipeline)
    (first, _) = megaplan.split(spec.as_document()).plan.spans
    assert first[1] in range(2, 7)
    manual = {"mode": "manual", "reason": "x", "spans": [[0, 4], [4, 8]], "together": [[0, 7]]}
    with pytest.raises(MegaplanError, match=r"MP331[\s\S]*cut 4 parts split\.together \[0, 7\]"):
        made(keys((0, [2, 4, 6])), split=manual, **pipeline)
    together = made(keys((0, [2, 4, 6])), split={"together": [[0, 7]]}, **pipeline)
    assert megaplan.split(together.as_document()).plan.spans == ((0, 7), (7, 8))
