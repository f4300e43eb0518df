"""What each operator keeps for backward, per microbatch: named tensors of Megatron-Core and Transformer Engine.

Source: the saved tensors of `megatron/core` at d98e8a64 and of Transformer Engine at d0067d0d, by module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import ceil

from megaplan.hosts.megatron.job import EMBEDDING, LOSS, MTP, SIXTEEN_BIT, LatentDims, MegatronJob, MoeDims

Item = tuple[str, int]
KEPT = 4096
"""Operators of runs whose bytes are remembered."""
OPERATORS = "*-MGE" + "".join(SIXTEEN_BIT)
"""Letters of operators, without embedding, prediction modules and loss."""


def operator(job: MegatronJob, letter: str, *, recompute: bool = True) -> Mapping[str, int]:
    """Bytes by tensor of one operator, under the run's selective recompute unless `recompute` is false."""
    return _operator(job.of_operators, letter, recompute)


def operator_bytes(job: MegatronJob, letter: str) -> int:
    """Bytes that one operator keeps, under the run's selective recompute."""
    return _operator_bytes(job.of_operators, letter)


@lru_cache(maxsize=KEPT)
def _operator_bytes(job: MegatronJob, letter: str) -> int:
    return sum(_operator(job, letter, True).values())


@lru_cache(maxsize=KEPT)
def _operator(job: MegatronJob, letter: str, recompute: bool) -> Mapping[str, int]:
    job, letter = job.of(letter)
    items = dict(_common(job, letter))
    items.update({"*": _attention, "-": _dense, "M": _mamba, "G": _delta, "E": _experts}[letter](job))
    dropped = _dropped(job, letter) if recompute else frozenset()
    return {name: size for name, size in items.items() if name not in dropped}


def chunk(job: MegatronJob, letters: str) -> int:
    """Bytes that one model chunk keeps for one microbatch, logits and loss left out."""
    total = 0
    stream = job.stream_tokens * job.hidden_size
    if job.offloaded_operators:
        own, ends = operators(letters), "".join(letter for letter in letters if letter in (EMBEDDING, MTP, LOSS))
        letters = own[job.offloaded_operators :] + ends
    if job.recompute_num_layers:  # of each group of operators its input alone
        groups, rest = job.recomputed(operators(letters))
        total += 2 * stream * len(groups)
        letters = rest + "".join(letter for letter in letters if letter in (EMBEDDING, MTP, LOSS))
    for letter in letters:
        if letter == LOSS:
            total += 4 * stream  # the final norm's input and output
        elif letter == MTP:
            total += sum(operator_bytes(job, one) for one in job.mtp_operators) + 16 * stream
        elif letter == EMBEDDING:
            total += stream * job.hidden_dropout
        else:
            total += operator_bytes(job, letter)
    return total


def operators(letters: str) -> str:
    """The operators of a chunk, without embedding, prediction modules and loss."""
    return "".join(letter for letter in letters if letter in OPERATORS)


def input_bytes(job: MegatronJob, rows: int, columns: int) -> int:
    """What a linear saves of an input that no other operation keeps: in low precision the copy that its weight gradient multiplies."""
    return 2 * rows * columns if job.low is None else job.low.recipe.columnwise_bytes(rows, columns)


def _common(job: MegatronJob, letter: str) -> Iterator[Item]:
    stream = job.stream_tokens * job.hidden_size
    yield "norm.input", 2 * stream
    if letter == "E" or (letter == "*" and job.latent is not None and "layernorm" in job.recompute):
        yield "norm.output", 2 * stream  # the router keeps it in 16 bits; projections do where it is made again
    else:  # two projections of latent attention save a copy each in low precision
        copies = 2 if letter == "*" and job.latent is not None and job.low is not None else 1
        yield "norm.output", copies * input_bytes(job, job.stream_tokens, job.hidden_size)
    yield "norm.stats", job.stream_tokens * (4 if job.rms_norm else 8)
    if job.hidden_dropout:
        yield "dropout.mask", stream


def _attention(job: MegatronJob) -> Iterator[Item]:
    tokens, heads = job.tokens, job.num_heads // job.tp
    if job.latent is not None:
        yield from _latent(job, job.latent)
    else:
        groups = max(1, job.num_query_groups // job.tp)
        width = heads * job.head_dim
        yield "qkv", 2 * tokens * (width + 2 * groups * job.head_dim)
        if job.attention_backend == "fused" and groups < heads:
            yield "q.copy", 2 * tokens * width
        if job.qk_norm:
            normed = tokens * (heads + groups)
            yield "qk.normed", 2 * normed * job.head_dim
            yield "qk.stats", normed * (4 if job.rms_norm else 8)
        yield "context", 2 * tokens * width
        if job.output_gate:
            yield "gate", 2 * tokens * width
            yield "gated", input_bytes(job, tokens, width)
        if job.cp > 1:
            yield "context.reordered", 2 * tokens * width
        if job.attention_backend == "unfused" and groups < heads:
            yield "kv.expanded", 2 * 2 * tokens * width
    if job.low is not None and not job.low.keeps_original and not job.output_gate:  # attention itself keeps its output in 16 bits
        yield "context.copy", input_bytes(job, tokens, heads * (job.head_dim if job.latent is None else job.latent.v_head_dim))
    if job.attention_backend != "unfused":
        yield "lse", 4 * tokens * heads
        return
    scores = scores_elements(job)
    yield "softmax", 2 * scores
    if job.attention_dropout:
        yield "softmax.mask", scores
        yield "softmax.dropped", 2 * scores


def scores_elements(job: MegatronJob) -> int:
    """Elements of one microbatch's attention probabilities on a rank."""
    return job.micro_batch_size * (job.num_heads // job.tp) * (job.seq_length // job.cp) * job.seq_length


def _latent(job: MegatronJob, dims: LatentDims) -> Iterator[Item]:
    tokens, heads, stream = job.tokens, job.num_heads // job.tp, job.stream_tokens
    for name, rank in (("q_latent", dims.q_lora_rank), ("kv_latent", dims.kv_lora_rank)):
        if rank is not None:
            yield name, 2 * stream * rank
            if dims.normed:
                yield f"{name}.norm", input_bytes(job, stream, rank)
    width = dims.qk_head_dim + dims.qk_pos_emb_head_dim
    yield "q", 2 * tokens * heads * width
    yield "k", 2 * tokens * heads * width
    yield "v", 2 * tokens * heads * dims.v_head_dim
    yield "context", 2 * tokens * heads * dims.v_head_dim


def _dense(job: MegatronJob) -> Iterator[Item]:
    width = job.ffn_hidden_size // job.tp
    yield "fc1.output", 2 * job.tokens * width * (2 if job.gated else 1)
    yield "activation.output", input_bytes(job, job.tokens, width)


def _mamba(job: MegatronJob) -> Iterator[Item]:
    dims = job.mamba
    if dims is None:
        raise ValueError("a pattern with M has no Mamba dimensions")
    yield "zxbcdt", 2 * job.tokens * (2 * dims.inner + 2 * dims.num_groups * dims.state_dim + dims.num_heads) // job.tp
    for name in ("scan.output", "gated.output"):
        yield name, 2 * job.tokens * dims.inner // job.tp
    yield "gated.norm", input_bytes(job, job.tokens, dims.inner // job.tp)


DELTA_CHUNK = 64
"""Positions that the gated delta rule's kernels compute at once."""


def _delta(job: MegatronJob) -> Iterator[Item]:
    """Inputs of convolution, of the norms of queries and keys and of the rule's kernel, which repeats keys to the values' heads.

    Source: `megatron/core/ssm/gated_delta_net/common.py`, and `ChunkGatedDeltaRuleFunction` of flash-linear-attention.
    """
    dims = job.delta
    if dims is None:
        raise ValueError("a pattern with G has no gated delta net")
    tokens, heads = job.tokens, dims.num_value_heads // job.tp
    channels, values = (2 * dims.keys + dims.values) // job.tp, dims.values // job.tp
    yield "conv.input", 2 * tokens * channels
    yield "conv.output", 2 * tokens * channels
    yield "keys.repeated", 2 * 2 * tokens * heads * dims.key_dim
    yield "values", 2 * tokens * values
    yield "decay", (4 + 2) * tokens * heads
    yield "rule.inverse", 2 * tokens * heads * DELTA_CHUNK
    yield "rule.output", 2 * tokens * values
    yield "gate", 2 * tokens * values
    yield "gated.norm", input_bytes(job, tokens, values)


def _experts(job: MegatronJob) -> Iterator[Item]:
    dims = job.moe
    if dims is None:
        raise ValueError("a pattern with E has no experts")
    rows = routed_rows(job, dims)
    width = dims.ffn_hidden_size // job.etp
    yield "routed.fc1.input", input_bytes(job, rows, dims.latent or job.hidden_size)
    yield "routed.fc1.output", 2 * rows * width * (2 if job.gated else 1)
    again = "moe_act" in job.recompute  # made again from what is kept, so the second product saves no copy
    yield "routed.activation.output", 2 * rows * width if again else input_bytes(job, rows, width)
    if not job.gated and not job.bias_activation_fusion:
        yield "routed.activation.unscaled", 2 * rows * width
    yield "router", 16 * job.stream_tokens * dims.num_experts
    yield from _shared(job, dims)
    if dims.latent is not None:  # the router keeps what is projected down, in 16 bits
        if job.low is not None:
            yield "latent.input", input_bytes(job, job.stream_tokens, job.hidden_size)
        yield "latent.output", input_bytes(job, job.stream_tokens, dims.latent)
    if dims.combine_kept:  # an all-to-all has brought the rows back before they are added; the others add where the experts are
        yield "combine.rows", 2 * job.hidden_size * (job.stream_tokens * dims.top_k if dims.dispatcher == "alltoall" else rows)
    if dims.dispatcher == "hybridep":
        yield "dispatch.handle", handle_bytes(job, dims)
    if dims.dispatcher == "allgather":
        yield "dispatch.map", 5 * job.stream_tokens * job.tp * job.ep * dims.num_experts
        yield "dispatch.rows", rows * (8 + dims.probability_bytes)  # each row's place, an int64, and its probability


def handle_bytes(job: MegatronJob, dims: MoeDims) -> int:
    """Maps by which HybridEP finds a microbatch's rows again, of all tokens that the ranks of the experts share.

    Each token has its row on each rank in 4 bytes, and for each expert of this rank a flag and its permuted row in 4 bytes.
    Source: `Executor::metadata_preprocess_core` and `permute_processing` of DeepEP's branch hybrid-ep.
    """
    ranks = job.ep * job.etp
    return job.stream_tokens * ranks * (4 + 5 * (dims.num_experts // job.ep))


def routed_rows(job: MegatronJob, dims: MoeDims, share: float | None = None) -> int:
    """Rows that the rank's experts keep of one microbatch; in low precision those of each expert are padded.

    Args:
        job: The run.
        dims: Its experts.
        share: Rows over the even share; None for those that are kept.
    """
    rows = ceil(job.stream_tokens * dims.top_k * job.etp * (dims.kept_share if share is None else share))
    if job.low is None:
        return rows
    local = max(1, dims.num_experts // job.ep)
    padding = job.low.recipe.row_padding
    return ceil(rows / local / padding) * padding * local


def _shared(job: MegatronJob, dims: MoeDims) -> Iterator[Item]:
    if dims.shared_ffn_hidden_size:
        width = dims.shared_ffn_hidden_size // job.tp
        if job.low is not None and not job.low.keeps_original:  # the router keeps this input in 16 bits
            yield "shared.fc1.input", input_bytes(job, job.stream_tokens, job.hidden_size)
        yield "shared.fc1.output", 2 * job.tokens * width * (2 if job.gated else 1)
        yield "shared.activation.output", input_bytes(job, job.tokens, width)
        if job.shared_gate:
            yield "shared.output", 2 * job.stream_tokens * job.hidden_size


def _dropped(job: MegatronJob, letter: str) -> frozenset[str]:
    names: set[str] = set()
    modules = job.recompute
    if letter == "*" and "core_attn" in modules:
        names |= {"softmax", "softmax.mask", "softmax.dropped", "lse"}
    if letter == "*" and "mla_up_proj" in modules:
        names |= {"q", "k", "v", "q_latent.norm", "kv_latent.norm"}
    if "layernorm" in modules and (letter == "E" or (letter == "*" and job.latent is not None)):
        names.add("norm.output")  # a norm fused into a linear keeps its output
    if letter == "-" and "mlp" in modules:
        names |= {"fc1.output", "activation.output"}
    if letter == "E" and "moe_act" in modules:
        names |= {"routed.activation.output", "routed.activation.unscaled"}
    if letter == "E" and "moe" in modules:  # its checkpoint keeps the layer's input, which is the norm's output
        names |= {name for name, _ in _experts(job)}
    for module in modules_offloaded(job, letter):
        names |= OFFLOADED[module][1]
    return frozenset(names)


OFFLOADED = {
    "attn_norm": ("*", {"norm.input"}),
    "qkv_linear": ("*", {"norm.output"}),
    "core_attn": ("*", {"qkv", "q", "k", "v", "softmax", "softmax.mask", "softmax.dropped"}),
    "attn_proj": ("*", {"context"}),
    "mlp_norm": ("-E", {"norm.input"}),
    "expert_fc1": ("E", {"routed.fc1.input"}),
    "fused_group_mlp": ("E", {"routed.fc1.input"}),
    "moe_act": ("E", {"routed.fc1.output"}),
}
"""Operators, and the tensors that each module saves: those of a million elements or more go to the host.

Source: `offload_modules` of `megatron/core/transformer/transformer_config.py`.
"""


def modules_offloaded(job: MegatronJob, letter: str) -> list[str]:
    """The modules of an operator whose inputs are on the host between forward and backward."""
    return [module for module in job.offloaded if letter in OFFLOADED[module][0]]


def offloaded_here_bytes(job: MegatronJob) -> int:
    """Inputs of offloaded modules that are on the device: the last of each module, which backward reads next, and one on its way.

    Source: `_offload_margin` and `last_group_with_same_name` of `megatron/core/pipeline_parallel/fine_grained_activation_offload.py`.
    """
    if not job.offloaded:
        return 0
    here = replace(job, offloaded=frozenset())
    letters = {letter for letters in job.chunks for letter in operators(letters)}
    inputs = [sum(operator(here, letter).values()) - sum(operator(job, letter).values()) for letter in letters]
    return sum(inputs) + max(inputs, default=0)
