"""A chunk whose backward is split, beside the same chunk with a whole one: gradients come in two parts, and what waits for W is alive."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from megaplan.budget.megarun import slot_chunks
from megaplan.budget.occupancy import BACKWARDED, FORWARDED, REFORWARDED
from megaplan.budget.split_backward import BACKWARD, FORWARD, INPUT, WEIGHT, HalvedChunk, _Moment, _Rank
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec

FEW_TOKENS = {"batch.micro_batch_size": 1, "batch.seq_length": 16, "model.mlp.ffn_hidden_size": 4096}
MANY_TOKENS = {"batch.micro_batch_size": 8, "batch.seq_length": 512}
DENSE = {"model.pattern": "D", **{f"model.{section}": None for section in ("attention", "moe", "mamba", "recurrent")}}
VARIANTS = [
    {**MANY_TOKENS, **DENSE, "recompute.default": "full"},
    *(
        {**tokens, **more}
        for tokens, more in product((FEW_TOKENS, MANY_TOKENS), ({}, {"precision.grads": "bf16"}, {"sharding.reshard_after_forward": True}))
    ),
]


@pytest.fixture(params=VARIANTS, ids=str)
def halved(request: pytest.FixtureRequest, hybrid: Callable[..., Spec]) -> list[HalvedChunk]:
    """The chunks of two ranks of a hybrid."""
    mesh = {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"kind": "interleaved_zero_bubble", "num_microbatches": 8}}
    changes: dict[str, Any] = {**mesh, "model.features": {}, **request.param}
    spec = hybrid(changes)
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, [(0, 5), (5, 10)])
    return [HalvedChunk(chunk, arrives_locally=False) for chunk in slot_chunks(spec, inventory, layout)]


def test_gradients_of_i_and_of_w_are_the_whole_ones(halved: list[HalvedChunk]) -> None:
    """For the chunk, for each of its blocks, and in every state in which some are there."""
    for chunk in halved:
        whole, inputs = chunk.whole, chunk.inputs
        assert 0 < chunk.late_bytes < whole.unsharded_bytes
        assert inputs.unsharded_bytes + chunk.late_bytes == whole.unsharded_bytes
        assert inputs.root.unsharded_bytes + sum(unit.unsharded_bytes for unit in inputs.units) == inputs.unsharded_bytes
        for state in (REFORWARDED, BACKWARDED):
            assert chunk.gradient_bytes(state, weighed=True) == whole.unsharded_bytes
            assert chunk.gradient_bytes(state, weighed=False) + chunk.late_bytes == whole.unsharded_bytes
        assert chunk.gradient_bytes(FORWARDED, weighed=False) == 0


def test_a_forward_is_the_whole_chunk_s_beside_the_gradients_there_are(halved: list[HalvedChunk]) -> None:
    for chunk in halved:
        for state in (REFORWARDED, BACKWARDED):
            whole = chunk.whole.forward_peak(state).total
            assert chunk.forward_peak(state, weighed=True).total == whole
            assert chunk.forward_peak(state, weighed=False).total == whole - chunk.late_bytes


def test_i_leaves_what_waits_and_w_what_it_makes(halved: list[HalvedChunk]) -> None:
    """Between bounds: at the end of I all but the last block waits; at the end of the first W all gradients are there but its last one."""
    for chunk in halved:
        whole = chunk.whole
        waiting = chunk.pending_bytes
        first = max(sum(chunk.pending_cells(1, index + 1).values()) - sum(chunk.pending_cells(1, index).values()) for index in (0, 1))
        for state, weighed in ((REFORWARDED, True), (BACKWARDED, True)):
            found = chunk.input_peak(state, weighed).total
            assert found >= waiting - first + whole.unsharded_bytes
            assert found <= whole.backward_peak(state).total + waiting + whole.output_bytes
        made_last = next(late for late in chunk._late if late)
        assert chunk.weight_peak(weighed=False).total >= whole.unsharded_bytes - made_last
        assert chunk.weight_peak(weighed=False).total <= chunk.weight_peak(weighed=True).total + max(chunk._late)


def test_the_running_microbatch_is_counted_once(halved: list[HalvedChunk]) -> None:
    """Alone it is all there is, beside what its chunk has gathered; each more adds what it keeps."""
    for chunk in halved:
        rank, none = _Rank([chunk]), _Moment(FORWARD, 0, (0,), (0,), 0, (BACKWARDED,), (True,))
        for kind, name in ((FORWARD, "full"), (INPUT, "full"), (BACKWARD, "full"), (WEIGHT, "pending")):
            one, two = (none._replace(kind=kind, **{name: (count,)}) for count in (1, 2))
            beside = chunk.whole.held(BACKWARDED)[1] if kind is WEIGHT else chunk.whole.output_bytes if kind is not FORWARD else 0
            assert rank.total(one) == rank.running(one).total + beside
            assert rank.total(two) - rank.total(one) == (chunk.pending_bytes if kind is WEIGHT else chunk.whole.saved_bytes)
