"""A chunk whose backward is split, compared with unsplit ones: gradients come in two parts, and tensors that wait for W are alive."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from megaplan.budget import step
from megaplan.budget.actions import accumulating_backward_peak, forward_peak
from megaplan.budget.megarun import slot_chunks
from megaplan.budget.split_backward import SplitBackwardChunk
from megaplan.columns import Column
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.schedules.states import BACKWARD, BACKWARDED, FORWARD, FORWARD_AFTER_BACKWARD, FORWARDED, INPUT, UNTOUCHED, WEIGHT, RankState
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
def split_chunks(request: pytest.FixtureRequest, hybrid: Callable[..., Spec]) -> list[SplitBackwardChunk]:
    """The chunks of two ranks of a hybrid."""
    mesh = {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": {"kind": "interleaved_zero_bubble", "num_microbatches": 8}}
    changes: dict[str, Any] = {**mesh, "model.features": {}, **request.param}
    spec = hybrid(changes)
    inventory = build_inventory(spec)
    chunks = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 5), (5, 10)]))
    found = [chunk for chunk in chunks if isinstance(chunk, SplitBackwardChunk)]
    assert len(found) == 2
    return found


def test_gradients_of_i_and_of_w_are_the_whole_ones(split_chunks: list[SplitBackwardChunk]) -> None:
    """The sum holds for the chunk, for each of its blocks, and in every state in which some are there."""
    for chunk in split_chunks:
        inputs = chunk.input_half
        assert 0 < chunk.late_bytes < chunk.unsharded_bytes
        assert inputs.unsharded_bytes + chunk.late_bytes == chunk.unsharded_bytes
        assert inputs.root.unsharded_bytes + sum(unit.unsharded_bytes for unit in inputs.units) == inputs.unsharded_bytes
        for state in (FORWARD_AFTER_BACKWARD, BACKWARDED):
            assert chunk.held(state)[0] == chunk.unsharded_bytes
            assert chunk.held(state, weight_grads=False)[0] + chunk.late_bytes == chunk.unsharded_bytes
        assert chunk.held(FORWARDED, weight_grads=False)[0] == 0


def test_a_forward_holds_the_gradients_there_are(split_chunks: list[SplitBackwardChunk]) -> None:
    for chunk in split_chunks:
        for state in (FORWARD_AFTER_BACKWARD, BACKWARDED):
            assert forward_peak(chunk, state, weight_grads=False).total == forward_peak(chunk, state).total - chunk.late_bytes


def test_i_leaves_what_waits_and_w_what_it_makes(split_chunks: list[SplitBackwardChunk]) -> None:
    """Between bounds: at the end of I all blocks but the last wait; at the end of the first W all gradients but its last exist."""
    for chunk in split_chunks:
        late = [unit.split.late_bytes for unit in chunk.units if unit.split is not None]
        first = next(unit.split.halves.pending_bytes for unit in chunk.units if unit.split is not None)
        assert chunk.waiting_bytes == sum(chunk.waiting_cells(1).values())
        for state in (FORWARD_AFTER_BACKWARD, BACKWARDED):
            found = chunk.input_peak(state, weight_grads=True).total
            assert found >= chunk.waiting_bytes - first + chunk.unsharded_bytes
            assert found <= accumulating_backward_peak(chunk, state).total + chunk.waiting_bytes + chunk.output_bytes
        alone = chunk.weight_peak(weight_grads=False).total
        assert alone >= chunk.unsharded_bytes - late[0]
        assert alone <= chunk.weight_peak(weight_grads=True).total + max(late)


def test_the_running_microbatch_is_counted_once(split_chunks: list[SplitBackwardChunk]) -> None:
    """Alone it accounts for all bytes except its chunk's gathered parameters; each further one adds its saved tensors."""
    for chunk in split_chunks:
        none = RankState(FORWARD, 0, (0,), (0,), 0, 0, False, (BACKWARDED,), (True,))
        for kind, name in ((FORWARD, "in_flight"), (INPUT, "in_flight"), (BACKWARD, "in_flight"), (WEIGHT, "waiting")):
            one, two = (step._others([chunk], none._replace(kind=kind, **{name: (count,)})) for count in (1, 2))
            assert one == (chunk.held(BACKWARDED)[1] if kind is WEIGHT else chunk.output_bytes if kind is not FORWARD else 0)
            assert two - one == (chunk.waiting_bytes if kind is WEIGHT else chunk.saved_bytes)


def test_a_first_layer_is_gathered_before_the_libraries_have_a_workspace(hybrid: Callable[..., Spec]) -> None:
    """Split backwards or not: a rank's very first forward gathers its first layer while no product has run."""
    wide = {**DENSE, "model.vocab_size": 65536, "batch.micro_batch_size": 1, "batch.seq_length": 16, "model.features": {}}
    for kind in ("interleaved_zero_bubble", "1f1b"):
        spec = hybrid({"mesh": {"pp": 2, "dp_shard": 4}, "schedule": {"kind": kind, "num_microbatches": 4}, **wide})
        inventory = build_inventory(spec)
        chunk, _ = slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 1), (1, 10)]))
        forward = RankState(FORWARD, 0, (1,), (0,), 0, 0, False, (UNTOUCHED,), (False,))
        steady = step.step_peak([chunk], [forward], step.HeldBySchedule(), workspace_bytes=1000)
        assert steady.where.startswith("gathering of layers.0, ")
        assert steady.first is not None
        assert steady.first.total == steady.total - 1000
        assert steady.first.cells[Column.WORKSPACE] == steady.cells[Column.WORKSPACE] - 1000
        again = step.step_peak([chunk], [forward._replace(states=(BACKWARDED,))], step.HeldBySchedule(), workspace_bytes=1000)
        assert again.first is None


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_w_of_a_v_keeps_the_input_that_its_linears_read(hybrid: Callable[..., Spec], placement: str) -> None:
    """After a norm they read a tensor of the block itself. The slots of the last rank are 1 and 2; of slot 1 the input is received."""
    mesh = {"mesh": {"pp": 2, "vpp": 2, "tp": 2}, "schedule": {"kind": "zbv", "num_microbatches": 8}}
    spec = hybrid({**mesh, **MANY_TOKENS, **DENSE, "model.norm_placement": placement, "model.features": {}})
    inventory = build_inventory(spec)
    layout = build_layout(spec, inventory, [(0, 2), (2, 5), (5, 8), (8, 10)])
    chunks = [chunk for chunk in slot_chunks(spec, inventory, layout) if isinstance(chunk, SplitBackwardChunk)]
    boundary = chunks[0].policy.boundary_bytes
    assert [chunk.kept_input_bytes for chunk in chunks] == [0, 0, boundary if placement == "post" else 0, 0]
    for chunk in chunks:
        there, own = (chunk.weight_peak(weight_grads=True, owns_input=owns).total for owns in (False, True))
        assert there <= own <= there + chunk.kept_input_bytes
    point = RankState(INPUT, 0, (1, 0), (0, 1), 0, 0, False, (BACKWARDED, BACKWARDED), (True, True))
    more = step._others(chunks[1:3], point._replace(kept_inputs=3)) - step._others(chunks[1:3], point)
    assert more == 3 * chunks[2].kept_input_bytes
