"""Blocks under a split backward: tensors that wait for W, and their memory."""

from collections.abc import Callable

from megaplan.blocks.ops import OUTPUT, Op, add, linear, norm
from megaplan.budget.values import Budget
from megaplan.columns import Column, Phase
from megaplan.hosts.megarun.halves import halves
from megaplan.hosts.megarun.program import replay
from megaplan.spec.models import Spec

Build = Callable[..., Budget]
Hybrid = Callable[..., Spec]
ZERO_BUBBLE = "interleaved_zero_bubble"


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
    assert [(point.storages, point.gradients, point.params) for point in split.weights] == [
        (("active", "normed"), (OUTPUT, "wide"), ("down.weight",)),
        (("normed",), ("wide",), ("up.weight",)),
    ]
    assert {name for point in split.inputs.backward for name in point.params} == {"up.bias", "norm.weight"}
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


def post_ops() -> tuple[Op, ...]:
    """Two linears of the stream itself → activation → down → norm → residual."""
    return (
        linear("gate", "x", "gate", "gate.weight"),
        linear("up", "x", "wide", "up.weight"),
        Op("activation", ("gate", "wide"), ("active",), keeps=("gate", "wide")),
        linear("down", "active", "narrow", "down.weight"),
        norm("norm", "narrow", "normed", "rstd", "norm.weight"),
        add("residual", ("x", "normed"), OUTPUT),
    )


def test_w_keeps_an_input_of_the_chunk_alive_and_no_receive_buffer() -> None:
    """Linears that read the stream wait with it; what arrived from another slot is counted as communication."""
    run = replay(post_ops())
    assert halves(run).pending.storages == ("active", "x")
    arrived = halves(run, owns_input=False)
    assert arrived.pending.storages == ("active",)
    assert [point.gradients for point in arrived.weights] == [point.gradients for point in halves(run).weights]


def test_what_a_later_norm_keeps_of_a_recomputed_region_is_kept() -> None:
    """`torch.utils.checkpoint` drops tensors that its function saved, not its result saved by others; a region with the norm drops both."""
    ops = (
        Op("experts", ("x",), ("made",), keeps=("x",)),
        norm("post_norm", "made", "normed", "rstd", "norm.weight"),
        add("residual", ("x", "normed"), OUTPUT),
    )
    region = frozenset({"experts"})
    assert [name for name, _ in replay(ops, region=region, after=frozenset({"post_norm"})).saved] == ["made", "rstd"]
    assert [name for name, _ in replay(ops, region=region).saved] == ["rstd"]
    assert [name for name, _ in replay(ops, region=region | {"post_norm"}).saved] == []


def test_waiting_costs_less_than_being_in_flight(hybrid: Hybrid, budget_of: Build) -> None:
    """ZB-H1 compared with 1F1B with the same microbatches in flight: more activations on the last rank, where weight gradients wait."""
    budgets = [budget_of(hybrid({"mesh": {"pp": 4}, "schedule": {"kind": kind, "num_microbatches": 8}})) for kind in ("1f1b", ZERO_BUBBLE)]
    plain, split = (next(rank for rank in budget.ranks if 3 in rank.ranks).cells[Phase.FORWARD_BACKWARD] for budget in budgets)
    assert split[Column.ACTIVATIONS] > plain[Column.ACTIVATIONS]
    whole = next(rank for rank in budgets[0].ranks if 0 in rank.ranks).cells[Phase.FORWARD_BACKWARD]
    assert split[Column.ACTIVATIONS] < 4 * whole[Column.ACTIVATIONS]
