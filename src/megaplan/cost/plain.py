"""What megarun's operations take where they run as plain torch: every intermediate goes through memory, in fp32, launch by launch.

`host.kernels: reference` runs all of them so; `triton` those that have no kernel yet. Some kernels of such an operation are bound by their
launch and others by their work, so a pass takes

    √((launches · launch)² + (bytes / bandwidth + FLOPs / fp32 peak)²)

Bytes are a percentage of the ideal ones, and a number for each element of an intermediate that the ideal does not have: an element of a
chunk's tile or of a recurrent state. What attention takes follows from its loop (`megaplan.cost.plain_attention`).

Source: `benchmarks/roofline.py` counts launches, bytes and FLOPs on the operations' own code; a test of it holds the table to the counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megaplan.blocks.work import Op, Workload
from megaplan.cost.extra import Extra
from megaplan.cost.plain_attention import PASSES
from megaplan.families.attention.scratch import INDEX_WIDTH, core_has_kernels
from megaplan.families.mamba.tensors import num_mamba_heads
from megaplan.spec.models import KimiDeltaAttention, LatentAttention, Mamba1, Mamba2, Mamba3, Model, Spec

REFERENCE = ("reference",)


class Pass(NamedTuple):
    """One pass of an operation.

    Attributes:
        percent: Of the ideal bytes that it moves.
        element_bytes: Moved for each element of the intermediate.
        launches: Once, or in each turn of its loop.
    """

    percent: int
    element_bytes: int = 0
    launches: int = 1


class Plain(NamedTuple):
    """An operation.

    Attributes:
        forward: F.
        backward: I, with W.
        is_fp32: Its products run in fp32; else in the dtype of the weights, beside what is moved here.
    """

    forward: Pass
    backward: Pass
    is_fp32: bool = False


NORM = Plain(Pass(1000, launches=9), Pass(1570, launches=14))
GATED = Plain(Pass(830, launches=6), Pass(1180, launches=13))
CONVOLUTION = Plain(Pass(2300, launches=12), Pass(4360, launches=38))
OPERATIONS: dict[str, Plain] = {
    "norm": Plain(Pass(590, launches=10), Pass(1250, launches=15)),  # the residual addition with it
    "final_norm": Plain(Pass(590, launches=10), Pass(1250, launches=15)),
    **dict.fromkeys(("q_latent_norm", "kv_latent_norm", "qk_norm", "B_norm, C_norm", "hidden_norm, embedding_norm"), NORM),
    "gated_norm": Plain(Pass(1300, launches=13), Pass(2060, launches=25)),
    "activation": GATED,
    "gate": GATED,
    "rope": Plain(Pass(870, launches=22), Pass(880, launches=24)),
    "mla_kv": Plain(Pass(130, launches=13), Pass(180, launches=14)),
    "conv1d": CONVOLUTION,
    "conv_qk": CONVOLUTION,
    "conv_v": CONVOLUTION,
    "gated_conv": Plain(Pass(1030, launches=11), Pass(1780, launches=37)),
    "ssd": Plain(Pass(910, 46, 46), Pass(1290, 101, 100), is_fp32=True),
    "scan": Plain(Pass(0, 69, 84), Pass(0, 198, 229), is_fp32=True),
    "selective_scan": Plain(Pass(0, 46, 84), Pass(0, 158, 254), is_fp32=True),
    "delta_rule": Plain(Pass(0, 50, 54), Pass(0, 210, 209), is_fp32=True),
    "m2rnn": Plain(Pass(0, 41, 27), Pass(0, 162, 56), is_fp32=True),
    "route": Plain(Pass(500, launches=8), Pass(520, launches=20), is_fp32=True),
    "dispatch": Plain(Pass(100, launches=2), Pass(820, launches=14)),
    "combine": Plain(Pass(820, launches=14), Pass(160, launches=2)),
    "experts": Plain(Pass(310, launches=12), Pass(650, launches=37)),
    "cross_entropy": Plain(Pass(500, launches=94), Pass(900, launches=117)),
}
"""By the last part of an op's name."""
UNGATED = Plain(Pass(700, launches=4), Pass(770, launches=6))


class PlainTorch:
    """Passes of a spec's ops that run as plain torch."""

    def __init__(self, spec: Spec, load: Workload) -> None:
        self._spec, self._load = spec, load
        self._is_own = spec.host.has_kernels
        attention, relations = spec.model.attention, spec.model.features.relation_bias is not None
        self._without: frozenset[str] = frozenset()  # ops of this spec that no kernel takes
        if attention is not None and not core_has_kernels(attention, spec.precision.activations, relations=relations):
            self._without = frozenset(PASSES)
        elif isinstance(attention, LatentAttention) and attention.indexer is not None and attention.indexer.head_dim > INDEX_WIDTH:
            self._without = frozenset({"indexer"})

    def forward(self, op: Op, tokens: int) -> Extra | None:
        """F of an op on this rank; None where a kernel runs it."""
        return self._pass(op, tokens, op.work.moved_forward, op.work.forward, is_forward=True)

    def backward(self, op: Op, tokens: int) -> Extra | None:
        """I, with W, of an op that is no linear."""
        work = op.work
        return self._pass(op, tokens, work.moved_input + work.moved_weight, work.input_grad + work.weight_grad, is_forward=False)

    def _pass(self, op: Op, tokens: int, moved: int, flops: int, *, is_forward: bool) -> Extra | None:
        if not self._is_own or op.is_linear or not (self._spec.host.kernels in REFERENCE or op.name in self._without):
            return None
        if op.name in PASSES:
            return PASSES[op.name](self._spec, self._load, op)[0 if is_forward else 1]
        known = OPERATIONS.get(op.name.rpartition(".")[2])
        if known is None:
            return None
        if known is GATED and 3 * op.work.moved_input != 5 * op.work.moved_forward:
            known = UNGATED  # one operand instead of two
        found, shape = known.forward if is_forward else known.backward, _SHAPES.get(op.name)
        elements, turns = (0, 1) if shape is None else shape(self._spec.model, self._load)
        num_bytes = (found.percent * moved // 100 + found.element_bytes * elements) * tokens
        return Extra(num_bytes, found.launches * turns, flops * tokens, known.is_fp32)


Shape = Callable[[Model, Workload], tuple[int, int]]
"""Elements of the intermediate a token, and turns of the loop."""


def _ssd(model: Model, load: Workload) -> tuple[int, int]:
    """A tile of chunk² for each head, chunk by chunk."""
    assert isinstance(model.mamba, Mamba2)
    shape, chunk = model.mamba, min(model.mamba.chunk_size, load.seq_length)
    return chunk * num_mamba_heads(shape, model.hidden_size) // load.tp, -(-load.seq_length // chunk)


def _scan(model: Model, load: Workload) -> tuple[int, int]:
    """For each row of a head B or C, x, and its row of the tile twice; chunk by chunk."""
    assert isinstance(model.mamba, Mamba3)
    shape, chunk = model.mamba, min(model.mamba.chunk_positions, model.mamba.save_every, load.seq_length)
    rows = num_mamba_heads(shape, model.hidden_size) // load.tp * shape.mimo_rank
    return rows * (shape.state_dim + shape.head_dim + 2 * chunk * shape.mimo_rank), -(-load.seq_length // chunk)


def _selective_scan(model: Model, load: Workload) -> tuple[int, int]:
    """The states of all channels; 32 positions are a turn."""
    assert isinstance(model.mamba, Mamba1)
    return model.mamba.expand * model.hidden_size // load.tp * model.mamba.state_dim, -(-load.seq_length // 32)


def _delta_rule(model: Model, load: Workload) -> tuple[int, int]:
    """A head's key and value, its row of a chunk's tile, for each key column where each has a decay, and its share of a state."""
    assert model.linear_attention is not None
    shape = model.linear_attention
    chunk, keys = min(shape.chunk_size, shape.save_every, load.seq_length), shape.key_dim
    pairs = chunk * keys if isinstance(shape, KimiDeltaAttention) else chunk
    elements = keys + shape.value_dim + pairs + keys * shape.value_dim // chunk
    return shape.num_value_heads // load.tp * elements, -(-load.seq_length // chunk)


def _m2rnn(model: Model, load: Workload) -> tuple[int, int]:
    """The state, position by position; eight are a turn."""
    assert model.recurrent is not None
    shape = model.recurrent
    return shape.num_heads // load.tp * shape.key_dim * shape.value_dim, -(-load.seq_length // 8)


_SHAPES: dict[str, Shape] = {
    **{"selective_scan": _selective_scan, "ssd": _ssd, "scan": _scan, "delta_rule": _delta_rule, "m2rnn": _m2rnn},
}
