"""The routed and shared experts of a transformer block, as torchtitan runs them, with the all-to-all dispatcher or on one rank.

The router multiplies in fp32, and the experts' outputs are scaled by their scores in fp32: eager code keeps both fp32 copies for backward.
From #1895 (29 October 2025) until blocks were compiled whole again, torch.compile ran the router, the products and the shared expert one by
one, and the scaling eagerly: `apply_compile` of torchtitan/models/llama4/infra/parallelize.py at bb308da6b.
Rows are sorted by expert into a copy; with expert parallelism they travel first, are sorted again by local expert, and return. Nothing
bounds how many rows a rank receives: `moe.routing_skew` times the even share.

Source: torchtitan/models/common/moe.py and token_dispatcher.py at b5bcd76c.
"""

from typing import NamedTuple

from megaplan.blocks.ops import Dims, Op, add, linear, norm
from megaplan.blocks.storages import Shapes, storages
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.families.moe.program import ExpertMesh, received_rows
from megaplan.families.moe.section import MixtureOfExperts

GROUPED, ROUTER = "mlp.routed_experts.", "mlp.router"
"""Products that selective checkpointing does not count: grouped ones, and the router's, which it always recomputes."""
INDEX_BYTES = 8


class ExpertKey(NamedTuple):
    """Properties that decide the operations.

    Attributes:
        shared: There is a shared expert.
        travels: Expert parallelism is above 1.
        eager: Outputs are scaled outside torch.compile.
    """

    shared: bool
    travels: bool
    eager: bool = False


def expert_ops(key: ExpertKey, middle: str, *, compiled: bool) -> tuple[Op, ...]:
    """Operations from the norm to the sum of routed and shared experts; `middle` is the stream between the halves."""
    ops = [
        norm("mlp.norm", middle, "mlp.normed", "mlp.rstd", "mlp.norm.weight"),
        Op("mlp.cast", ("mlp.normed",), ("router.wide",)),
        linear(ROUTER, "router.wide", "router.logits", "mlp.router.weight"),
        Op("mlp.score", ("router.logits",), ("router.scores",), keeps=("router.scores",)),
        Op("mlp.choose", ("router.scores",), ("router.indices", "router.chosen"), keeps=("router.indices",)),
        Op("mlp.sort", ("router.chosen",), ("rows.scores", "rows.order"), keeps=("rows.order",)),
        Op("mlp.permute", ("mlp.normed",), ("rows.sent" if key.travels else "rows",)),
    ]
    if key.travels:
        ops += [
            Op("mlp.dispatch exchange", ("rows.sent",), ("rows.received",)),
            Op("mlp.regroup", ("rows.received",), ("rows", "rows.places"), keeps=("rows.places",)),
        ]
    ops += _gated(GROUPED, "rows", "experts.", GROUPED, "", compiled=compiled)
    output = "experts.o"
    if key.travels:
        ops += [Op("mlp.restore", ("experts.o",), ("rows.restored",)), Op("mlp.return exchange", ("rows.restored",), ("rows.returned",))]
        output = "rows.returned"
    if compiled and not key.eager:
        ops.append(Op("mlp.scale", (output, "rows.scores"), ("rows.scaled",), keeps=(output, "rows.scores")))
    else:
        ops += [
            Op("mlp.widen", (output,), ("rows.wide",)),
            Op("mlp.scale", ("rows.wide", "rows.scores"), ("rows.wide_scaled",), keeps=("rows.wide", "rows.scores")),
            Op("mlp.narrow", ("rows.wide_scaled",), ("rows.scaled",)),
        ]
    ops.append(Op("mlp.add rows", ("rows.scaled",), ("routed" if key.shared else "mlp.o",)))
    if key.shared:
        ops += _gated("mlp.shared.", "mlp.normed", "shared.", "mlp.shared.", ".weight", compiled=compiled)
        ops.append(add("mlp.add", ("routed", "shared.o"), "mlp.o"))
    return tuple(ops)


def _gated(name: str, reads: str, made: str, weights: str, suffix: str, *, compiled: bool) -> list[Op]:
    """A gated MLP of one rank; a compiled activation is one kernel."""
    gate = linear(f"{name}gate_proj", reads, f"{made}gate", f"{weights}gate_proj{suffix}")
    up = linear(f"{name}up_proj", reads, f"{made}up", f"{weights}up_proj{suffix}")
    down = linear(f"{name}down_proj", f"{made}product", f"{made}o", f"{weights}down_proj{suffix}")
    if compiled:
        both = (f"{made}gate", f"{made}up")
        return [gate, up, Op(f"{name}activation", both, (f"{made}product",), keeps=both), down]
    both = (f"{made}silu", f"{made}up")
    silu = Op(f"{name}activation silu", (f"{made}gate",), (f"{made}silu",), keeps=(f"{made}gate",))
    return [gate, silu, up, Op(f"{name}activation product", both, (f"{made}product",), keeps=both), down]


def expert_shapes(dims: Dims, moe: MixtureOfExperts) -> Shapes:
    """Storages of the experts' half of a block that a dense MLP does not have."""
    tokens = dims.batch * dims.tokens
    sent, arrived = tokens * moe.top_k, received_rows(moe, tokens, ExpertMesh(dims.ep, 1))
    inner = dict.fromkeys(("experts.gate", "experts.silu", "experts.up", "experts.product"), (arrived, moe.ffn_hidden_size))
    outer = dict.fromkeys(("rows.returned", "rows.scaled"), (sent, dims.hidden))
    outer |= dict.fromkeys(("experts.o", "rows.restored"), (arrived, dims.hidden))
    shared = dict.fromkeys(("shared.gate", "shared.silu", "shared.up", "shared.product"), (tokens, moe.shared_ffn_hidden_size))
    stream = dict.fromkeys(("routed", "shared.o"), dims.residual)
    rows = {"rows.sent": (sent, dims.hidden), **dict.fromkeys(("rows", "rows.received"), (arrived, dims.hidden))}
    wide = dict.fromkeys(("rows.wide", "rows.wide_scaled"), (sent, dims.hidden))
    scores = dict.fromkeys(("router.logits", "router.scores"), (tokens, moe.num_experts))
    scores |= dict.fromkeys(("router.chosen", "rows.scores"), (sent, 1))
    places = {"router.indices": (sent, INDEX_BYTES), "rows.order": (2 * sent, INDEX_BYTES), "rows.places": (arrived, INDEX_BYTES)}
    return {
        **storages(dims.dtype, Column.ACTIVATIONS, {**inner, **outer, **shared, **stream}),
        **storages(dims.dtype, Column.ROUTING, rows),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {**wide, "router.wide": dims.residual}),
        **storages(dims.stat_dtype, Column.ROUTING, scores),
        **storages(DType.FP8, Column.ROUTING, places),
    }
