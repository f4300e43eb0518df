"""What megarun's operations take where they run by kernels (`host.kernels: triton`): their bytes, products and launches.

The work of an op (`megaplan.blocks.work`) is ideal: operands once, results once, one kernel. Kernels of an operation hand intermediates to
one another through memory, make products again, and are launched one by one. A pass of such an operation takes

    max(FLOPs / reached peak, bytes / reached bandwidth, dependent steps · step) + launches · launch

An operation without an entry has one kernel, which is ideal. TF32 products count as two of bf16, at whose half rate they run.

Source: `megakernels.ops`, each operation's kernels and `sizes.py`; a test holds bytes, products and launches to what
`benchmarks/roofline.py` counts on the operations' own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megaplan.blocks.work import Op, Workload
from megaplan.families.attention.scratch import head_widths
from megaplan.families.attention.work import rank_pairs
from megaplan.families.mamba.scratch import SELECTIVE_CHANNELS, SELECTIVE_GROUP, WARP, kernels_accept
from megaplan.families.mamba.tensors import num_mamba_heads
from megaplan.spec.models import LatentAttention, Mamba1, Mamba2, Mamba3, Model, Spec

FP32_BYTES = 4
TF32 = 2
"""Products of bf16 whose time one of TF32 takes."""
EXACT = 3 * TF32
"""The same of an fp32 product, of three TF32 ones."""
TILE_ROWS = 64
"""Rows of a tile of a scan, bf16."""
SMALLEST_SIDE = 16
WIDEST_HEAD = 64
"""Columns of a head that one program of Mamba-2's scan has."""
HEADS_OF_PART, SEGMENT_BYTES = 16, 1 << 28
"""Heads whose shares of the gradients of B and C one program sums, and bytes of what is stored for some chunks at once: Mamba-2's."""
STATES_BYTES = 1 << 30
"""Of what Mamba-3's backward stores of some segments at once."""
ISSUED = 32
"""Products of bf16 whose time one instruction of a thread takes to be issued: 4,096 beside 128 a clock and multiprocessor of Hopper."""
SELECTIVE_INSTRUCTIONS = 228, 1547
"""Of Mamba-1's scan forward and backward, issued for a position of a channel of 16 states (`tests/kernels/sm90/issue.py`)."""
POSITIONS_OF_SHARE = 128
"""Positions whose share of the taps' gradients one program of the gated convolution makes."""
WIDEST_KEYS = 128
"""Heads up to this width have the gradients of keys and values made by one launch."""


class Pass(NamedTuple):
    """One pass of an operation on a rank's microbatch.

    Attributes:
        num_bytes: Read and written, weights left out.
        flops: Of products, in bf16's.
        launches: Kernels.
    """

    num_bytes: int
    flops: int
    launches: int


class Shares(NamedTuple):
    """A pass whose bytes and products are percentages of the ideal ones."""

    percent: int = 100
    launches: int = 1
    products: int = 100


Passes = tuple[Pass, Pass]
"""Forward, and backward with the gradients of weights."""
SHARES: dict[str, tuple[Shares, Shares]] = {
    "norm": (Shares(125, 2), Shares(163, 4)),  # the norm, and the addition to the stream by an operation of its own
    "final_norm": (Shares(50), Shares(88, 3)),
    **dict.fromkeys(("q_latent_norm", "kv_latent_norm", "qk_norm", "k_norm", "hidden_norm, embedding_norm"), (Shares(), Shares(118, 3))),
    "B_norm, C_norm": (Shares(100, 2), Shares(101, 6)),
    "gated_norm": (Shares(), Shares(102, 3)),
    "conv1d": (Shares(), Shares(106, 4)),
    "conv_qk": (Shares(), Shares(106, 4)),
    "conv_v": (Shares(), Shares(106, 4)),
    "rope": (Shares(launches=2), Shares(launches=2)),
    "mla_kv": (Shares(), Shares(132, 2)),
    "m2rnn": (Shares(products=533), Shares(1150, 16, 544)),  # TF32, of three parts
    "route": (Shares(launches=2), Shares(launches=5, products=200)),  # bf16: the gradient of the logits has two parts
    "experts": (Shares(launches=7), Shares(launches=11)),
    "dispatch": (Shares(launches=8), Shares()),
    "cross_entropy": (Shares(launches=18), Shares(launches=12)),
}
"""By the last part of an op's name."""


class Kernels:
    """Passes of a spec's ops that several kernels run, or one that is not ideal."""

    def __init__(self, spec: Spec, load: Workload) -> None:
        self._model, self._load = spec.model, load
        mamba = spec.model.mamba
        self._scans = mamba is None or kernels_accept(mamba, spec.precision.activations)
        self._runs = spec.host.uses_triton

    def passes(self, op: Op, tokens: int) -> Passes | None:
        """Both passes of an op; None for a linear, for one kernel that is ideal, and for a scan of sizes that its kernels do not take."""
        if not self._runs or op.is_linear:
            return None
        shape, work = _SHAPES.get(op.name), op.work
        ideal = work.moved_forward * tokens, (work.moved_input + work.moved_weight) * tokens
        flops = work.forward * tokens, (work.input_grad + work.weight_grad) * tokens
        if op.name in SCANS and not self._scans:
            return None
        if shape is not None:
            return shape(self._model, self._load, op)
        shares = SHARES.get(op.name.rpartition(".")[2])
        if shares is None:
            return None
        forward, backward = (
            Pass(share.percent * moved // 100, share.products * product // 100, share.launches)
            for share, moved, product in zip(shares, ideal, flops, strict=True)
        )
        return forward, backward


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _side(size: int, smallest: int = SMALLEST_SIDE) -> int:
    """A power of two of at least `size`."""
    return max(smallest, 1 << max(0, size - 1).bit_length())


def _mamba3(model: Model, load: Workload, _: Op) -> Passes:
    """Five kernels forward and fourteen backward, seven of them for each part of the segments.

    Forward: tables, turns, angles, states before tiles, outputs. Backward: these again with the gradients of outputs, then of states, of
    queries and keys, and of values, sums over groups for C and B, angles and steps.
    """
    assert isinstance(model.mamba, Mamba3)
    shape, size = model.mamba, load.itemsize
    heads, groups = num_mamba_heads(shape, model.hidden_size) // load.tp, shape.num_groups // load.tp
    width, rank, ranks = shape.head_dim, shape.mimo_rank, _side(shape.mimo_rank, 1)
    chunk = min(shape.chunk_positions, shape.save_every)
    positions = min(TILE_ROWS // ranks, _side(chunk, max(1, SMALLEST_SIDE // ranks)))
    rows, state, wide = positions * ranks, 2 * _side(_ceil(shape.state_dim, 2)), _side(width)
    of_rank = load.num_tokens * heads
    segments, sequences = _ceil(load.seq_length, shape.save_every), max(1, load.num_tokens // load.seq_length)
    of_segment = _ceil(min(shape.save_every, load.seq_length), positions)
    tiles = sequences * segments * of_segment * heads
    x, shared = of_rank * width * size, load.num_tokens * groups * rank * shape.state_dim * size
    states, turned, outputs = tiles * width * state * size, tiles * rows * state * size, tiles * rows * width * size
    tables = of_rank * (4 * FP32_BYTES + 2 * shape.num_angles * 2)
    kept = sequences * segments * heads * width * shape.state_dim * size
    partial = sequences * segments * _ceil(of_segment, 4) * heads * rank * (2 * shape.state_dim + 3 * width) * FP32_BYTES
    split = load.num_tokens * (2 * heads * width + 2 * groups * rank * shape.state_dim + 3 * heads) * 2 * size
    scores, values, products = 2 * rows * rows * state, 2 * rows * rows * wide, 2 * rows * wide * state
    parts = _ceil(segments, min(segments, max(1, STATES_BYTES * segments // max(1, 2 * states + 2 * turned + outputs))))
    forward = Pass(4 * x + 3 * shared + 2 * states + kept + 5 * tables, tiles * (scores + values + 2 * products), 3 + 2 * parts)
    moved = 13 * x + 10 * shared + 7 * states + 4 * turned + 4 * outputs + 12 * tables + 2 * kept + 3 * partial
    return forward, Pass(moved + split, tiles * (5 * scores + 3 * values + 6 * products), 16 + 7 * parts)


def _ssd(model: Model, load: Workload, _: Op) -> Passes:
    """Four kernels forward: tables, what chunks add to states, states before chunks, outputs.

    Backward the first three again, for the states' gradients; for each part of the chunks states before tiles and their gradients, pairs of
    positions, gradients of x, and two for each of B and C; steps, sums and copies of three parameters, and parts of the projection joined.
    """
    assert isinstance(model.mamba, Mamba2)
    shape, size = model.mamba, load.itemsize
    heads, groups, width = num_mamba_heads(shape, model.hidden_size) // load.tp, shape.num_groups // load.tp, shape.head_dim
    positions, wide, state = min(TILE_ROWS, _side(shape.chunk_size)), min(WIDEST_HEAD, _side(width)), _side(shape.state_dim)
    sequences, per_chunk = max(1, load.num_tokens // load.seq_length), _ceil(min(shape.chunk_size, load.seq_length), positions)
    chunks, blocks, parts = _ceil(load.seq_length, shape.chunk_size), _ceil(width, wide), _ceil(heads // groups, HEADS_OF_PART)
    tiles = sequences * chunks * per_chunk
    x, shared = load.num_tokens * heads * width * size, load.num_tokens * groups * shape.state_dim * size
    of_state = sequences * heads * width * shape.state_dim
    states, last, per_step = chunks * of_state * size, 2 * of_state * FP32_BYTES, load.num_tokens * heads * FP32_BYTES
    of_tiles = tiles * heads * blocks * wide * state * size
    pairs, edges = (tiles * groups * parts * positions * columns * FP32_BYTES for columns in (positions, state))
    segments = _ceil(chunks, min(chunks, max(1, SEGMENT_BYTES * chunks // (2 * of_tiles + pairs + edges))))
    of_x, scores, values = (2 * positions * inner for inner in (state * wide, positions * state, positions * wide))
    each, of_groups = tiles * heads * blocks, tiles * groups
    forward = Pass(3 * x + 3 * shared + 3 * states + last + 7 * per_step, each * (3 * of_x + scores + values), 4)
    moved = 10 * x + 13 * shared + 4 * states + last + 7 * of_tiles + 3 * pairs + 4 * edges + (18 + 10 * blocks) * per_step
    return forward, Pass(
        moved + joined_bytes(model, load), each * (7 * of_x + 2 * values) + of_groups * (2 * parts + 2) * scores, 10 + 8 * segments
    )


def joined_bytes(model: Model, load: Workload) -> int:
    """Bytes that Mamba-2's backward moves to join the parts of the gradient of the projection, and of the convolution's output."""
    assert isinstance(model.mamba, Mamba2)
    shape = model.mamba
    heads, groups = num_mamba_heads(shape, model.hidden_size) // load.tp, shape.num_groups // load.tp
    return load.num_tokens * (3 * heads * shape.head_dim + 4 * groups * shape.state_dim + heads) * 2 * load.itemsize


def _attention(model: Model, load: Workload, op: Op) -> Passes:
    """A vendor's kernel forward; backward one for queries and one for keys and values, or one for each where heads are wide."""
    assert model.attention is not None
    width, value_width = head_widths(model.attention)
    work, tokens = op.work, load.num_tokens
    pairs = work.forward * tokens // (width + value_width)  # twice the pairs
    apart = max(width, value_width) > WIDEST_KEYS
    products = 4 * width + 3 * value_width + (width if apart else 0)
    moved, launches = work.moved_input * tokens * (217 if apart else 152) // 100, 3 if apart else 2
    if model.features.relation_bias is not None:  # the gradients of scores once more, for their sums, and these for each relation
        heads = model.attention.num_heads // load.tp
        products += width + value_width
        moved += work.moved_forward * tokens + 4 * tokens * heads * FP32_BYTES
        launches += 2
    return Pass(work.moved_forward * tokens, work.forward * tokens, 1), Pass(moved, pairs * products, launches)


def _indexer(model: Model, load: Workload, op: Op) -> Passes:
    """The index's own passes, and what attention to all keys takes beside the chosen."""
    assert model.attention is not None
    width, value_width = head_widths(model.attention)
    forward, backward = index_passes(model, load, op)
    rest = 2 * _unchosen(model, load, op) * (model.attention.num_heads // load.tp)
    return (
        forward._replace(flops=forward.flops + rest * (width + value_width)),
        backward._replace(flops=backward.flops + rest * (4 * width + 3 * value_width)),
    )


def index_passes(model: Model, load: Workload, op: Op) -> Passes:
    """Scores of all visible pairs by fp32 products of three TF32 parts, and the choice.

    Scores of the index, as many as pairs of positions, are written by one kernel and read by the next; so are the rotated queries. Backward
    makes attention's scores of all visible pairs, too, whose mass the index learns.
    """
    attention = model.attention
    assert isinstance(attention, LatentAttention)
    assert attention.indexer is not None
    width, _ = head_widths(attention)
    tokens, index = load.num_tokens, attention.indexer
    visible = rank_pairs(load, op.window)
    scored, scores = 2 * visible * index.num_heads * index.head_dim, tokens * load.seq_length * FP32_BYTES
    turned = tokens * index.num_heads * index.head_dim
    forward = Pass(op.work.moved_forward * tokens + 5 * scores // 2 + 16 * turned, EXACT * scored, 5)
    mass = 2 * visible * (attention.num_heads // load.tp) * width
    return forward, Pass(op.work.moved_input * tokens + 9 * scores + 38 * turned, (3 * EXACT + 2) * scored + mass, 16)


def _unchosen(model: Model, load: Workload, op: Op) -> int:
    """Visible pairs of which attention does not choose the key."""
    assert isinstance(model.attention, LatentAttention)
    assert model.attention.indexer is not None
    return rank_pairs(load, op.window) - rank_pairs(load, op.window, model.attention.indexer.top_k)


def _masked(model: Model, load: Workload, op: Op) -> Passes:
    """Products of attention to a shared choice with keys that are not chosen, which its kernels compute too."""
    attention = model.attention
    assert isinstance(attention, LatentAttention)
    width, value_width = head_widths(attention)
    rest = 2 * _unchosen(model, load, op) * (attention.num_heads // load.tp)
    products = 4 * width + 3 * value_width + (width if max(width, value_width) > WIDEST_KEYS else 0)
    return Pass(0, rest * (width + value_width), 0), Pass(0, rest * products, 0)


def _gated_convolution(model: Model, load: Workload, op: Op) -> Passes:
    """One kernel each way; backward also shares of the taps' gradients, each of some positions, their sum, and a copy a parameter."""
    assert model.short_convolution is not None
    short, tokens, sequences = model.short_convolution, load.num_tokens, max(1, load.num_tokens // load.seq_length)
    channels = model.hidden_size // load.tp
    shares = sequences * _ceil(load.seq_length, POSITIONS_OF_SHARE) * (short.conv_kernel + 1) * channels * FP32_BYTES
    forward = Pass(op.work.moved_forward * tokens, op.work.forward * tokens, 1)
    flops = (op.work.input_grad + op.work.weight_grad) * tokens
    return forward, Pass(op.work.moved_input * tokens + 2 * shares, flops, 4 if short.bias else 3)


def _selective_scan(model: Model, load: Workload, _: Op) -> Passes:
    """One kernel each way, bound by the instructions that it issues.

    Backward x, Δ and B are read twice, every second state is written for each segment and read; parts of the gradients of B and C are
    written for each block of channels, summed and copied; and so are the parameters'.
    """
    assert isinstance(model.mamba, Mamba1)
    shape, size, tokens = model.mamba, load.itemsize, load.num_tokens
    channels, state = shape.expand * model.hidden_size // load.tp, shape.state_dim
    sequences, segments = max(1, tokens // load.seq_length), _ceil(load.seq_length, shape.save_every)
    x, shared, of_keys = tokens * channels * size, tokens * state * size, tokens * state * FP32_BYTES
    last = sequences * channels * state * FP32_BYTES
    blocks = _ceil(channels, min(SELECTIVE_CHANNELS, _side(channels, WARP)))
    groups = _ceil(min(shape.save_every, load.seq_length), SELECTIVE_GROUP)
    again, issued = groups * last, tokens * channels * state * ISSUED // 16
    forward = Pass(3 * x + 2 * shared + (segments + 1) * last, SELECTIVE_INSTRUCTIONS[0] * issued, 1)
    moved = 7 * x + 4 * shared + (segments + 1) * last + 2 * segments * again + 4 * blocks * of_keys + 4 * of_keys + 2 * last
    return forward, Pass(moved, SELECTIVE_INSTRUCTIONS[1] * issued, 9)


SCANS = {"scan", "ssd", "selective_scan"}
"""Ops of Mamba whose kernels have limits of their own (`families.mamba.scratch`)."""
_SHAPES: dict[str, Callable[[Model, Workload, Op], Passes]] = {
    **{"scan": _mamba3, "ssd": _ssd, "attention": _attention, "indexer": _indexer, "masked": _masked},
    **{"gated_conv": _gated_convolution, "selective_scan": _selective_scan},
}
