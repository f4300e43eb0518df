"""Budgets of schedules that split backwards: what waits for W, the counts, and that cells are the whole."""

from collections.abc import Callable
from typing import Any

import pytest

from megaplan.blocks.ops import OUTPUT, Op, add, linear, norm
from megaplan.budget import split_backward
from megaplan.budget.split_backward import HalvedChunk, split_step_peak
from megaplan.budget.values import Budget
from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.halves import halves
from megaplan.hosts.megarun.program import replay
from megaplan.schedule import actions, in_flight, placement, receive_buffers, slot_owner
from megaplan.schedule.in_flight import non_dominated
from megaplan.spec.models import Spec

Build = Callable[..., Budget]
Hybrid = Callable[..., Spec]
ZERO_BUBBLE = "interleaved_zero_bubble"
SCHEDULES = [(ZERO_BUBBLE, 4, 1, 8), (ZERO_BUBBLE, 2, 2, 4), ("zbv", 2, 2, 5), ("zbv", 4, 2, 8), ("dualpipev", 4, 2, 9)]


def dense_ops() -> tuple[Op, ...]:
    """norm → up → activation → down → residual."""
    return (
        norm("norm", "x", "normed", "rstd", "norm.weight"),
        linear("up", "normed", "wide", "up.weight", bias="up.bias"),
        Op("activation", ("wide",), ("active",), keeps=("wide",)),
        linear("down", "active", "narrow", "down.weight"),
        add("residual", ("x", "narrow"), OUTPUT),
    )


def test_linears_wait_and_nothing_else() -> None:
    """Pending: the linears' inputs and their outputs' gradients; the bias and the norm are not late. W frees as it goes."""
    split = halves(replay(dense_ops()))
    assert split.late == ("down.weight", "up.weight")
    assert (split.pending.storages, split.pending.gradients) == (("active", "normed"), (OUTPUT, "wide"))
    assert [(moment.storages, moment.gradients, moment.params) for moment in split.weights] == [
        (("active", "normed"), (OUTPUT, "wide"), ("down.weight",)),
        (("normed",), ("wide",), ("up.weight",)),
    ]
    assert {name for moment in split.inputs.backward for name in moment.params} == {"up.bias", "norm.weight"}
    assert split.inputs.saved == replay(dense_ops()).saved


def test_a_gradient_that_waits_is_not_added_to_in_place() -> None:
    """The residual stream's gradient is kept for `down`, so its sum with the norm's is another storage; unsplit, it is the same."""
    whole, split = replay(dense_ops()), halves(replay(dense_ops()))
    assert whole.backward[-1].gradients == ("out",)
    assert split.inputs.backward[-1].gradients == ("out", "out", "wide")


def test_recompute_brings_back_what_waits() -> None:
    """A region's dropped storages wait once it has run again."""
    split = halves(replay(dense_ops(), region=frozenset({"activation"})))
    assert "active" not in [name for name, _ in split.inputs.saved]
    assert "active" in split.pending.storages


@pytest.mark.requirement("R-26")
@pytest.mark.parametrize(("kind", "pp", "vpp", "m"), SCHEDULES)
def test_moments_have_the_schedules_vectors(kind: str, pp: int, vpp: int, m: int) -> None:
    """Counts in flight and waiting are those of `in_flight`; every chunk is reduced once."""
    chunk_of = [slot_owner(placement(kind), slot, pp)[1] for slot in range(pp * vpp)]
    for order, vectors in zip(actions(kind, pp, vpp, m), in_flight(kind, pp, vpp, m), strict=True):
        moments = list(split_backward._moments(order, chunk_of, vpp, m, turns=False))
        assert non_dominated({(*moment.full, *moment.pending) for moment in moments}) == tuple(
            (*v.full, *v.pending_weight) for v in vectors
        )
        assert sorted(moment.chunk for moment in moments if moment.kind is None) == list(range(vpp))
        assert all(moment.full[moment.chunk] == 0 for moment in moments if moment.kind is None)


def test_the_turn_of_a_v_receives_nothing_from_itself() -> None:
    """Middle stages hand over on one rank; a handed gradient is alive between the I of the upper and the I of the lower."""
    assert receive_buffers("zbv", 2, 2, 5) == (((0, 5), (5, 0)), ((5, 0), (0, 5)))
    assert receive_buffers(ZERO_BUBBLE, 2, 2, 4) == (((0, 4), (4, 4)), ((4, 4), (4, 0)))
    chunk_of = [0, 0, 1, 1]
    handed = [moment.handed for moment in split_backward._moments(actions("zbv", 2, 2, 5)[1], chunk_of, 2, 5, turns=True)]
    assert min(handed) == 0
    assert max(handed) > 0
    assert handed[-1] == 0


@pytest.mark.parametrize(("kind", "pp", "vpp", "m"), SCHEDULES)
@pytest.mark.parametrize("overrides", [{}, {"sharding": {"reshard_after_forward": True}}, {"recompute": {"default": "selective"}}], ids=str)
def test_cells_are_the_whole_of_every_moment(
    kind: str, pp: int, vpp: int, m: int, overrides: dict[str, Any], hybrid: Hybrid, budget_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment of every rank, not only at the peak; no cell is negative."""
    checked = []

    def checking(chunks: Any, order: Any, chunk_of: Any, num_microbatches: int, *, turns: bool) -> Any:
        rank = split_backward._Rank([HalvedChunk(chunk, arrives_locally=turns and index == 0) for index, chunk in enumerate(chunks)])
        for moment in dict.fromkeys(split_backward._moments(order, chunk_of, len(chunks), num_microbatches, turns)):
            cells = rank.cells(moment)
            assert sum(cells.values()) == rank.total(moment), moment
            assert min(cells.values()) >= 0, (moment, cells)
            checked.append(moment)
        return split_step_peak(chunks, order, chunk_of, num_microbatches, turns=turns)

    monkeypatch.setattr("megaplan.budget.megarun.split_step_peak", checking)
    budget_of(hybrid({"mesh": {"pp": pp, "vpp": vpp, "dp_shard": 2}, "schedule": {"kind": kind, "num_microbatches": m}, **overrides}))
    assert len(checked) > pp * m


def test_waiting_costs_less_than_being_in_flight(hybrid: Hybrid, budget_of: Build) -> None:
    """ZB-H1 beside 1F1B with as many microbatches in flight: more activations on the last rank, where weight gradients wait."""
    budgets = [budget_of(hybrid({"mesh": {"pp": 4}, "schedule": {"kind": kind, "num_microbatches": 8}})) for kind in ("1f1b", ZERO_BUBBLE)]
    plain, split = (next(rank for rank in budget.ranks if 3 in rank.ranks).cells[Phase.FORWARD_BACKWARD] for budget in budgets)
    assert split[Column.ACTIVATIONS] > plain[Column.ACTIVATIONS]
    whole = next(rank for rank in budgets[0].ranks if 0 in rank.ranks).cells[Phase.FORWARD_BACKWARD]
    assert split[Column.ACTIVATIONS] < 4 * whole[Column.ACTIVATIONS]


@pytest.mark.parametrize(("kind", "pp", "vpp", "m"), SCHEDULES)
def test_every_microbatch_adds_its_rounding(
    kind: str, pp: int, vpp: int, m: int, hybrid: Hybrid, budget_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One microbatch more of a chunk, in flight or waiting for W, adds what the allocator rounds up, the same each time."""
    checked = []

    def checking(chunks: Any, order: Any, chunk_of: Any, num_microbatches: int, *, turns: bool) -> Any:
        rank = split_backward._Rank([HalvedChunk(chunk, arrives_locally=turns and index == 0) for index, chunk in enumerate(chunks)])
        moment = next(iter(split_backward._moments(order, chunk_of, len(chunks), num_microbatches, turns)))
        for index in range(len(chunks)):
            for name in ("full", "pending"):
                counts = [tuple(more if at == index else 0 for at in range(len(chunks))) for more in range(3)]
                none = moment._replace(full=counts[0], pending=counts[0])
                sizes = [rank.slack_bytes(none._replace(**{name: each})) for each in counts]
                assert sizes[0] == 0
                assert sizes[2] - sizes[1] == sizes[1] >= 0
                both = none._replace(full=counts[1], pending=counts[1])
                assert rank.slack_bytes(both) >= sizes[1]
                checked.append(sizes[1])
        return split_step_peak(chunks, order, chunk_of, num_microbatches, turns=turns)

    monkeypatch.setattr("megaplan.budget.megarun.split_step_peak", checking)
    odd = {"batch": {"micro_batch_size": 1, "seq_length": 16}}  # storages that are no whole blocks of the allocator
    budget_of(hybrid({"mesh": {"pp": pp, "vpp": vpp, "dp_shard": 2}, "schedule": {"kind": kind, "num_microbatches": m}, **odd}))
    assert max(checked) > 0
