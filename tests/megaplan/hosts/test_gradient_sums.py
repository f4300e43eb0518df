"""Autograd's sum of gradients, in the program model: in place, unless the first is a view or something else holds it."""

from collections import Counter

import pytest

from megaplan.blocks.ops import Dims, Op, add, linear, norm, reshape
from megaplan.blocks.storages import storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.hosts.megarun.halves import splittable, splittable_part
from megaplan.hosts.megarun.live_sets import LiveSet
from megaplan.hosts.megarun.parts import Arriving, BlockReplay, summarize_with_arriving, weigh
from megaplan.hosts.megarun.program import Backward, Replay, replay

SHAPES = storages(
    DType.BF16,
    Column.ACTIVATIONS,
    {"x": (4, 8), "wide": (4, 8), "normed": (4, 8), "out": (4, 8)},
) | storages(DType.FP32, Column.ACTIVATIONS, {"rstd": (4,)})


def most(points: tuple[LiveSet, ...], name: str) -> int:
    """Largest number of gradients of one storage that are alive at once."""
    return max(Counter(point.gradients)[name] for point in points)


def projections(count: int, *, plain: bool = False) -> tuple[Op, ...]:
    """A norm, `count` products of its output, and what reads them all; plain: operations that pass on no views."""
    names = [f"p{index}" for index in range(count)]
    made = [
        Op(name, ("normed",), (name,), keeps=("normed",), params=(name,)) if plain else linear(name, "normed", name, name) for name in names
    ]
    mixed = Op("mix", tuple(names), ("o",), keeps=tuple(names))
    return norm("norm", "x", "normed", "rstd", "norm"), *made, mixed, add("residual", ("x", "o"), "out")


@pytest.mark.parametrize(("count", "alive"), [(1, 1), (2, 3), (3, 3), (4, 3)])
def test_products_of_one_input_are_summed_in_a_third_tensor(count: int, alive: int) -> None:
    """The first gradient is a view of a product of two dims; the sum of the first two is none, and later ones are added into it."""
    assert most(replay(projections(count)).backward, "normed") == alive


@pytest.mark.parametrize("count", [2, 3])
def test_operations_that_hand_on_no_view_are_summed_in_place(count: int) -> None:
    assert most(replay(projections(count, plain=True)).backward, "normed") == 2


def test_linears_that_can_be_split_hand_on_no_view() -> None:
    run = replay(projections(3))
    assert most(splittable(run).backward, "normed") == 2
    assert most(Backward(run.program, splits=True).points, "normed") == 2


def test_the_sum_is_made_when_the_product_s_own_gradient_is_gone() -> None:
    """The third tensor is alive with the parameter's gradient and what comes next, not with the gradient that the product has read."""
    (found,) = [point for point in replay(projections(2)).backward if point.op == "sum after p0"]
    assert sorted(found.gradients) == ["normed", "normed", "normed", "out"]
    assert found.new_params == ("p0",)


def test_what_a_split_backward_keeps_is_not_added_to() -> None:
    """The residual stream's gradient is that of the last product's output too, which W needs: the norm's is summed with it elsewhere."""
    ops = (norm("norm", "x", "normed", "rstd", "norm"), linear("o_proj", "normed", "o", "o_proj"), add("residual", ("x", "o"), "out"))
    whole, split = Backward(replay(ops).program, splittable=True), Backward(replay(ops).program, splits=True)
    assert not any(point.op.startswith("sum after") for point in whole.points)
    (summed,) = [point for point in split.points if point.op.startswith("sum after")]
    assert sorted(summed.gradients) == ["out", "out", "x"]


def test_a_reshaped_gradient_is_added_last() -> None:
    """Tokens of a router are the normed input reshaped: their gradient is apart until all that reads them has made its part."""
    router, shared = Op("route", ("tokens",), ("r",), keeps=("tokens",)), linear("shared", "normed", "s", "shared")
    mix = Op("mix", ("r", "s"), ("out",))
    found = replay((norm("norm", "x", "normed", "rstd", "norm"), reshape("flatten", "normed", "tokens"), router, shared, mix)).backward
    (summed,) = [point for point in found if point.op == "sum after flatten"]
    assert sorted(summed.gradients) == ["normed", "normed", "tokens"]  # the linear's is a view


def saved(run: Replay) -> set[str]:
    return {name for name, _ in run.saved}


def test_a_view_has_no_storage() -> None:
    ops = (
        norm("norm", "x", "normed", "rstd", "norm"),
        reshape("flatten", "normed", "tokens"),
        Op("route", ("tokens",), ("out",), keeps=("tokens",)),
    )
    assert saved(replay(ops)) == {"normed", "rstd"}


def test_what_is_added_to_an_arrived_gradient_is_another_storage() -> None:
    """A receive buffer is there to the end; from another block of the slot the same gradient is added to in place."""
    ops = (linear("up", "x", "wide", "up"), norm("norm", "wide", "normed", "rstd", "norm"), add("residual", ("x", "normed"), "out"))
    block = weigh(BlockReplay(replay(ops), SHAPES), {"up": 8, "norm": 8}, in_place=True)
    arrived = summarize_with_arriving(block, Arriving(output=True), splittable=False)
    assert [point.gradients for point in block.part.replay.backward][-1] == ("out",)
    assert [point.gradients for point in arrived.part.replay.backward][-1] == ("out", "out")
    assert [most(each.part.replay.backward, "out") for each in (block, arrived)] == [1, 2]
    assert (arrived.saved, arrived.forward_bytes) == (block.saved, block.forward_bytes)


@pytest.mark.parametrize(("last", "elements"), [("narrow", 2 * 8 * 4), ("wide", 2 * 8 * 16)])
def test_a_product_made_again_is_as_large_as_before_its_reduction(last: str, elements: int) -> None:
    """Under sequence parallelism one of the stream's width is all tokens of it; one of another width is as large as the first time."""
    dims = Dims(2, 8, 4, 4, 2, 1, DType.BF16)
    down = linear("down", "wide", "narrow", "down") if last == "narrow" else Op("mix", ("wide",), ("narrow",), keeps=("wide",))
    ops = (linear("up", "x", "wide", "up"), down, add("residual", ("x", "narrow"), "out"))
    stream = dict.fromkeys(("x", "narrow", "out"), dims.residual)
    shapes = storages(DType.BF16, Column.ACTIVATIONS, stream | {"wide": (2, 8, 16)})
    region = frozenset({"up", "down"} if last == "narrow" else {"up"})
    tensors = splittable_part(BlockReplay(replay(ops, region=region), shapes), dims).tensors
    assert {name: tensors[name][0] for name in tensors.keys() - shapes.keys()} == {f"{last}_again": 2 * elements}
