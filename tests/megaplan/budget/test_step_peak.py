"""The peak of a step is the largest of all its points: skipped points could not be the peak, and cells sum to the total."""

from collections.abc import Callable, Sequence
from copy import copy
from itertools import product
from typing import Any

import pytest

from megaplan.budget import step
from megaplan.budget.actions import accumulating_backward_peak, forward_peak, reducing_backward_peak
from megaplan.budget.chunk import Chunk
from megaplan.budget.megarun import slot_chunks
from megaplan.budget.tape import reduction
from megaplan.budget.values import Budget
from megaplan.hosts.megarun.sizes import GroupBytes
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.schedules.registry import SPLIT_BACKWARD
from megaplan.schedules.states import BACKWARDED, FORWARD, FORWARD_AFTER_BACKWARD, FORWARDED, REDUCE, UNTOUCHED, RankState
from megaplan.spec.models import Spec

SCHEDULES = [
    ("1f1b", 1, 1, 3),
    ("1f1b", 4, 1, 4),
    ("1f1b", 4, 1, 9),
    ("gpipe", 4, 1, 6),
    ("interleaved_1f1b", 2, 2, 4),
    ("looped_bfs", 2, 2, 4),
    ("interleaved_zero_bubble", 4, 1, 8),
    ("interleaved_zero_bubble", 2, 2, 4),
    ("zbv", 2, 2, 5),
    ("dualpipev", 4, 2, 9),
]
VARIANTS = [
    {},
    {"sharding.reshard_after_forward": True},
    {"precision.grads": "bf16"},
    {"precision.grads": "bf16", "batch.micro_batch_size": 1, "batch.seq_length": 16, "model.mlp.ffn_hidden_size": 8192},
    {"sharding.reshard_after_forward": True, "batch.micro_batch_size": 1, "batch.seq_length": 16, "model.mlp.ffn_hidden_size": 8192},
    {"mesh.ep": 2},
    {"recompute.default": "selective", "sharding.reshard_after_forward": True},
    {"model.vocab_size": 65536},
]


@pytest.mark.parametrize(("kind", "pp", "vpp", "m"), SCHEDULES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nothing_larger_is_passed_over(
    kind: str,
    pp: int,
    vpp: int,
    m: int,
    variant: dict[str, Any],
    hybrid: Callable[..., Spec],
    budget_of: Callable[..., Budget],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound holds for every forward and reduction of every rank, also if a reduction is the largest point (a wide MLP, one short row).

    The cells of every point, not only of the largest, sum to the live bytes, and none is negative.
    """
    found, checked = step.step_peak, []

    def checking(chunks: Sequence[Chunk], points: Sequence[RankState], held: step.HeldBySchedule, workspace: int) -> step.StepPeak:
        largest = 0
        for point in points:
            chunk, state = chunks[point.chunk], point.states[point.chunk]
            grads, owns_input = point.weight_grads[point.chunk], point.owns_input
            peak = step._peak(chunk, point.kind, state, 0, weight_grads=grads, owns_input=owns_input)
            others = step._others(chunks, point) + held.at(point.kind, state)
            cells = step._step_peak(chunks, held, (peak.total + others, point, peak)).cells
            assert sum(cells.values()) == peak.total + others, point
            assert min(cells.values()) >= 0, (point, cells)
            largest = max(largest, peak.total + others)
            if point.kind is FORWARD:
                assert peak.total <= chunk.forward_bound + (chunk.unsharded_bytes if state > FORWARDED else 0), point
            elif point.kind is REDUCE:
                assert peak.total <= chunk.reduce_bound, point
            checked.append(point)
        most = found(chunks, points, held, workspace)
        assert most.total == largest == sum(most.cells.values())
        return most

    monkeypatch.setattr("megaplan.budget.megarun.step_peak", checking)
    mesh, schedule = {"pp": pp, "vpp": vpp, "dp_shard": 2}, {"kind": kind, "num_microbatches": m}
    budget_of(hybrid({"mesh": mesh, "schedule": schedule, **variant}))
    assert len(checked) > pp * vpp


@pytest.mark.parametrize(("kind", "pp", "vpp", "m"), [schedule for schedule in SCHEDULES if schedule[1] > 1])
def test_every_microbatch_adds_its_rounding(
    kind: str,
    pp: int,
    vpp: int,
    m: int,
    hybrid: Callable[..., Spec],
    budget_of: Callable[..., Budget],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each further microbatch of a chunk, in flight or waiting for W, adds the same rounded-up bytes."""
    found, checked = step.step_peak, {"in_flight": 0, "waiting": 0}

    def checking(chunks: Sequence[Chunk], points: Sequence[RankState], held: step.HeldBySchedule, workspace: int) -> step.StepPeak:
        point = next(point for point in points if point.kind is FORWARD)
        peak = forward_peak(chunks[point.chunk], UNTOUCHED)

        def slack(in_flight: tuple[int, ...], waiting: tuple[int, ...]) -> int:
            return step._step_peak(chunks, held, (0, point._replace(in_flight=in_flight, waiting=waiting), peak)).slack_bytes

        none = (0,) * len(chunks)
        for index in range(len(chunks)):
            one, two = (tuple(count if at == index else 0 for at in range(len(chunks))) for count in (1, 2))
            assert slack(none, none) == 0
            assert slack(two, none) == 2 * slack(one, none)
            assert slack(none, two) == 2 * slack(none, one)
            assert slack(one, one) == slack(one, none) + slack(none, one)
            checked["in_flight"] += slack(one, none)
            checked["waiting"] += slack(none, one)
        return found(chunks, points, held, workspace)

    monkeypatch.setattr("megaplan.budget.megarun.step_peak", checking)
    odd = {"batch": {"micro_batch_size": 1, "seq_length": 16}}  # storages that are not whole blocks of the allocator
    budget_of(hybrid({"mesh": {"pp": pp, "vpp": vpp, "dp_shard": 2}, "schedule": {"kind": kind, "num_microbatches": m}, **odd}))
    assert checked["in_flight"] > 0
    assert (checked["waiting"] > 0) == (kind in SPLIT_BACKWARD)


@pytest.mark.parametrize(
    "overrides", [{}, {"mesh.ep": 2}, {"model.moe.shared_ffn_hidden_size": 256}, {"precision.params": "fp32"}], ids=str
)
def test_a_bank_is_copied_out_beside_all_that_its_layer_gathers(overrides: dict[str, Any], hybrid: Callable[..., Spec]) -> None:
    """Freed after each forward, few tokens: parameters of layer and bank, and the outputs both were gathered into, are there at once."""
    few = {"batch.micro_batch_size": 1, "batch.seq_length": 16, "sharding.reshard_after_forward": True, "mesh.dp_shard": 4}
    spec = hybrid({"model.moe.ffn_hidden_size": 512, "model.features": {}, **few, **overrides})
    inventory, found = build_inventory(spec), 0
    for chunk in slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 5), (5, 10)])):
        peak = forward_peak(chunk, UNTOUCHED)
        for index, unit in enumerate(chunk.units):
            if unit.has_experts and unit.storage is not None:
                dense, bank = unit.storage.dense, unit.storage.experts
                gathered = dense.gathered_bytes + dense.flat_bytes + bank.gathered_bytes + bank.flat_bytes
                assert peak.total >= chunk.before[index] + chunk.root.gathered_bytes + gathered
                found += dense.flat_bytes > 0
    assert found == 2


@pytest.mark.parametrize("pattern", ["AEMRD", "DDE", "EE"])
def test_the_next_layer_s_gather_is_in_flight_only_where_it_is_gathered_ahead(pattern: str, hybrid: Callable[..., Spec]) -> None:
    """A forward under EP begins by gathering the layer that follows, and no other; before the first layer all blocks wait for it."""
    sections = {"A": "attention", "M": "mamba", "R": "recurrent", "D": "mlp"}
    gone = {f"model.{section}": None for letter, section in sections.items() if letter not in pattern}
    few = {"batch.micro_batch_size": 1, "batch.seq_length": 16, "sharding.reshard_after_forward": True}
    spec = hybrid({"model.pattern": pattern, "model.features": {}, "mesh": {"pp": 2, "dp_shard": 4}, **few, **gone})
    inventory = build_inventory(spec)
    for chunk in slot_chunks(spec, inventory, build_layout(spec, inventory, [(0, 5), (5, 10)])):
        assert not chunk.policy.gathers_ahead
        ahead = copy(chunk)
        ahead.policy = chunk.policy._replace(gathers_ahead=1)
        layers = [index for index, unit in enumerate(chunk.units) if unit.layer]
        outputs = [unit.opens.flat_bytes + unit.bank.flat_bytes for unit in chunk.units]
        following = [min([layer for layer in layers if layer > index], default=None) for index in range(len(chunk.units))]
        assert [each[:2] for each in ahead.later[0]] == [(0, 0 if layer is None else outputs[layer]) for layer in following]
        one, other = forward_peak(chunk, UNTOUCHED), forward_peak(ahead, UNTOUCHED)
        assert 0 < other.total - one.total <= max(outputs)


@pytest.mark.parametrize("mesh", [{"pp": 2, "dp_shard": 2}, {"dp_shard": 2, "ep": 2}], ids=str)
def test_blocks_keep_a_segment_for_every_setting(mesh: dict[str, int], hybrid: Callable[..., Spec]) -> None:
    """Chunks that share blocks, as in a search, have the same peaks as chunks whose blocks have no cached segments."""
    spec = hybrid({"mesh": mesh, "model.features": {}, "batch.micro_batch_size": 1, "batch.seq_length": 16})
    inventory = build_inventory(spec)
    spans = [(0, 5), (5, 10)] if "pp" in mesh else [(0, 10)]
    for chunk in slot_chunks(spec, inventory, build_layout(spec, inventory, spans)):
        found = set()
        for reshard, in_place, replicated, ahead in product((False, True), repeat=4):
            shared = copy(chunk)
            shared.policy = chunk.policy._replace(reshard=reshard, in_place=in_place, replicated=replicated, gathers_ahead=ahead)
            alone = copy(shared)
            alone.units = tuple(unit._replace(segments={}) for unit in chunk.units)
            for state in (UNTOUCHED, FORWARDED, FORWARD_AFTER_BACKWARD, BACKWARDED):
                found.add(forward_peak(shared, state).total)
                assert forward_peak(shared, state) == forward_peak(alone, state)
                if chunk.policy.pipelined:
                    found.add(accumulating_backward_peak(shared, state).total)
                    assert accumulating_backward_peak(shared, state) == accumulating_backward_peak(alone, state)
                else:
                    later = state is not UNTOUCHED
                    found.add(reducing_backward_peak(shared, later=later).total)
                    assert reducing_backward_peak(shared, later=later) == reducing_backward_peak(alone, later=later)
        assert len(found) > 8


def test_a_reduction_holds_its_input_and_its_output() -> None:
    """All gradients beside the input, then the last one beside output and divided input, and beside both outputs if they are cast."""
    group = GroupBytes(reduce_bytes=1, reduced_bytes=20, divided_bytes=300)
    assert reduction(group, 5000, 40) == ((5000, 1), (60, 301))
    assert reduction(group._replace(recast_bytes=600), 5000, 40) == ((5000, 1), (60, 301), (660, 1))
