"""Work of M blocks: Mamba-1's selective scan, Mamba-2's chunked state-space duality and Mamba-3's multi-input form of it."""

from __future__ import annotations

from megaplan.blocks.costs import FP32_BYTES, activation, causal_conv1d, gated_norm, linear_op, norm, residual_op, scaled
from megaplan.blocks.work import Op, Ops, Work, Workload
from megaplan.families.mamba.section import Mamba1, Mamba2, Mamba3
from megaplan.families.mamba.tensors import num_mamba_heads

PART = "M"


def selective_scan(load: Workload, *, channels: int, state_dim: int, save_every: int) -> Work:
    """Mamba-1's scan h' = a h + (Δ x) B, y = C h', elementwise in every channel's state of N.

    Forward per token and channel: a h + (Δ x) B 3·N, C h' 2·N. Backward: dh' += C dy and dC 2·N each, its way through a, (Δ x) and B 5·N,
    da 2·N; and h' once more, because only every `save_every`-th state is kept. Bytes: x, Δ and y of a channel, B and C, and the kept fp32
    states.

    Source: arXiv:2312.00752, algorithm 2; counting multiplications and additions.
    """
    forward, again = 5 * channels * state_dim, 3 * channels * state_dim
    inputs = 2 * channels + 2 * state_dim
    states = -(-load.seq_length // save_every) * channels * state_dim * FP32_BYTES
    written = load.per_token(states)
    return Work(
        forward,
        11 * channels * state_dim + again,
        0,
        again,
        moved_forward=(inputs + channels) * load.itemsize + written,
        moved_input=(2 * inputs + channels) * load.itemsize + written,
    )


def ssd(load: Workload, *, num_heads: int, head_dim: int, state_dim: int, num_groups: int, chunk_size: int) -> Work:
    """Mamba-2's scan in chunks of Q positions, whole Q × Q tiles computed.

    Forward per token: C Bᵀ 2·Q·N a group; (L ∘ C Bᵀ) x 2·Q·P, chunk states Bᵀ x 2·N·P and C · state 2·N·P a head. Backward: two products
    of the same size for each, and C Bᵀ once more; the states at chunk starts are kept. Bytes: x, y, B, C, dt, the states written and read.

    Source: arXiv:2405.21060, section 6 and its listing 1.
    """
    chunk = min(chunk_size, load.seq_length)
    scores = 2 * chunk * state_dim * num_groups
    forward = scores + num_heads * (2 * chunk * head_dim + 4 * state_dim * head_dim)
    width, shared = num_heads * head_dim, num_groups * state_dim
    inputs = width + 2 * shared + num_heads
    return _scan(load, forward, scores, inputs, width, _state_bytes(load, chunk, width * state_dim))


def mimo_ssd(
    load: Workload, *, num_heads: int, head_dim: int, state_dim: int, num_groups: int, mimo_rank: int, chunk_size: int, save_every: int
) -> Work:
    """Mamba-3's scan: `mimo_rank` inputs and outputs a position, in chunks of `chunk_size` positions, so mimo_rank · chunk_size rows.

    Per token and head, with R rows a position and chunks of Q rows: C Bᵀ 2·R·Q·N, its product with x 2·R·Q·P, chunk states and their
    reading 4·R·N·P. C Bᵀ is per head, not per group: each head adds its own bias to B and C. States pass from chunk to chunk on chip; those
    at each `save_every`-th position are kept.

    Source: Mamba-3, arXiv:2603.15569, section 3 (MIMO).
    """
    tile = min(chunk_size, save_every, load.seq_length) * mimo_rank
    scores = num_heads * 2 * mimo_rank * tile * state_dim
    forward = scores + num_heads * mimo_rank * (2 * tile * head_dim + 4 * state_dim * head_dim)
    width, shared = num_heads * head_dim, num_groups * state_dim * mimo_rank
    inputs = 2 * width + 2 * shared + 3 * num_heads  # x, z, B, C, and dt, A, trapezoid gate
    return _scan(load, forward, scores, inputs, width, _state_bytes(load, min(save_every, load.seq_length), width * state_dim))


def mamba_work(load: Workload, mamba: Mamba1 | Mamba2 | Mamba3, hidden_size: int, _variant: None = None) -> Ops:
    """One M block, pre-norm and residual included; `tp` shards its heads and groups, or channels, not Mamba-3's angles.

    Source: arXiv:2312.00752, section 3 (Mamba-1); arXiv:2405.21060, section 7.1 (Mamba-2); arXiv:2603.15569, section 3 (Mamba-3).
    """
    if isinstance(mamba, Mamba1):
        channels = mamba.expand * hidden_size // load.tp
        body = _mamba1(load, mamba, hidden_size, channels)
        return (residual_op(load, PART, hidden_size), *body, linear_op(load, "out_proj", PART, channels, hidden_size, closes=True))
    heads, groups = num_mamba_heads(mamba, hidden_size) // load.tp, mamba.num_groups // load.tp
    inner = heads * mamba.head_dim
    body = (
        _mamba2(load, mamba, hidden_size, heads, groups) if isinstance(mamba, Mamba2) else _mamba3(load, mamba, hidden_size, heads, groups)
    )
    return (residual_op(load, PART, hidden_size), *body, linear_op(load, "out_proj", PART, inner, hidden_size, closes=True))


def _mamba1(load: Workload, mamba: Mamba1, hidden_size: int, channels: int) -> Ops:
    rank, state = mamba.step_width(hidden_size), mamba.state_dim
    norms: Ops = ()
    if mamba.inner_norm != "none":
        widths = norm(load, rank) + norm(load, state) * 2
        norms = (Op("inner norms", PART, widths, counts=("dt_norm", "B_norm", "C_norm")),)
    return (
        linear_op(load, "in_proj", PART, hidden_size, 2 * channels),
        Op("conv1d", PART, causal_conv1d(load, channels, mamba.conv_kernel)),
        linear_op(load, "x_proj", PART, channels, rank + 2 * state),
        *norms,
        linear_op(load, "dt_proj", PART, rank, channels),
        Op("selective_scan", "scan", selective_scan(load, channels=channels, state_dim=state, save_every=mamba.save_every)),
        Op("gate", PART, activation(load, channels, "swiglu")),
    )


def _mamba2(load: Workload, mamba: Mamba2, hidden_size: int, heads: int, groups: int) -> Ops:
    inner, shared = heads * mamba.head_dim, groups * mamba.state_dim
    scan = ssd(load, num_heads=heads, head_dim=mamba.head_dim, state_dim=mamba.state_dim, num_groups=groups, chunk_size=mamba.chunk_size)
    width = 2 * inner + 2 * shared + heads
    factors: Ops = () if mamba.part_multipliers is None else (Op("scale parts", PART, scaled(load, width)),)
    return (
        linear_op(load, "in_proj", PART, hidden_size, width),
        *factors,
        Op("conv1d", PART, causal_conv1d(load, inner + 2 * shared, mamba.conv_kernel)),
        Op("ssd", "scan", scan),
        Op("gated_norm", PART, gated_norm(load, inner, groups))
        if mamba.gated_norm
        else Op("gate", PART, activation(load, inner, "swiglu")),
    )


def _mamba3(load: Workload, mamba: Mamba3, hidden_size: int, heads: int, groups: int) -> Ops:
    rank, inner, shared = mamba.mimo_rank, heads * mamba.head_dim, groups * mamba.state_dim
    scan = mimo_ssd(
        load,
        num_heads=heads,
        head_dim=mamba.head_dim,
        state_dim=mamba.state_dim,
        num_groups=groups,
        mimo_rank=rank,
        chunk_size=mamba.chunk_positions,
        save_every=mamba.save_every,
    )
    angles = (linear_op(load, "angle_proj", PART, hidden_size, mamba.num_angles),) if mamba.num_angles else ()
    return (
        linear_op(load, "in_proj", PART, hidden_size, 2 * inner + 2 * shared * rank + 3 * heads),
        *angles,
        Op("B_norm, C_norm", PART, norm(load, mamba.state_dim) * (2 * groups * rank), counts=("B_norm", "C_norm")),
        Op("scan", "scan", scan),
    )


def _scan(load: Workload, forward: int, scores: int, inputs: int, width: int, states: tuple[int, int]) -> Work:
    """Twice the forward's products backward and the scores once more; x, y, B, C, dt of a token, and the states."""
    return Work(
        forward,
        2 * forward + scores,
        0,
        scores,
        moved_forward=(inputs + width) * load.itemsize + states[0],
        moved_input=(2 * inputs + width) * load.itemsize + states[1],
    )


def _state_bytes(load: Workload, chunk: int, state_elements: int) -> tuple[int, int]:
    """States at chunk starts, per token: written and read forward; read backward, their gradient written and read."""
    num_chunks = -(-load.seq_length // chunk)
    forward = load.per_token(2 * num_chunks * state_elements * load.itemsize)
    return forward, load.per_token(5 * num_chunks * state_elements * load.itemsize) - forward
