"""Operations of an E block that move rows to the experts, on one rank or between ranks.

Every rank sends rows to the ranks of their experts, or, with `host.moe_dispatcher: allgather`, gathers the tokens of all ranks and copies
the rows of its own experts; the ranks' partial sums are reduced and scattered.
"""

from typing import NamedTuple

from megaplan.blocks.ops import Op

INSIDE_FORWARD, INSIDE_BACKWARD = "experts.inside", "experts.inside_backward"
ARRIVED = "arrived"
"""Rows from all ranks, this one included, as the experts' exchange returns them."""
EXCHANGES = frozenset({"exchange", "exchange back"})
"""Operations that wait for rows from other ranks, or send them back."""
ANNOUNCE = "announce"
"""Operation that gets the counts of rows from other ranks, by a separate exchange if experts have no capacity."""
SLICED_BIAS = "experts.down_bias"
"""The bias of a bank's down-projections, which only one slice adds."""


class Travel(NamedTuple):
    """The way of rows to the experts of other ranks, and back.

    Attributes:
        exchanged: True if ranks have different experts.
        gathered: True if ranks have slices of the same experts.
        by_gather: True if every rank gathers all tokens, instead of the rows of its experts.
    """

    exchanged: bool
    gathered: bool
    by_gather: bool = False

    @property
    def far(self) -> bool:
        """True if rows leave their rank."""
        return self.exchanged or self.gathered

    @property
    def both(self) -> bool:
        """True if rows are exchanged twice: between ranks with different experts, and between ranks with slices of them."""
        return self.exchanged and self.gathered


def routed_ops(gated: bool, gathers: bool, bias: bool, way: Travel, *, padded: bool, limited: bool) -> tuple[Op, ...]:
    """Operations from the rank's tokens to `combined`.

    Args:
        gated: True if experts have three matrices.
        gathers: True if experts read rows where they are, instead of sorted copies.
        bias: True if the experts' projections have a bias.
        way: The way to other ranks.
        padded: True if a (token, slot) pair may have no row.
        limited: True if experts have buffers of one size.
    """
    if way.by_gather:
        return _gathering(gated, gathers, bias, way, limited=limited)
    return _travelling(gated, gathers, bias, way) if way.far or padded else _local(gated, gathers, bias)


def _experts(gated: bool, gathers: bool, bias: bool, reads: tuple[str, str, str, str], made: str) -> Op:
    outputs = ("experts.gate", "experts.up") if gated else ("experts.up",)
    params: tuple[str, ...] = ("experts.up_proj", "experts.down_proj")
    if gated:
        params = ("experts.gate_proj", *params)
    if bias:
        params += tuple(f"{name}_bias" for name in params)
    forward, backward = ((INSIDE_FORWARD,), (INSIDE_BACKWARD,)) if gathers else ((), ())
    return Op("experts", reads, (made, *outputs, *forward), keeps=(*reads, *outputs), params=params, grads=reads[:2], fetches=backward)


def _local(gated: bool, gathers: bool, bias: bool) -> tuple[Op, ...]:
    """Rows of a rank that has all experts."""
    if gathers:
        return (_experts(gated, gathers, bias, ("tokens", "weights", "rows", "counts"), "combined"),)
    return (
        Op("dispatch", ("tokens", "rows"), ("received",), keeps=("rows",), grads=("tokens",)),
        _experts(gated, gathers, bias, ("received", "weights", "rows", "counts"), "processed"),
        Op("combine", ("processed", "rows"), ("combined",), keeps=("rows",), grads=("processed",)),
    )


def _travelling(gated: bool, gathers: bool, bias: bool, way: Travel) -> tuple[Op, ...]:
    """The path of rows that are copied for the experts, and sent if other ranks have experts or slices of them."""
    sent, weighing, returned = ("sent", "sent_weights", "returned") if way.far else (ARRIVED, "arrived_weights", "leaving")
    processed = _arrived(gated, gathers, bias) if gathers or not way.far else _sorted(gated, gathers, bias)
    processed = _with_sliced_bias(processed, bias=bias, way=way)
    return (
        Op(ANNOUNCE, ("counts",), ("arrived_counts", *(("own_counts",) if way.both else ())), grads=()),
        Op("arrival_plan", ("arrived_counts",), ("order", "received_counts"), grads=()),
        Op("dispatch", ("tokens", "rows"), (sent,), keeps=("rows",), grads=("tokens",)),
        Op("dispatch weights", ("weights", "rows"), (weighing,), keeps=("rows",), grads=("weights",)),
        *_outwards(way),
        *processed,
        *_back(way),
        Op("combine", (returned, "rows"), ("combined",), keeps=("rows",), grads=(returned,), holds=("arrived_counts",)),
    )


def _outwards(way: Travel) -> tuple[Op, ...]:
    sent, arrived, crossed = ("sent", "sent_weights"), (ARRIVED, "arrived_weights"), ("crossed", "crossed_weights")
    exchange, parts = Op("exchange", sent, crossed if way.gathered else arrived), ("gradient_parts",)
    gather = Op("gather", crossed if way.exchanged else sent, arrived, fetches=parts, holds=sent if way.exchanged else ())
    gather = gather._replace(before=(((), False),))  # the experts' gradients are reduced before partial sums arrive
    return *((exchange,) if way.exchanged else ()), *((gather,) if way.gathered else ())


def _back(way: Travel) -> tuple[Op, ...]:
    summed = Op("sum slices", ("leaving",), ("summed" if way.exchanged else "returned", "parts"))
    exchange = Op("exchange back", ("summed" if way.gathered else "leaving",), ("returned",))
    return *((summed,) if way.gathered else ()), *((exchange,) if way.exchanged else ())


def _arrived(gated: bool, gathers: bool, bias: bool) -> tuple[Op, ...]:
    return (_experts(gated, gathers, bias, (ARRIVED, "arrived_weights", "order", "received_counts"), "leaving"),)


def _sorted(gated: bool, gathers: bool, bias: bool) -> tuple[Op, ...]:
    return (
        Op("sort", (ARRIVED, "order"), ("received",), keeps=("order",), grads=(ARRIVED,)),
        _experts(gated, gathers, bias, ("received", "arrived_weights", "order", "received_counts"), "processed"),
        Op("unsort", ("processed", "order"), ("leaving",), keeps=("order",), grads=("processed",)),
    )


def _gathering(gated: bool, gathers: bool, bias: bool, way: Travel, *, limited: bool) -> tuple[Op, ...]:
    """Tokens of all ranks, from which each copies its experts' rows; `limited`: from the places in buffers that each rank has planned.

    Tokens are gathered over EP and then over ETP, whose ranks have slices of the same experts; sums are scattered in reverse.
    """
    plan = () if limited else (Op("plan all rows", ("all_choices",), ("all_rows", "all_counts"), grads=()),)
    return (
        *_gather("rows" if limited else "indices", "choices", way, grads=()),
        *plan,
        Op("own rows", ("all_choices",) if limited else ("all_rows", "all_counts"), ("places", "received_counts"), grads=()),
        *_gather("weights", "weights", way),
        Op("dispatch weights", ("all_weights", "places"), ("arrived_weights",), keeps=("places",), grads=("all_weights",)),
        *_gather("tokens", "tokens", way),
        Op("dispatch", ("all_tokens", "places"), (ARRIVED,), keeps=("places",), grads=("all_tokens",)),
        Op("order", ("places",), ("order",), grads=()),
        *_with_sliced_bias(_arrived(gated, gathers, bias), bias=bias, way=way),
        Op("combine", ("leaving", "places"), ("partial",), keeps=("places",), grads=("leaving",)),
        *((Op("scatter slices", ("partial",), ("near_partial",)),) if way.both else ()),
        Op("scatter", ("near_partial" if way.both else "partial",), ("combined",)),
    )


def _gather(reads: str, what: str, way: Travel, grads: tuple[str, ...] | None = None) -> tuple[Op, ...]:
    near, whole = f"near_{what}", f"all_{what}"
    first = Op(f"gather {what}", (reads,), (near if way.both else whole,), grads=grads)
    return (first, Op(f"gather {what} of slices", (near,), (whole,), grads=grads)) if way.both else (first,)


def _with_sliced_bias(ops: tuple[Op, ...], *, bias: bool, way: Travel) -> tuple[Op, ...]:
    if not (way.gathered and bias):
        return ops
    return tuple(op._replace(makes=(*op.makes, SLICED_BIAS), keeps=(*op.keeps, SLICED_BIAS)) if op.params else op for op in ops)
