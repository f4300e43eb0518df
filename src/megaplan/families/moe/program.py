"""Saved tensors of E blocks: router, dispatch, expert GEMMs, combine, shared expert.

With ep = etp = 1 rows stay on the rank. Otherwise counts are exchanged first; then rows and their routing weights are sent in expert order,
arrive by source rank, are sorted by local expert, pass through the experts, and return. Send buffers are not saved (the backward of an
all-to-all does not need them); the expert GEMMs save sorted rows, and weights in order of arrival. ETP ranks have a slice of each expert:
they gather each other's rows after the exchange, and before the return exchange sum the slices' results, which arrive rank by rank.

With `host.kernels: triton`, and in eight bits, the experts read tokens, or received rows, in place: they save these, and nothing is sorted.
Scratch of the kernels is workspace.

A router adds its tokens' entropies and its experts' rows to the sums of the step. A router with its own losses also saves each token's
log-sum-exp and each sequence's rows per expert.

Row counts depend on routing: `received_rows` states them from the layer's `moe.routing_skew`. With `moe.capacity_factor` every expert has
buffers of one size from every rank, on one rank too: rows are copied to them, and the experts read them as rows that arrived. Rows of
tokens with null experts are copied, too.

With `host.moe_dispatcher: allgather` a rank has the tokens of all ranks while it copies the rows of its experts, which are then sorted.
"""

from dataclasses import replace
from functools import cache
from math import ceil
from typing import NamedTuple

from megakernels.ops.moe.facts import RouterBytes, route_backward_bytes
from megaplan.blocks.ops import BlockProgram, Dims, Op, add, linear, norm, plain_norm, reshape
from megaplan.blocks.storages import Shapes, residual, storages
from megaplan.blocks.work import Workload
from megaplan.columns import Basis, Column
from megaplan.dtypes import DType
from megaplan.families.dense.program import mlp_ops, mlp_storages
from megaplan.families.family import Selective
from megaplan.families.moe.section import MixtureOfExperts, expert_sizes
from megaplan.families.moe.travel import (
    ARRIVED,
    INSIDE_BACKWARD,
    INSIDE_FORWARD,
    SLICED_BIAS,
    Travel,
    routed_ops,
)
from megaplan.scalars import GATED

SELECTIVE = Selective("experts.forward", frozenset({"experts"}))
ROUTER_BACKWARD = "router.inside_backward"
_STATISTICS = ("rstd", "expert_rstd", "router_rstd", "expert_post_rstd", "shared_post_rstd")


class MoeOptions(NamedTuple):
    """Fields of the section that decide the operations, in addition to mesh and kernels.

    Attributes:
        gated: True if experts have three matrices.
        shared: True if there is a shared expert.
        losses: True if the router has its own losses.
        shared_gate: True if a score multiplies the shared expert's output.
        latent: True if experts read and write a latent.
        bias: True if the experts' projections have a bias.
        router: Parameters of the router.
        sigmoid: True if scores are sigmoids, whose logits are saved instead of the probabilities.
        kernels: True if kernels run the router.
        own_norms: True if experts, router and shared expert have their own norms.
    """

    gated: bool
    shared: bool
    losses: bool
    shared_gate: bool
    latent: bool
    bias: bool
    router: tuple[str, ...]
    sigmoid: bool
    kernels: bool
    own_norms: bool = False


class ExpertMesh(NamedTuple):
    """Expert-parallel and expert-tensor-parallel degrees."""

    ep: int
    etp: int


def moe_selective(_moe: MixtureOfExperts, _variant: float | None) -> Selective:
    """Operations of an E block that selective recompute runs again."""
    return SELECTIVE


def capacity(moe: MixtureOfExperts, num_tokens: int) -> int | None:
    """Maximum rows from one source rank to one expert: ceil(N · k / E · capacity_factor); None if dropless.

    Source: Switch Transformer, arXiv:2101.03961, equation 3, with k assignments per token.
    """
    if moe.capacity is None:
        return None
    return ceil(num_tokens * moe.top_k / moe.num_choices * moe.capacity)


def received_rows(moe: MixtureOfExperts, num_tokens: int, mesh: ExpertMesh, variant: float | None = None) -> int:
    """Rows computed by the busiest expert rank: all rows that the ep · etp sources send to its experts.

    Dropless: N · k rows on average (ep sources, 1 / ep of the experts), times the layer's skew if rows can move between ranks; at most all
    rows except those of null experts, and all that can choose a local expert. Each of the etp ranks gathers the same number. With a
    capacity: the capacity of every local expert from every source.
    """
    local, limit = moe.num_experts // mesh.ep, capacity(moe, num_tokens)
    if limit is not None:
        return limit * local * mesh.ep * mesh.etp
    mean = moe.rows_of(num_tokens)
    if mesh.ep == 1:
        return mean * mesh.etp
    return min(ceil(mean * moe.skew_in(variant)), mean * mesh.ep, num_tokens * min(moe.top_k, local) * mesh.ep) * mesh.etp


def moe_program(
    dims: Dims, moe: MixtureOfExperts, variant: float | None, _operations: None, _parameters: DType
) -> tuple[BlockProgram, Shapes]:
    """One E block on the busiest expert rank; experts that gather read tokens where they are."""
    shared, mesh, gathers = moe.shared_ffn_hidden_size, ExpertMesh(dims.ep, dims.etp), dims.gathers
    travels = mesh.ep * mesh.etp > 1
    rows = received_rows(moe, dims.batch * dims.residual_tokens, mesh, variant)
    tensors = _storages(dims, moe, mesh, rows, travels)
    if gathers:
        tensors |= _inside(dims, moe, mesh, rows, travels)
    if dims.kernels:
        tensors |= _router_inside(dims, moe)
    if shared:
        tensors |= mlp_storages(dims, shared, "shared.")
    if moe.has_router_losses:
        tensors |= _loss_storages(dims, moe)
    way = Travel(mesh.ep > 1, mesh.etp > 1, dims.gathers_tokens and travels)
    if way.by_gather:
        tensors |= _gathered(dims, moe, mesh, rows)
    return _block(moe, way, sharded=dims.tp > 1, gathers=gathers, kernels=dims.kernels), residual(tensors)


def moe_operations(load: Workload, moe: MixtureOfExperts) -> BlockProgram:
    """The operations of `moe_program` in their order, without sizes."""
    way = Travel(load.ep > 1, load.etp > 1, load.gathers_tokens and load.ep * load.etp > 1)
    return _block(moe, way, sharded=load.tp > 1, gathers=load.gathers, kernels=load.gathers)


def _block(moe: MixtureOfExperts, way: Travel, *, sharded: bool, gathers: bool, kernels: bool) -> BlockProgram:
    return _program(_options(moe, kernels=kernels), way, moe.takes_some, sharded, gathers, limited=moe.capacity is not None)


def _options(moe: MixtureOfExperts, *, kernels: bool) -> MoeOptions:
    given = {"router.bias": moe.router_bias, "router.correction": moe.score_correction, "expert_scale": moe.own_norms}
    router = ("router.weight", *(name for name, is_given in given.items() if is_given))
    gated, shared, latent = moe.activation in GATED, moe.shared_ffn_hidden_size > 0, moe.latent_size is not None
    flags = gated, shared, moe.has_router_losses, moe.shared_gate, latent, moe.bias, router, moe.score == "sigmoid", kernels
    return MoeOptions(*flags, moe.own_norms)


@cache
def _program(options: MoeOptions, way: Travel, padded: bool, sharded: bool, gathers: bool, *, limited: bool) -> BlockProgram:
    gated, shared, losses, bias = options.gated, options.shared, options.losses, options.bias
    scored = ("scored", "log_sums", "load") if losses else ("weights",)
    routed = routed_ops(gated, gathers, bias, way, padded=padded, limited=limited)
    made, shared_made = "expanded" if options.latent else "combined", "shared_gated" if options.shared_gate else "shared"
    scoring, summed = "tokens", (made, shared_made)
    if options.own_norms:
        scoring, summed = "scored_tokens", ("expert_post_normed", "shared_post_normed")
    ops = (
        norm("norm", "x", "normed", "rstd", "norm.weight"),
        *(_own_inputs() if options.own_norms else (reshape("flatten", "normed", "tokens"),)),
        Op(
            "route",
            (scoring,),
            (*scored, "probs", "indices", *(("logits",) if options.sigmoid else ())),
            keeps=(scoring, "logits" if options.sigmoid else "probs", "indices"),
            params=options.router,
            fetches=(ROUTER_BACKWARD,) if options.kernels else (),
        ),
        *(_losses() if losses else ()),
        Op("dispatch_plan", ("indices",), ("rows", "counts"), grads=()),
        Op("entropies", ("probs",), ("entropies",), grads=()),
        Op("entropy", ("entropies",), ("entropy",), grads=()),
        Op("record", ("entropy", "counts"), (), grads=()),
        *(_in_latent(routed) if options.latent else routed),
        *(mlp_ops(gated, sharded, "shared.", "shared") if shared else ()),
        *(_shared_gate() if options.shared_gate else ()),
        *(_own_outputs(made, shared_made) if options.own_norms else ()),
        *((add("sum", summed, "sum"),) if shared else ()),
        add("residual", ("x", "sum" if shared else made), "out"),
    )
    # local variables of ExpertBlock.forward that are alive after their last use
    held = frozenset({"weights", "indices", "rows", "counts", "combined", *(("latent", "expanded") if options.latent else ())})
    program = SELECTIVE.program(*ops, held=held)
    return replace(program, after=frozenset({"latent_up"})) if options.latent else program


def _own_inputs() -> tuple[Op, ...]:
    """Norms of the stream for the experts and for the router, whose channels have factors."""
    return (
        norm("expert_norm", "x", "expert_normed", "expert_rstd", "expert_norm.weight"),
        reshape("flatten", "expert_normed", "tokens"),
        plain_norm("router_norm", "x", "router_normed", "router_"),
        Op("router scale", ("router_normed",), ("router_scaled",), keeps=("router_normed",), params=("router_scale",)),
        reshape("flatten router", "router_scaled", "scored_tokens"),
    )


def _own_outputs(made: str, shared: str) -> tuple[Op, ...]:
    given = {"expert": made, "shared": shared}
    return tuple(
        norm(f"{name}_post_norm", reads, f"{name}_post_normed", f"{name}_post_rstd", f"{name}_post_norm.weight")
        for name, reads in given.items()
    )


def _in_latent(routed: tuple[Op, ...]) -> tuple[Op, ...]:
    """Experts between two projections: operations on tokens read their latents instead."""

    def names(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("latent" if name == "tokens" else name for name in old)

    inner = (
        op._replace(reads=names(op.reads), keeps=names(op.keeps), grads=None if op.grads is None else names(op.grads)) for op in routed
    )
    return (
        linear("latent_down", "tokens", "latent", "latent_down.weight"),
        *inner,
        linear("latent_up", "combined", "expanded", "latent_up.weight"),
    )


def _shared_gate() -> tuple[Op, ...]:
    return (
        linear("shared_gate", "normed", "shared_score", "shared_gate.weight"),
        Op("shared sigmoid", ("shared_score",), ("shared_sigmoid",), keeps=("shared_sigmoid",)),
        Op(
            "shared gating",
            ("shared", "shared_sigmoid"),
            ("shared_gated",),
            keeps=("shared", "shared_sigmoid"),
            fetches=("shared_product",),
        ),
    )


def _losses() -> tuple[Op, ...]:
    reads = ("scored", "probs", "log_sums", "load")
    return (
        Op("losses", reads, ("weights", "loss_values"), keeps=("log_sums", "load"), grads=("scored", "probs", "log_sums")),
        Op("recording", ("loss_values",), (), grads=()),
    )


def _basis(moe: MixtureOfExperts, travels: bool) -> Basis:
    return Basis.MODELLED if (travels or moe.null_experts) and moe.capacity is None else Basis.EXACT


def _inside(dims: Dims, moe: MixtureOfExperts, mesh: ExpertMesh, rows: int, travels: bool) -> Shapes:
    """Kernel scratch of `routed_experts`, in elements of activations."""
    tokens, size = dims.batch * dims.residual_tokens, dims.dtype.bytes
    given, slots = (rows, 1) if travels or moe.takes_some else (tokens, moe.top_k)
    bank = expert_sizes(moe, given, slots, dims.hidden, size, ep=mesh.ep, etp=mesh.etp)
    inside = bank._replace(capacity=rows).inside(frozen=dims.frozen)
    shapes = {INSIDE_FORWARD: (inside.forward // size,), INSIDE_BACKWARD: (inside.backward // size,)}
    return storages(dims.dtype, Column.WORKSPACE, shapes, _basis(moe, travels))


def _router_inside(dims: Dims, moe: MixtureOfExperts) -> Shapes:
    """Scratch of the router's backward, in elements of activations."""
    size, rows = dims.dtype.bytes, dims.batch * dims.residual_tokens
    sizes = RouterBytes(size, size, size * moe.router_bias, size * moe.score_correction)
    wanted = (True, not dims.frozen, not dims.frozen, not dims.frozen)
    parts = 2 if dims.dtype is DType.BF16 else 1
    inside = route_backward_bytes(rows, dims.hidden, moe.num_choices, sizes, wanted, parts=parts)
    return storages(dims.dtype, Column.WORKSPACE, {ROUTER_BACKWARD: (inside // size,)})


def _loss_storages(dims: Dims, moe: MixtureOfExperts) -> Shapes:
    tokens = dims.batch * dims.residual_tokens
    scores = {"scored": (tokens, moe.slots), "log_sums": (tokens,), "loss_values": (2,)}
    load = storages(DType.INT32, Column.ROUTING, {"load": (dims.batch, moe.num_choices)})
    return storages(dims.stat_dtype, Column.ACTIVATIONS, scores) | load


def _gathered(dims: Dims, moe: MixtureOfExperts, mesh: ExpertMesh, rows: int) -> Shapes:
    """Storages of tokens that are gathered from all ranks, and of the sums that are scattered to them."""
    tokens, hidden = dims.batch * dims.residual_tokens, moe.row_width(dims.hidden)
    limit, basis, near = capacity(moe, tokens), _basis(moe, travels=True), tokens * mesh.ep
    far = near * mesh.etp
    choices = tokens * moe.slots if limit is None else limit * moe.num_experts
    chosen = {"near_choices": (choices * mesh.ep,), "all_choices": (choices * mesh.ep * mesh.etp,)}
    planned = {"all_rows": (far * moe.slots,), "all_counts": (moe.num_choices,)}
    moved = {"near_tokens": (near, hidden), "all_tokens": (far, hidden), "near_partial": (near, hidden), "partial": (far, hidden)}
    weighing = {"near_weights": (near, moe.slots), "all_weights": (far, moe.slots)}
    return {
        **storages(dims.dtype, Column.COMMUNICATION, moved),
        **storages(dims.stat_dtype, Column.COMMUNICATION, weighing),
        **storages(DType.INT32, Column.COMMUNICATION, chosen),
        **storages(DType.INT32, Column.ROUTING, planned),
        **storages(DType.INT32, Column.ROUTING, {"places": (rows,)}, basis),
    }


def _storages(dims: Dims, moe: MixtureOfExperts, mesh: ExpertMesh, rows: int, travels: bool) -> Shapes:
    tokens = dims.batch * dims.residual_tokens
    limit = capacity(moe, tokens)
    chosen = moe.rows_of(tokens) if limit is None else limit * moe.num_experts
    planned = tokens * moe.top_k if limit is None else chosen
    local, width = moe.num_experts // mesh.ep, moe.ffn_hidden_size // mesh.etp
    basis = _basis(moe, travels)
    own: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("normed", "tokens", "shared", "shared_gated", "shared_product", "expanded", "sum", "out"), dims.residual
    )
    hidden = moe.row_width(dims.hidden)
    own |= {"shared_score": (*dims.residual[:2], 1), "shared_sigmoid": (*dims.residual[:2], 1), "latent": (tokens, hidden)}
    routed = {"indices": (tokens, moe.slots), "rows": (planned,), "counts": (moe.num_choices,)}
    if moe.own_norms:
        names = ("expert_normed", "router_normed", "router_scaled", "scored_tokens", "expert_post_normed", "shared_post_normed")
        own |= dict.fromkeys(names, dims.residual) | {"router_ones": (dims.hidden,)}
    all_experts = (tokens, moe.num_choices)
    scores = {"weights": (tokens, moe.slots), **dict.fromkeys(("probs", "logits", "entropies"), all_experts), "entropy": ()}
    tensors = {
        **storages(dims.dtype, Column.ACTIVATIONS, own),
        **storages(dims.stat_dtype, Column.ACTIVATIONS, {**dict.fromkeys(_STATISTICS, dims.residual[:2]), **scores}),
        **storages(DType.INT32, Column.ROUTING, routed),
        **storages(dims.dtype, Column.ACTIVATIONS, {"combined": (*dims.residual[:2], hidden)}),
        **storages(dims.dtype, Column.ROUTING, dict.fromkeys(("received", "processed"), (rows, hidden)), basis),
        **storages(dims.dtype, Column.ACTIVATIONS, dict.fromkeys(("experts.gate", "experts.up"), (rows, width)), basis),
    }
    if not travels and not moe.takes_some:
        return tensors
    sent = dict.fromkeys(("sent", "returned"), (chosen, hidden))
    weighing = {"sent_weights": (chosen,)}
    far = dict.fromkeys((ARRIVED, "leaving", "parts", "gradient_parts"), (rows, hidden))
    far |= dict.fromkeys(("crossed", "summed"), (rows // mesh.etp, hidden))
    routed_far = {"order": (rows,), "own_counts": (mesh.ep, local), "received_counts": (local,)}
    gathered = mesh.etp > 1 and moe.capacity_factor is None  # with a capacity, the row counts of all slices are known
    counts_column = Column.COMMUNICATION if gathered else Column.ROUTING
    weighing_far = {"arrived_weights": (rows,), "crossed_weights": (rows // mesh.etp,)}
    return {
        **tensors,
        **storages(dims.dtype, Column.ACTIVATIONS, {SLICED_BIAS: (local, hidden)}),
        **storages(dims.dtype, Column.ROUTING, sent),
        **storages(dims.stat_dtype, Column.ROUTING, weighing),
        **storages(dims.dtype, Column.ROUTING, far, basis),
        **storages(DType.INT32, Column.ROUTING, routed_far, basis),
        **storages(DType.INT32, counts_column, {"arrived_counts": (mesh.ep * mesh.etp, local)}, basis),
        **storages(dims.stat_dtype, Column.ROUTING, weighing_far, basis),
    }
