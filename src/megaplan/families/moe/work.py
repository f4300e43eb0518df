"""Work of E blocks: router, dispatch, chosen experts, combine, shared expert."""

from __future__ import annotations

from megaplan.blocks.costs import FP32_BYTES, activation, linear, linear_op, mlp, residual_op
from megaplan.blocks.work import Op, Ops, Work, Workload, total
from megaplan.families.moe.section import MixtureOfExperts
from megaplan.families.moe.tensors import parameters_per_expert

PART = "E"


def routing(load: Workload, moe: MixtureOfExperts, hidden_size: int) -> Ops:
    """Router product, dispatch and combine, on the rank's own tokens.

    A token's row is read and written k times by dispatch and summed from k rows by combine; backward takes the same ways back. The fp32
    probabilities of all experts are written and read. Rows that travel to other ranks are sorted there by expert, and back: one more
    reading and writing each.

    Experts that gather need neither sorted rows nor, on one rank, dispatched ones: their products read k rows of a token as they would
    read copies, and write k rows that are summed.

    Source: arXiv:1701.06538, section 2 (routing); counting operands.
    """
    rows, row = moe.top_k, moe.row_width(hidden_size) * load.itemsize
    scores = linear(load, hidden_size, moe.num_experts) + Work(
        moved_forward=moe.num_experts * FP32_BYTES, moved_input=moe.num_experts * FP32_BYTES
    )
    sorting: Ops = ()
    travels, rows_and_sum = load.ep * load.etp > 1, (rows + 1) * row
    copies = travels or not load.gathers
    if travels and not load.gathers:
        sorted_rows = 2 * rows * load.etp * row
        work = Work(moved_forward=sorted_rows, moved_input=sorted_rows)
        sorting = tuple(Op(name, PART, work, own_tokens=True, is_routed=True) for name in ("sort", "unsort"))
    return (
        Op("route", PART, scores, weights=hidden_size * moe.num_experts, own_tokens=True),
        Op("dispatch", PART, Work(moved_forward=2 * rows * row * copies, moved_input=rows_and_sum), own_tokens=True),
        *sorting,
        Op("combine", PART, Work(moved_forward=rows_and_sum, moved_input=rows_and_sum * copies), own_tokens=True),
    )


def moe_work(load: Workload, moe: MixtureOfExperts, hidden_size: int, _variant: None = None) -> Ops:
    """One E block, pre-norm and residual included: `top_k` experts a token, and the shared expert.

    Every routed row is counted, dropless or not: a capacity factor that drops tokens makes this an upper bound, and skew moves work between
    ranks, not in total. A rank holds `1 / ep` of the experts and receives as many rows as it sends; with etp, all etp ranks of an expert
    compute a slice of its width on each other's rows too. `tp` shards the shared expert alone.

    Source: arXiv:2401.04088, section 2.1; arXiv:2401.06066, equation 9 (shared expert).
    """
    width = moe.ffn_hidden_size // load.etp
    rows = moe.row_width(hidden_size)
    row = total(mlp(Workload(load.seq_length, load.num_tokens, load.itemsize), PART, rows, width, moe.activation))
    weights = parameters_per_expert(moe, hidden_size) // load.etp * (moe.num_experts // load.ep)
    experts = Op("experts", "experts", row * (moe.top_k * load.etp), weights, own_tokens=True, is_routed=True)
    ops = (residual_op(load, PART, hidden_size), *routing(load, moe, hidden_size), experts)
    if moe.latent_size is not None:
        ops += (
            linear_op(load, "latent_down", PART, hidden_size, rows, own_tokens=True),
            linear_op(load, "latent_up", PART, rows, hidden_size, own_tokens=True),
        )
    if moe.shared_gate:
        ops += (
            linear_op(load, "shared_gate", PART, hidden_size, 1, own_tokens=True),
            Op("shared gating", PART, activation(load, hidden_size, "swiglu"), own_tokens=True),
        )
    if moe.shared_ffn_hidden_size:
        ops += mlp(load, PART, hidden_size, moe.shared_ffn_hidden_size, moe.activation, "shared.")
    return ops
