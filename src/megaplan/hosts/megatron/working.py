"""What the forward and the backward of a chunk's operators hold besides what the operators keep for backward.

Source: `megatron/core` at d98e8a64, Transformer Engine at d0067d0d, and `mamba_ssm/ops/triton/ssd_combined.py`, by module. A tensor counts
from the call that makes it until the last name or autograd node that refers to it is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import comb
from typing import NamedTuple

from megaplan.hosts.megatron.job import EMBEDDING, LOSS, MTP, MegatronJob, MoeDims
from megaplan.hosts.megatron.saved import DELTA_CHUNK, KEPT, OPERATORS, operator, operator_bytes, routed_rows, scores_elements

MAMBA_CHUNK = 128
"""Tokens of one chunk of Megatron's scan."""


class Step(NamedTuple):
    """One moment of an operator's backward.

    Attributes:
        made: Bytes of gradients and scratch, the residual stream's gradient left out.
        frees: Kept tensors that go with it.
        uses: Kept tensors that selective recompute has made again by then, besides those it frees.
    """

    made: int
    frees: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


def forward_excess(job: MegatronJob, letters: str) -> int:
    """Most bytes of a chunk's forward over what the chunk keeps when it has ended; negative where the end is the most by far."""
    parts = list(_parts(job, letters))
    left, most = -sum(kept for _, kept in parts), -sum(kept for _, kept in parts)
    for letter, kept in parts:
        left += kept
        if letter is not None:
            most = max(most, left + forward_bytes(job, letter))
    return most


def backward_excess(job: MegatronJob, letters: str) -> int:
    """Most bytes of a chunk's backward over what the chunk keeps before it begins."""
    gradient, left, most = _stream_gradient(job), 0, -sum(kept for _, kept in _parts(job, letters))
    for letter, kept in reversed(list(_parts(job, letters))):
        if letter is not None:
            most = max(most, left + gradient + backward_bytes(job, letter))
        left -= kept
    return most


def forward_bytes(job: MegatronJob, letter: str) -> int:
    """Most bytes that an operator's forward holds besides what it keeps; what selective recompute drops is there until then."""
    return _forward(job.of_operators, letter)


@lru_cache(maxsize=KEPT)
def _forward(job: MegatronJob, letter: str) -> int:
    job, letter = job.of(letter)
    return 0 if letter in job.graphs else _forward_bytes(job, letter)


def _forward_bytes(job: MegatronJob, letter: str) -> int:
    dropped = _dropped(job, letter)
    output = _output(job)
    if letter == "*":
        scores = 2 * scores_elements(job) if job.attention_backend == "unfused" else 0
        return max(scores + sum(dropped.values()), output + dropped.get("norm.output", 0))
    if letter == "-":
        return sum(dropped.values()) + output
    if letter == "M":
        return max(_conv_bytes(job) + 6 * _states_elements(job) + _products_bytes(job), output)
    if letter == "G":
        return max(_delta_states_bytes(job) + _conv_width_bytes(job), output)
    return _experts_forward(job, dropped)


def backward_bytes(job: MegatronJob, letter: str) -> int:
    """Most bytes of an operator's backward over what it keeps, the residual stream's gradient left out."""
    return _backward(job.of_operators, letter)


@lru_cache(maxsize=KEPT)
def _backward(job: MegatronJob, letter: str) -> int:
    job, letter = job.of(letter)
    return 0 if letter in job.graphs else _backward_bytes(job, letter)


def graph_bytes(job: MegatronJob) -> int:
    """Scratch of the pool that all graphs of layers share: one runs at a time."""
    letters = {letter for letters in job.chunks for letter in letters + job.mtp_operators if job.of(letter)[1] in job.graphs}
    found = [(*job.of(letter), letter) for letter in sorted(letters)]
    return max((max(_forward_bytes(run, own), _stream_gradient(run) + _backward_bytes(run, own)) for run, own, _ in found), default=0)


def _backward_bytes(job: MegatronJob, letter: str) -> int:
    full, dropped = operator(job, letter, recompute=False), _dropped(job, letter)
    again = gone = most = held = 0
    for step in _backward_steps(job, letter):
        again += sum(dropped.pop(name, 0) for name in (*step.uses, *step.frees))
        most = max(most, again - gone + step.made + held)
        if job.delayed_wgrad:  # operands of the weight gradients stay: what the step would free, and the gradient it made
            held += step.made // 2
            continue
        gone += sum(full.get(name, 0) for name in step.frees)
    return most


def _parts(job: MegatronJob, letters: str) -> Iterator[tuple[str | None, int]]:
    """Operators in the order of forward, and what stands between them, each with what it keeps."""
    stream = job.stream_tokens * job.hidden_size
    for letter in letters:
        if letter == EMBEDDING:
            yield None, stream * job.hidden_dropout
        elif letter == LOSS:
            yield None, 4 * stream
        elif letter == MTP:
            yield None, 16 * stream
            for one in job.mtp_operators:
                yield one, operator_bytes(job, one)
        elif letter in OPERATORS:
            yield letter, operator_bytes(job, letter)


def _dropped(job: MegatronJob, letter: str) -> dict[str, int]:
    kept = operator(job, letter)
    return {name: size for name, size in operator(job, letter, recompute=False).items() if name not in kept}


def _stream_gradient(job: MegatronJob) -> int:
    """Of the residual stream; before a dropout its operator's output has one of its own."""
    return 2 * job.stream_tokens * job.hidden_size * (2 if job.hidden_dropout else 1)


def _gathered(job: MegatronJob) -> int:
    """A linear's input or gradient, gathered from the ranks of sequence parallelism."""
    return 2 * job.tokens * job.hidden_size if job.sequence_parallel else 0


def _gradient_copies(job: MegatronJob, rows: int, columns: int) -> int:
    """Of the gradient of a linear's output, which both of its products in backward multiply."""
    return 0 if job.low is None else job.low.recipe.both_bytes(rows, columns)


def _output(job: MegatronJob) -> int:
    """What a row-parallel linear makes: its product, and under sequence parallelism this rank's share of the sum."""
    return 2 * job.tokens * job.hidden_size + (2 * job.stream_tokens * job.hidden_size if job.sequence_parallel else 0)


def _backward_steps(job: MegatronJob, letter: str) -> Iterator[Step]:
    if letter == "*":
        yield from _attention_backward(job)
    elif letter == "-":
        width = job.ffn_hidden_size // job.tp
        yield from _mlp_backward(job, width, ("fc1.output", "activation.output"))
    elif letter == "M":
        yield from _mamba_backward(job)
    elif letter == "G":
        yield from _delta_backward(job)
    else:
        yield from _experts_backward(job)


def _attention_backward(job: MegatronJob) -> Iterator[Step]:
    heads, tokens = job.num_heads // job.tp, job.tokens
    if job.latent is not None:
        width = job.latent.qk_head_dim + job.latent.qk_pos_emb_head_dim
        context = 2 * tokens * heads * job.latent.v_head_dim
        inputs = 2 * tokens * heads * 2 * width + context
        projected: tuple[str, ...] = ("q", "k", "v", "q_latent.norm", "kv_latent.norm")
    else:
        context = 2 * tokens * heads * job.head_dim
        inputs = context + 4 * tokens * max(1, job.num_query_groups // job.tp) * job.head_dim
        projected = ("qkv",)
    yield Step(_gathered(job) + context + _gradient_copies(job, tokens, job.hidden_size), uses=("norm.output",))
    if job.attention_backend == "unfused":
        scores = 2 * scores_elements(job)
        probabilities = ("softmax", "softmax.mask", "softmax.dropped")
        yield Step(context + scores, ("softmax.dropped",), (*probabilities, *projected))
        if job.attention_dropout:
            yield Step(2 * scores, ("softmax.mask",))
        yield Step(scores, ("softmax",))  # the fused softmax writes its gradient in place
        yield Step(scores + inputs, ("context", *projected))
    else:
        accumulated = 2 * context if job.attention_backend == "flash" else 0  # flash attention adds up the queries' gradient in fp32
        yield Step(context + inputs + accumulated, ("lse", "context", "context.reordered", *projected))
    copies = _gradient_copies(job, tokens, inputs // (2 * tokens))
    yield Step(inputs + copies + _gathered(job) + _output(job), ("norm.output",))


def _mlp_backward(job: MegatronJob, width: int, names: tuple[str, str]) -> Iterator[Step]:
    activation = 2 * job.tokens * width
    product = activation * (2 if job.gated else 1)
    yield Step(_gathered(job) + activation + _gradient_copies(job, job.tokens, job.hidden_size), names[1:])
    yield Step(activation + product, names[:1])
    yield Step(product + _gradient_copies(job, job.tokens, product // (2 * job.tokens)) + _gathered(job) + _output(job))


def _states_elements(job: MegatronJob) -> int:
    """One state a chunk of the scan."""
    assert job.mamba is not None
    return -(-job.tokens // MAMBA_CHUNK) * job.mamba.inner * job.mamba.state_dim // job.tp


def _conv_bytes(job: MegatronJob) -> int:
    """The convolution's output: x, B and C."""
    assert job.mamba is not None
    return 2 * job.tokens * (job.mamba.inner + 2 * job.mamba.num_groups * job.mamba.state_dim) // job.tp


def _products_bytes(job: MegatronJob) -> int:
    """C · B of each chunk, in fp32."""
    assert job.mamba is not None
    return 4 * job.tokens * MAMBA_CHUNK * max(1, job.mamba.num_groups // job.tp)


def _mamba_backward(job: MegatronJob) -> Iterator[Step]:
    assert job.mamba is not None
    inner = 2 * job.tokens * job.mamba.inner // job.tp
    projected = operator(job, "M", recompute=False)["zxbcdt"]
    yield Step(_gathered(job) + inner + _gradient_copies(job, job.tokens, job.hidden_size), ("gated.norm",))
    yield Step(2 * inner, ("gated.output",))
    # states and their gradient in fp32, and a 16-bit copy of either
    scan = inner + projected + 2 * _conv_bytes(job) + 12 * _states_elements(job) + _products_bytes(job)
    yield Step(scan, ("zxbcdt", "scan.output"))
    yield Step(projected + _gradient_copies(job, job.tokens, projected // (2 * job.tokens)) + _gathered(job) + _output(job))


def _delta_states_bytes(job: MegatronJob) -> int:
    """States between chunks in 16 bits, and what a chunk writes to them."""
    assert job.delta is not None
    heads = job.delta.num_value_heads // job.tp
    states = -(-job.tokens // DELTA_CHUNK) * heads * job.delta.key_dim * job.delta.value_dim
    return 2 * states + 2 * job.tokens * heads * (job.delta.key_dim + 2 * job.delta.value_dim)


def _conv_width_bytes(job: MegatronJob) -> int:
    """Of queries, keys and values side by side."""
    assert job.delta is not None
    return 2 * job.tokens * (2 * job.delta.keys + job.delta.values) // job.tp


def _delta_backward(job: MegatronJob) -> Iterator[Step]:
    assert job.delta is not None
    values, keys = 2 * job.tokens * job.delta.values // job.tp, operator(job, "G", recompute=False)["keys.repeated"]
    yield Step(_gathered(job) + values + _gradient_copies(job, job.tokens, job.hidden_size), ("gated.norm",))
    yield Step(2 * values, ("gate",))
    yield Step(2 * values + keys + 2 * _delta_states_bytes(job), ("rule.output", "rule.inverse", "keys.repeated", "values", "decay"))
    yield Step(keys + values + _conv_width_bytes(job), ("conv.output",))
    projected = _conv_width_bytes(job) + values
    yield Step(projected + _conv_width_bytes(job), ("conv.input",))
    yield Step(
        projected + _gradient_copies(job, job.tokens, projected // (2 * job.tokens)) + _gathered(job) + _output(job), ("norm.output",)
    )


class _Rows(NamedTuple):
    """Bytes of one copy of routed rows.

    Attributes:
        sent: Of this rank's tokens.
        received: What the all-to-all brings, before ranks of one expert gather theirs.
        routed: What this rank's experts compute.
    """

    sent: int
    received: int
    routed: int


def _rows(job: MegatronJob, dims: MoeDims) -> _Rows:
    width = dims.latent or job.hidden_size
    sent = 2 * job.stream_tokens * dims.top_k * width
    return _Rows(sent, int(sent * dims.rows_share), 2 * routed_rows(job, dims, dims.rows_share) * width)


def _deduplicated(job: MegatronJob, dims: MoeDims) -> int:
    """Rows of DeepEP, which sends a token once to a rank whichever of its experts the token has there; routing is even."""
    others = comb(dims.num_experts - dims.num_experts // job.ep, dims.top_k) / comb(dims.num_experts, dims.top_k)
    return int(2 * job.stream_tokens * job.ep * job.etp * (1 - others) * (dims.latent or job.hidden_size))


def _experts_forward(job: MegatronJob, dropped: dict[str, int]) -> int:
    """The rows that the layer's own frame still names while its last ones are made, and the shared expert's output.

    Under all-to-all those are the permuted rows, the received ones, the experts' output and its copy in the order of arrival; then the last
    two, or what the second all-to-all brings back.
    """
    dims = job.moe
    assert dims is not None
    rows, stream = _rows(job, dims), 2 * job.stream_tokens * job.hidden_size
    sorts, travels = dims.num_experts // job.ep > 1, job.ep * job.etp > 1
    if dims.dispatcher == "alltoall":
        named = rows.sent + (rows.received if travels and sorts else 0)
        restored = rows.routed * (2 if sorts else 1)
        returned = rows.routed + (rows.sent if job.ep > 1 and not dims.combine_kept else 0)
        working = named + max(restored, returned)
    elif dims.dispatcher == "allgather":
        working = (0 if dims.combine_kept else rows.routed) + stream * job.tp * job.ep
    elif dims.dispatcher == "deepep":  # the received tokens, the experts' output, and that in the tokens' order
        working = rows.routed + 2 * _deduplicated(job, dims)
    else:
        working = rows.routed + stream
    if "moe" in job.recompute:  # nothing is kept, and the input of the experts is named like the others
        working += operator(job, "E", recompute=False)["routed.fc1.input"]
    else:  # what the activation made is dropped when the experts' output is there
        working = max(working, working - rows.routed + sum(size for name, size in dropped.items() if name != "norm.output"))
    shared = stream if dims.shared_ffn_hidden_size else 0
    return working + shared + dropped.get("norm.output", 0)


def _experts_backward(job: MegatronJob) -> Iterator[Step]:
    dims = job.moe
    assert dims is not None
    rows = _rows(job, dims)
    outer = dims.latent or job.hidden_size
    width = rows.routed // outer * (dims.ffn_hidden_size // job.etp)
    product = width * (2 if job.gated else 1)
    if "moe" in job.recompute:
        inner = _experts_forward(job, {}) - operator(job, "E", recompute=False)["routed.fc1.input"]
        yield Step(inner, uses=tuple(operator(job, "E", recompute=False)))
    travelling = max(rows.sent + rows.received, 2 * rows.routed)
    yield Step(travelling, ("combine.rows",), ("norm.output",))
    count, inner_width = rows.routed // (2 * outer), dims.ffn_hidden_size // job.etp * (2 if job.gated else 1)
    yield Step(rows.routed + width + _gradient_copies(job, count, outer), ("routed.activation.output",))
    yield Step(width + product, ("routed.fc1.output", "routed.activation.unscaled"))
    yield Step(product + rows.routed + _gradient_copies(job, count, inner_width), ("routed.fc1.input",))
    yield Step(travelling)
    if dims.shared_ffn_hidden_size:
        yield from _mlp_backward(job, dims.shared_ffn_hidden_size // job.tp, ("shared.fc1.output", "shared.activation.output"))
