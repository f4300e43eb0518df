"""Work of the operations of E blocks: router, dispatch, chosen experts, combine, shared expert.

Source: arXiv:2401.04088, section 2.1; arXiv:2401.06066, equation 9 (shared expert).
"""

from megakernels.facts import Work
from megakernels.ops.activation.facts import activation
from megakernels.ops.moe.facts import ROUTE, Permutation, routing_work
from megaplan.blocks.costs import linear_work, mlp, norm_work, residual_work
from megaplan.blocks.work import OpWork, Workload, Works
from megaplan.families.moe.section import MixtureOfExperts, expert_sizes

PART = "E"


def routing(load: Workload, moe: MixtureOfExperts, hidden_size: int, skew: float = 1.0) -> Works:
    """Router product, dispatch and combine of the rank's own tokens.

    Dispatch reads a token's row and writes it k times; combine sums it from k rows; backward moves the same rows in reverse. Rows that
    travel to other ranks, and all rows if `load.sorts`, are sorted by expert and unsorted: one more read and write each. Experts that
    gather and have no capacity need no sorted rows and, on one rank, no dispatched rows: their products read k rows per token in place, and
    write k rows that are summed.

    If tokens are gathered, a rank copies the rows of its experts from the tokens of all ranks, and sums results into one row per token of
    all ranks: per local token it moves the rows of an even share, and writes one sum per rank.
    """
    rows, row = moe.top_k, moe.row_width(hidden_size) * load.itemsize
    sorting: Works = ()
    travels, num_sums, skews = load.ep * load.etp > 1, 1, None
    by_gather = travels and load.gathers_tokens
    if by_gather:
        rows, num_sums, skews = rows * load.etp, load.ep * load.etp, skew
    rows_and_sum = (rows + num_sums) * row
    copies = travels or not load.gathers or moe.takes_some
    if (travels or load.sorts) and not (load.gathers or by_gather):
        sorted_rows = 2 * rows * load.etp * row
        work = Work(moved_forward=sorted_rows, moved_input=sorted_rows)
        sorting = tuple(OpWork(name, PART, work, own_tokens=True, skew=skew) for name in ("sort", "unsort"))
    permutation = Permutation(False, bool(moe.shared_ffn_hidden_size), hidden_size * load.itemsize)
    dispatched = Work(moved_forward=2 * rows * row * copies, moved_input=rows_and_sum)
    combined = Work(moved_forward=rows_and_sum, moved_input=rows_and_sum * copies)
    route = routing_work(hidden_size, moe.num_choices, load.itemsize)
    return (
        OpWork("route", PART, route, ROUTE, weights=hidden_size * moe.num_choices, own_tokens=True),
        OpWork("dispatch", PART, dispatched, permutation, own_tokens=True, skew=skews),
        *sorting,
        OpWork("combine", PART, combined, permutation._replace(combines=True), own_tokens=True, skew=skews),
    )


def moe_work(load: Workload, moe: MixtureOfExperts, hidden_size: int, variant: float | None = None) -> Works:
    """One E block, pre-norm and residual included: `top_k` experts per token, and the shared expert.

    Every routed row is counted; skew moves work between ranks without changing the total; with a capacity the rows of the buffers count. A
    rank holds `1 / ep` of the experts and receives as many rows as it sends; with etp, each of the etp ranks of an expert computes a slice
    of its width on the rows of all of them. `tp` shards only the shared expert.
    """
    rows, skew = moe.row_width(hidden_size), moe.skew_in(variant)
    bank = expert_sizes(moe, load.num_tokens, moe.top_k, hidden_size, load.itemsize, ep=load.ep, etp=load.etp)
    weights = moe.parameters_per_expert(hidden_size) // load.etp * (moe.num_experts // load.ep)
    work = (bank.row_work() * (moe.top_k * load.etp * moe.num_experts)).share(moe.num_choices)
    experts = OpWork("experts", "experts", work, bank, weights, own_tokens=True, skew=skew)
    ops = (residual_work(load, PART, hidden_size), *routing(load, moe, hidden_size, skew), experts)
    if moe.latent_size is not None:
        ops += (
            linear_work(load, "latent_down", PART, hidden_size, rows, own_tokens=True),
            linear_work(load, "latent_up", PART, rows, hidden_size, own_tokens=True),
        )
    if moe.shared_gate:
        ops += (
            linear_work(load, "shared_gate", PART, hidden_size, 1, own_tokens=True),
            OpWork("shared gating", PART, activation(hidden_size, load.itemsize, gated=True), own_tokens=True),
        )
    if moe.own_norms:
        names = "expert_norm", "router_norm", "expert_post_norm", "shared_post_norm"
        ops += tuple(norm_work(load, name, PART, hidden_size, own_tokens=True) for name in names)
    if moe.shared_ffn_hidden_size:
        ops += mlp(load, PART, hidden_size, moe.shared_ffn_hidden_size, moe.activation, "shared.")
    return ops
