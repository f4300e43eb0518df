"""The operations of a block: what each reads, makes and keeps. `program` replays them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

INPUT, OUTPUT = "x", "out"


class Flow(Enum):
    """How gradients pass an operation: it computes new ones, cuts views of one storage, or adds and hands the same gradient on."""

    COMPUTE = "compute"
    VIEW = "view"
    ADD = "add"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a block.

    Attributes:
        name: For `--explain` and for recompute regions.
        reads: Storages or views it reads.
        makes: Storages it makes (or views it cuts, for `Flow.VIEW`).
        keeps: What it keeps for backward, besides parameters.
        params: Parameters whose gradients its backward makes, by their names in the block.
        grads: What receives a gradient; None for all of `reads`.
        fetches: Storages its backward makes for itself: gathered inputs that were not kept, partial sums before a reduction.
        sums: Storages in which it sums its parameters' gradients, which it makes of them at its end, when `fetches` are gone.
        flow: How gradients pass.
        holds: Storages that a Python frame still names while it runs, though nothing reads them any more.
        keeps_first: Whether it keeps what it keeps before it runs, as torch's products do.
        late: Parameters whose gradients a split backward leaves to W, those of linears, each with the output whose gradient that needs.
        late_fetches: Beside `fetches`, what only those gradients need; in a split backward W makes it.
    """

    name: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    grads: tuple[str, ...] | None = None
    fetches: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    flow: Flow = Flow.COMPUTE
    holds: tuple[str, ...] = ()
    keeps_first: bool = False
    late: tuple[tuple[str, str], ...] = ()
    late_fetches: tuple[str, ...] = ()


def linear(
    name: str,
    reads: str,
    makes: str,
    param: str,
    *,
    bias: str | None = None,
    holds: tuple[str, ...] = (),
) -> Op:
    """A matrix product with a parameter; it keeps its input."""
    params = (param,) if bias is None else (param, bias)
    return Op(name, (reads,), (makes,), keeps=(reads,), params=params, holds=holds, keeps_first=True, late=((param, makes),))


class Projection(NamedTuple):
    """One of several linears that read one input: name, what it makes, weight, bias."""

    name: str
    makes: str
    param: str
    bias: str | None = None


def project(reads: str, gathered: str, *projections: Projection, sharded: bool, holds: tuple[str, ...] = ()) -> tuple[Op, ...]:
    """Column-parallel linears of one input, as `TensorParallel.project` runs them.

    Under TP they are one operation: own tokens are gathered, multiplied and kept, and gathered again in backward, beside the partial
    gradient of what was gathered, which leaves as a reduce-scatter.

    Args:
        reads: The rank's own tokens.
        gathered: All tokens; its gradient is `partial_gradient(gathered)`.
        projections: In order.
        sharded: Whether TP is more than one rank.
        holds: See `Op`.
    """
    if not sharded:
        return tuple(linear(each.name, reads, each.makes, each.param, bias=each.bias, holds=holds) for each in projections)
    weights, biases = (each.param for each in projections), (each.bias for each in projections if each.bias is not None)
    return (
        Op(
            projections[0].name,
            (reads,),
            (gathered, *(each.makes for each in projections)),
            keeps=(reads,),
            params=(*weights, *biases),
            fetches=(partial_gradient(gathered),),
            late_fetches=(gathered,),
            holds=holds,
            late=tuple((each.param, each.makes) for each in projections),
        ),
    )


def partial_gradient(gathered: str) -> str:
    """The gradient of gathered tokens before its reduction, as a storage of its own."""
    return f"{gathered}_partial"


def norm(name: str, reads: str, makes: str, rstd: str, param: str) -> Op:
    """`rms_norm`: keeps its input and rstd."""
    return Op(name, (reads,), (makes, rstd), keeps=(reads, rstd), params=(param,))


def cut(name: str, reads: str, makes: tuple[str, ...]) -> Op:
    """Views of one storage, side by side."""
    return Op(name, (reads,), makes, flow=Flow.VIEW)


def add(name: str, reads: tuple[str, ...], makes: str) -> Op:
    """A sum of storages of one shape."""
    return Op(name, reads, (makes,), flow=Flow.ADD)
