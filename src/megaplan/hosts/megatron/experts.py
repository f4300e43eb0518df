"""Routed and shared experts as Megatron-Core runs them, and the dispatchers by which tokens reach them.

Source: `megatron/core/transformer/moe` at d98e8a64, and DeepEP.
"""

from dataclasses import replace
from functools import cache
from math import ceil, comb
from typing import Literal, NamedTuple

from megaplan.blocks.ops import Op
from megaplan.blocks.storages import Shapes
from megaplan.columns import Column
from megaplan.families.moe.section import MixtureOfExperts
from megaplan.hosts.megarun.program import Replay
from megaplan.hosts.megatron.away import offloaded, recomputed
from megaplan.hosts.megatron.programs import Sized, mlp_ops, mlp_shapes
from megaplan.hosts.megatron.setting import COMMON, Names, Setting, of_bytes, operator_replay, recomputed_modules
from megaplan.spec.models import Spec

Dispatcher = Literal["allgather", "alltoall", "deepep", "hybridep"]


def dispatcher(spec: Spec) -> Dispatcher:
    """The dispatcher; for flex, the library that it uses."""
    kind = spec.host.dispatcher
    return spec.host.moe_flex_backend if kind == "flex" else "alltoall" if kind == "alltoall" else "allgather"


def probability_bytes(spec: Spec) -> int:
    """Bytes of a routing probability: the router's dtype, or the stream's if none is given."""
    return {"fp32": 4, "fp64": 8}.get(spec.host.moe_router_dtype or "", spec.precision.params.bytes)


def rows_share(at: Setting, moe: MixtureOfExperts) -> float:
    """Rows that a rank's experts compute, relative to the even share."""
    if at.spec.host.moe_rank_capacity is not None:
        return at.spec.host.moe_rank_capacity
    skew = moe.skew_in(at.skew)
    return skew if moe.capacity_factor is None else min(skew, moe.capacity_factor)


def kept_share(at: Setting, moe: MixtureOfExperts) -> float:
    """Rows that a rank's experts save for backward, relative to the even share: with a paged stash, the rows of the stash."""
    stash = at.spec.host.moe_paged_stash
    return rows_share(at, moe) if stash is None else stash


def keeps_combined(spec: Spec) -> bool:
    """True if adding the experts' rows back to tokens keeps them.

    True for torch's `index_add`, Megatron's deterministic implementation without a fused permutation; false for `scatter_add`.
    """
    host = spec.host
    return host.deterministic_mode and not host.moe_permute_fusion and not host.moe_overlap


def routed_rows(at: Setting, moe: MixtureOfExperts, share: float) -> int:
    """Rows of one microbatch on the rank's experts, `share` times the even share; in low precision each expert's rows are padded."""
    rows = ceil(at.stream_tokens * moe.top_k * at.dims.etp * share)
    if at.recipe is None:
        return rows
    local = max(1, moe.num_experts // at.dims.ep)
    padding = at.recipe.row_padding
    return ceil(rows / local / padding) * padding * local


def handle_bytes(at: Setting, moe: MixtureOfExperts) -> int:
    """Index maps of HybridEP for a microbatch's rows, over the tokens of all ranks of the experts.

    Each token has its row on each rank in 4 bytes, and for each expert of this rank a flag and its permuted row in 4 bytes.
    Source: `Executor::metadata_preprocess_core` and `permute_processing` of DeepEP's branch hybrid-ep.
    """
    ranks = at.dims.ep * at.dims.etp
    return at.stream_tokens * ranks * (4 + 5 * (moe.num_experts // at.dims.ep))


def dispatcher_bytes(at: Setting) -> int:
    """Bytes that the dispatcher of one layer's experts keeps referenced until the next microbatch.

    All-gather keeps the places and probabilities of its rows, and its map. All-to-all keeps the probabilities and the map of its tokens,
    and the destinations of their rows. HybridEP keeps probabilities in fp32 and the map, the probabilities of the rows, and, through the
    autograd graph, the maps of the dispatch. DeepEP's are not counted.

    Source: the attributes of the dispatchers in `megatron/core/transformer/moe/token_dispatcher.py`.
    """
    moe, dims, kind = at.spec.model.moe, at.dims, dispatcher(at.spec)
    if moe is None or kind == "deepep":
        return 0
    scores, rows = at.stream_tokens * moe.num_experts, routed_rows(at, moe, kept_share(at, moe))
    if kind == "allgather":
        map_bytes = at.stream_tokens * dims.tp * dims.ep * (moe.num_experts // dims.ep)
        return rows * (8 + probability_bytes(at.spec)) + map_bytes
    if kind == "alltoall":
        fused = at.spec.host.moe_permute_fusion
        places = 4 * (2 * scores + at.stream_tokens) if fused else 8 * at.stream_tokens * moe.top_k
        return scores * (1 + probability_bytes(at.spec)) + places
    return scores * (1 + 4) + 4 * rows + handle_bytes(at, moe)


class _Rows(NamedTuple):
    """Bytes of one copy of routed rows: of this rank's tokens, received by the all-to-all, and computed by this rank's experts.

    Received rows are counted before the ranks of one expert gather their rows.
    """

    sent: int
    received: int
    routed: int


def _rows(at: Setting, moe: MixtureOfExperts) -> _Rows:
    width, share = moe.row_width(at.dims.hidden), rows_share(at, moe)
    sent = at.element_bytes * at.stream_tokens * moe.top_k * width
    return _Rows(sent, int(sent * share), at.element_bytes * routed_rows(at, moe, share) * width)


def _deduplicated_bytes(at: Setting, moe: MixtureOfExperts) -> int:
    """Bytes of DeepEP's rows under even routing: DeepEP sends a token once to a rank, however many experts of that rank it has."""
    others = comb(moe.num_experts - moe.num_experts // at.dims.ep, moe.top_k) / comb(moe.num_experts, moe.top_k)
    return int(2 * at.stream_tokens * at.dims.ep * at.dims.etp * (1 - others) * moe.row_width(at.dims.hidden))


def _named_bytes(at: Setting, moe: MixtureOfExperts) -> int:
    """The rows that the layer's Python frame still references while its last rows are made.

    Under all-to-all these are the permuted rows, the received ones, the experts' output and its copy in the order of arrival; then the last
    two, or the rows that the second all-to-all returns.
    """
    dims, rows, kind, added = at.dims, _rows(at, moe), dispatcher(at.spec), keeps_combined(at.spec)
    sorts, travels = moe.num_experts // dims.ep > 1, dims.ep * dims.etp > 1
    if kind == "alltoall":
        named = rows.sent + (rows.received if travels and sorts else 0)
        restored = rows.routed * (2 if sorts else 1)
        returned = rows.routed + (rows.sent if dims.ep > 1 and not added else 0)
        return named + max(restored, returned)
    if kind == "allgather":
        return (0 if added else rows.routed) + at.element_bytes * at.stream_tokens * dims.hidden * dims.tp * dims.ep
    if kind == "deepep":  # the received tokens, the experts' output, and that in the tokens' order
        return rows.routed + 2 * _deduplicated_bytes(at, moe)
    return rows.routed + at.element_bytes * at.stream_tokens * dims.hidden


def experts_shapes(at: Setting) -> Sized:
    """Storages of routed and shared experts; `fc1.input` belongs to routing, as scores and maps do."""
    moe, dims = at.spec.model.moe, at.dims
    if moe is None:
        raise ValueError("a pattern with E has no experts")
    rows, outer, gated = routed_rows(at, moe, kept_share(at, moe)), moe.row_width(dims.hidden), moe.activation == "swiglu"
    width = moe.ffn_hidden_size // dims.etp
    again = "moe_act" in recomputed_modules(at.spec)  # recomputed from saved tensors, so the second product does not save a copy
    kept = {
        **of_bytes({"routed.fc1.input": at.input_bytes(rows, outer)}, Column.ROUTING),
        **at.narrow({"routed.fc1.output": (rows, width * (2 if gated else 1))}),
        **of_bytes({"routed.activation.output": at.element_bytes * rows * width if again else at.input_bytes(rows, width)}),
        **({} if gated or at.spec.host.fused_squared_relu else at.narrow({"routed.activation.unscaled": (rows, width)})),
        **at.wide({"router": (at.stream_tokens, moe.num_experts, 4)}, Column.ROUTING),
        **_shared_shapes(at, moe),
    }
    if moe.latent_size is not None:  # the router saves the input of the down projection, in 16 bits
        copy = {"latent.input": at.input_bytes(at.stream_tokens, dims.hidden)} if at.recipe is not None else {}
        kept |= of_bytes({**copy, "latent.output": at.input_bytes(at.stream_tokens, outer)})
    kind = dispatcher(at.spec)
    if keeps_combined(at.spec):  # all-to-all returns rows before they are summed; with other dispatchers the experts' rank sums them
        kept |= at.narrow({"combine.rows": (at.stream_tokens * moe.top_k if kind == "alltoall" else rows, dims.hidden)})
    if kind == "hybridep":
        kept |= of_bytes({"dispatch.handle": handle_bytes(at, moe)}, Column.ROUTING)
    if kind == "allgather":  # the place of each row (int64) and its probability
        maps = 5 * at.stream_tokens * dims.tp * dims.ep * moe.num_experts
        kept |= of_bytes({"dispatch.map": maps, "dispatch.rows": rows * (8 + probability_bytes(at.spec))}, Column.ROUTING)
    return kept, _moving_shapes(at, moe, {**at.common("E"), **kept}, gated=gated)


def _shared_shapes(at: Setting, moe: MixtureOfExperts) -> Shapes:
    if not moe.shared_ffn_hidden_size:
        return {}
    kept = mlp_shapes(at, moe.shared_ffn_hidden_size, "shared.", gated=moe.activation == "swiglu")[0]
    if at.spec.host.moe_shared_overlap and at.dims.tp > 1 and at.spec.host.sequence_parallel:  # its linears gather nothing again
        kept |= of_bytes({"shared.fc1.input": at.input_bytes(at.tokens, at.dims.hidden)})
    elif at.copies_inputs:  # the router keeps this input in 16 bits
        kept |= of_bytes({"shared.fc1.input": at.input_bytes(at.stream_tokens, at.dims.hidden)})
    return kept | (at.narrow({"shared.output": at.dims.residual}) if moe.shared_gate else {})


def _moving_shapes(at: Setting, moe: MixtureOfExperts, kept: Shapes, *, gated: bool) -> Shapes:
    """Rows between dispatch and combine, and the gradients of each product.

    Under full recompute of the layer, the input of the experts is named like the other rows. Otherwise the activation's output is freed
    when the experts' output exists.
    """
    rows, outer = _rows(at, moe), moe.row_width(at.dims.hidden)
    number, width = rows.routed // (at.element_bytes * outer), moe.ffn_hidden_size // at.dims.etp
    columns = width * (2 if gated else 1)
    named = most = _named_bytes(at, moe)
    if "moe" in recomputed_modules(at.spec):
        most += kept["routed.fc1.input"][0]
    else:
        freed = recomputed(at.spec, "E", kept) | offloaded(at.spec, "E", kept)
        most = max(named, named - rows.routed + sum(kept[name][0] for name in freed if name != "norm.output"))
    return {
        **of_bytes({"named": most, "named again": named, "travelling": max(rows.sent + rows.received, 2 * rows.routed)}),
        **at.narrow({"shared": at.dims.residual if moe.shared_ffn_hidden_size else (0,)}),
        **at.narrow({"rows.gradient": (number, outer), "product.gradient": (number, columns), "activation.gradient": (number, width)}),
        **of_bytes({"fc1.copies": at.gradient_copies_bytes(number, columns), "fc2.copies": at.gradient_copies_bytes(number, outer)}),
        **(mlp_shapes(at, moe.shared_ffn_hidden_size, "shared.", gated=gated)[1] if moe.shared_ffn_hidden_size else {}),
    }


@cache
def experts_replay(names: Names, away: Names) -> Replay:
    """The replay of experts; the backward of the shared expert is last.

    Under full recompute of the layer, it runs again before its first gradient.
    """
    rows, product, unscaled, output = (f"routed.{name}" for name in ("fc1.input", "fc1.output", "activation.unscaled", "activation.output"))
    inner = (unscaled,) if unscaled in names else ()
    own = {rows, product, unscaled, output, "combine.rows", "shared.fc1.output", "shared.activation.output", *COMMON}
    whole, shared = rows in away and "router" in away, "shared.fc1.output" in names
    combined = ("combine.rows",) if "combine.rows" in names else ()
    ops = (
        *(mlp_ops("shared.", ("shared",)) if shared else ()),
        Op("dispatch", ("norm.output",), (rows, *sorted(names - own)), ("norm.output",), grads=(), fetches=("travelling",)),
        Op("fc1", (rows,), (product,), keeps=(rows,), grads=(), fetches=("product.gradient", "rows.gradient", "fc1.copies")),
        Op(
            "activation",
            (product,),
            (*inner, output),
            keeps=(product, *inner),
            grads=(),
            fetches=("activation.gradient", "product.gradient"),
        ),
        Op("fc2", (output,), (), keeps=(output,), grads=(), fetches=("rows.gradient", "activation.gradient", "fc2.copies")),
        Op("combine", ("shared",) if shared else (), ("named", *combined), (*combined, "norm.output"), grads=(), fetches=("travelling",)),
    )
    held = frozenset({"norm.output"})
    if not whole:
        return operator_replay(names, away, ops, held=held)
    again = Op("run again", (), (), keeps=tuple(sorted(names & away)), grads=(), fetches=("named again", "shared"))
    run = operator_replay(names, away, ops, held=held, again=(again,))
    common, checkpoint = names & frozenset(COMMON), Op("checkpoint", ("norm.output",), ("named", "shared"), grads=())
    first = operator_replay(common, away & common, (checkpoint,), held=held)
    return replace(run, forward=first.forward, forward_peaks=first.forward_peaks)
