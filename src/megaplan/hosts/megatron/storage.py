"""Parameters, gradients and optimizer state of a rank's chunks.

Source: `megatron/core/distributed/param_and_grad_buffer.py`, `megatron/core/optimizer/`, at d98e8a64.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from megaplan.hosts.megatron.job import LOSS, MTP, LatentDims, MegatronJob, count
from megaplan.low_precision import history_bytes

LOW_WEIGHTS = "low-precision weights"
"""Copies of 16-bit weights in 8 or 4 bits, row-wise and column-wise, with their scales; made at the first forward and kept."""
HISTORIES = "amax histories"
FSDP_UNIT_ELEMENTS = 1_000_000_000
"""The least size that Megatron-FSDP takes for its unit of communication; it gathers half of one ahead."""


class Rule(Enum):
    """How a parameter is stepped: which optimizer under Muon, over which ranks."""

    MATRIX = "matrix"
    OTHER = "other"
    VOCABULARY = "vocabulary"
    EXPERT_MATRIX = "expert matrix"
    EXPERT_OTHER = "expert other"

    __hash__ = object.__hash__  # Enum hashes the name, in Python

    @property
    def is_expert(self) -> bool:
        """Whether it is a routed expert's."""
        return self is Rule.EXPERT_MATRIX or self is Rule.EXPERT_OTHER

    @property
    def is_matrix(self) -> bool:
        """Whether Muon steps it."""
        return self is Rule.MATRIX or self is Rule.EXPERT_MATRIX


class Tensor(NamedTuple):
    """A parameter on its rank; `sharded`: tensor parallelism may shard it; `low`: its shape where products multiply it in low precision."""

    elements: int
    rule: Rule
    sharded: bool
    low: tuple[int, int] | None = None


@dataclass(slots=True)
class Parameters:
    """A rank's parameters.

    Attributes:
        tensors: One each.
        counts: How many tensors are alike.
        shapes: Distinct shapes of linear weights.
    """

    tensors: list[Tensor] = field(default_factory=list)
    counts: Counter[Tensor] = field(default_factory=Counter)
    shapes: set[tuple[int, int]] = field(default_factory=set)
    _dealt: dict[tuple[int, bool, int], list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, elements: int, rule: Rule = Rule.OTHER, *, sharded: bool = True, low: tuple[int, int] | None = None) -> None:
        """A tensor, if it has elements."""
        if elements:
            tensor = Tensor(elements, rule, sharded, low)
            self.tensors.append(tensor)
            self.counts[tensor] += 1

    def join(self, other: Parameters) -> None:
        """All of another operator's."""
        self.tensors += other.tensors
        for tensor, number in other.counts.items():
            self.counts[tensor] += number
        self.shapes |= other.shapes

    def linear(self, job: MegatronJob, rows: int, columns: int, bias: int = 0, *, sharded: bool = True) -> None:
        """A linear outside experts."""
        self.add(rows * columns, Rule.MATRIX, sharded=sharded, low=(rows, columns) if job.low is not None else None)
        self.add(bias, sharded=sharded)
        self.shapes.add((rows, columns))

    def norm(self, job: MegatronJob, width: int) -> None:
        """A norm's weight, and the bias of a LayerNorm."""
        for _ in range(1 if job.rms_norm else 2):
            self.add(width, sharded=False)

    def stored_bytes(self, job: MegatronJob) -> int:
        """Bytes of all of them, as `stored_bytes` says them."""
        return sum([number * stored_bytes(job, one) for one, number in self.counts.items()])

    def elements(self, *, experts: bool) -> int:
        """Elements of routed experts, or of all else."""
        return sum([number * one.elements for one, number in self.counts.items() if one.rule.is_expert is experts])


def parameters(job: MegatronJob) -> Parameters:
    """The parameters of the rank's chunks."""
    found = Parameters()
    letters = "".join(job.chunks)
    depth = letters.count(MTP)
    vocabulary = job.vocab_size // job.tp * job.hidden_size
    embeds = "e" in letters or (depth > 0 and job.pp > 1)  # a prediction module reads a copy of the embedding
    copies = int(embeds) + int(LOSS in letters)
    for place in range(min(copies, 1) if job.tied else copies):
        of_head = LOSS in letters and place == 0 and job.low is not None and job.low.head
        found.add(vocabulary, Rule.VOCABULARY, low=(job.vocab_size // job.tp, job.hidden_size) if of_head else None)
    if LOSS in letters:  # the head's weight gradient has a dummy like any linear's
        found.shapes.add((job.vocab_size // job.tp, job.hidden_size))
    for letter in letters:
        if letter == "e":
            found.add(job.learned_positions * job.hidden_size, Rule.VOCABULARY, sharded=False)
        elif letter == LOSS:
            found.norm(job, job.hidden_size)
        elif letter != MTP:
            found.join(_operator(job.of_operators, letter))
    for _ in range(min(depth, 1) if job.mtp_repeated else depth):
        for letter in job.mtp_operators:
            found.join(_operator(job.of_operators, letter))
        for _ in range(3):
            found.norm(job, job.hidden_size)
        found.linear(job.of(job.mtp_operators[0])[0], job.hidden_size // job.tp, 2 * job.hidden_size)
    return found


class State(NamedTuple):
    """Bytes of optimizer state on a rank: masters and moments of the matrices of blocks, and of all else."""

    matrix_master: int
    matrix_moments: int
    other_master: int
    other_moments: int

    @property
    def moments(self) -> int:
        """What the first step makes."""
        return self.matrix_moments + self.other_moments

    @property
    def total(self) -> int:
        """All four."""
        return self.matrix_master + self.other_master + self.moments


def storage_bytes(job: MegatronJob, found: Parameters) -> dict[str, int]:
    """Bytes by part: parameters as they are stored, main gradients, optimizer state, copies of weights in low precision."""
    dense, experts = found.elements(experts=False), found.elements(experts=True)
    kept = (dense + experts) // (job.data_parallel if job.fsdp else 1)
    stored = 2 * kept if job.low is None else found.stored_bytes(job) // (job.data_parallel if job.fsdp else 1)
    parts = {"parameters": stored, "gradients": job.gradient_bytes * kept}
    parts["optimizer"] = optimizer_state(job, found).total
    if job.low is not None:
        shapes = [one.low for one in found.tensors if one.low is not None]
        recipe = job.low.recipe
        if not job.low.param_gather:
            parts[LOW_WEIGHTS] = sum(recipe.both_bytes(*shape, weight=True) for shape in shapes)
        if recipe.name == "fp8_delayed":
            parts[HISTORIES] = history_bytes(job.low.amax_history) * len(shapes)
    return parts


def stored_bytes(job: MegatronJob, tensor: Tensor) -> int:
    """Of a parameter on its rank: 16 bits an element, or a weight's own copies in low precision where those are what is stored."""
    if job.low is None or not job.low.param_gather or tensor.low is None:
        return 2 * tensor.elements
    recipe = job.low.recipe
    return recipe.rowwise_bytes(*tensor.low, weight=True) if job.fsdp else recipe.both_bytes(*tensor.low, weight=True)


class Gathered(NamedTuple):
    """Bytes that Megatron-FSDP holds beyond its shards at two moments of a step."""

    loss: int
    first_layer_backward: int


def gathered_bytes(job: MegatronJob, found: Parameters) -> Gathered:
    """What Megatron-FSDP has whole: parameters at the loss; parameters and gradients when backward reaches the first layer.

    What lies outside layers stays gathered. The final norm's gather also fetches the layers from the first on, until they hold 500
    million elements, or one layer if that is larger; forward released them, and only their own backward does so again. Gradients wait
    whole for their reduction until they hold 1,000 million elements, or two layers.

    Source: `suggested_communication_unit_size` in `megatron_fsdp.py`, `all_gather_params` and `wait_for_previous_grad_reduce` in
    `param_and_grad_buffer.py`.
    """
    if not job.fsdp:
        return Gathered(0, 0)
    elements = found.elements(experts=False)
    norm = job.hidden_size * (1 if job.rms_norm else 2)
    root = norm + sum(one.elements for one in found.tensors if one.rule is Rule.VOCABULARY)
    layer = -(-(elements - root) // sum(count(letters, "*") for letters in job.chunks))
    layers = [one for one in found.tensors if one.rule is not Rule.VOCABULARY]
    each = sum(stored_bytes(job, one) for one in layers) / sum(one.elements for one in layers)  # 2 in 16 bits
    transposed = layer if job.low is not None and job.low.recipe.transposes else 0  # made for a layer's backward, and dropped
    if job.fsdp_double_buffer:
        buffers = int(2 * layer * each)
        return Gathered(2 * root + buffers, 2 * root + buffers + transposed + job.gradient_bytes * min(2 * layer, elements))
    ahead = -(-max(job.fsdp_unit // 2, layer) // layer) * layer
    waiting = min(max(job.fsdp_unit, 2 * layer) + layer, elements)
    gathered = int(each * min(ahead, elements - root))
    return Gathered(2 * root + gathered, 2 * root + int(each * layer) + transposed + job.gradient_bytes * waiting)


def gradient_copies_bytes(job: MegatronJob, found: Parameters) -> int:
    """fp32 copies of 16-bit gradients that the optimizer's step makes; the next step drops them before its first forward.

    Source: `_copy_model_grads_to_main_grads` and `zero_grad` of `megatron/core/optimizer/optimizer.py`.
    """
    if not job.persistent_grad_shard:
        return 0
    share, expert_share = _shares(job)
    return 4 * found.elements(experts=False) // share + 4 * found.elements(experts=True) // expert_share


def optimizer_state(job: MegatronJob, found: Parameters) -> State:
    """Under Muon a master and one momentum of each of its matrices, under Adam a master and two moments.

    Adam's distributed optimizer shards evenly. Muon's gives whole tensors, sorted by size, to data ranks there and back.
    """
    share, expert_share = _shares(job)
    if job.optimizer != "muon":
        found_bytes = []
        for matrix in (True, False):
            some = [(one, number) for one, number in found.counts.items() if one.rule.is_matrix is matrix]
            sizes = [
                (sum(number * one.elements for one, number in some if one.rule.is_expert is experts), ranks)
                for experts, ranks in ((False, share), (True, expert_share))
            ]
            found_bytes += [sum(each * elements // ranks for elements, ranks in sizes) for each in (job.master_bytes, 2 * job.moment_bytes)]
        return State(*found_bytes)
    kept = {True: 0, False: 0}
    for experts, ranks, index in ((False, share, job.data_index), (True, expert_share, job.expert_index)):
        dealt = dealt_elements(found, ranks, experts=experts)
        place = ranks - 1 if index is None else index
        matrices, others = dealt[place] if place < len(dealt) else (0, 0)
        kept[True] += matrices
        kept[False] += others
    master, moment = job.master_bytes, job.moment_bytes
    return State(master * kept[True], moment * kept[True], master * kept[False], 2 * moment * kept[False])


def dealt_elements(found: Parameters, ranks: int, *, experts: bool) -> list[tuple[int, int]]:
    """Elements of Muon's matrices and of all else that each data rank steps; ranks behind the last of the list step none."""
    key = ranks, experts, len(found.tensors)
    if key not in found._dealt:
        found._dealt[key] = _dealt_elements(found, ranks, experts=experts)
    return found._dealt[key]


def _dealt_elements(found: Parameters, ranks: int, *, experts: bool) -> list[tuple[int, int]]:
    tensors = sorted((one for one in found.tensors if one.rule.is_expert is experts), key=lambda one: one.elements)
    busy = min(ranks, len(tensors))
    matrices, others = [0] * busy, [0] * busy
    for place, one in enumerate(tensors):
        turn, step = divmod(place, ranks)
        rank = ranks - 1 - step if turn % 2 else step
        (matrices if one.rule.is_matrix else others)[rank] += one.elements
    return list(zip(matrices, others, strict=True))


def _shares(job: MegatronJob) -> tuple[int, int]:
    return (job.data_parallel, job.expert_data_parallel) if job.distributed_optimizer else (1, 1)


@lru_cache(maxsize=4096)
def _operator(job: MegatronJob, letter: str) -> Parameters:
    """Those of one operator; not to be added to."""
    (job, letter), found = job.of(letter), Parameters()
    found.norm(job, job.hidden_size)
    if letter == "*":
        if job.latent is not None:
            _latent(job, job.latent, found)
        else:
            _attention(job, found)
    elif letter == "-":
        _mlp(job, job.ffn_hidden_size // job.tp, found, bias=job.bias)
    elif letter == "M":
        _mamba(job, found)
    elif letter == "G":
        _delta(job, found)
    else:
        _experts(job, found)
    return found


def _attention(job: MegatronJob, found: Parameters) -> None:
    width = job.num_heads // job.tp * job.head_dim
    rows = (width * (2 if job.output_gate else 1)) + 2 * max(1, job.num_query_groups // job.tp) * job.head_dim
    found.linear(job, rows, job.hidden_size, (job.bias or job.qkv_bias) * rows)
    found.linear(job, job.hidden_size, width)
    found.add(job.bias * job.hidden_size, sharded=False)
    found.add(job.sinks * job.num_heads // job.tp)
    if job.qk_norm:
        found.norm(job, job.head_dim)
        found.norm(job, job.head_dim)


def _latent(job: MegatronJob, dims: LatentDims, found: Parameters) -> None:
    hidden, heads = job.hidden_size, job.num_heads // job.tp
    width = dims.qk_head_dim + dims.qk_pos_emb_head_dim
    if dims.q_lora_rank is None:
        found.linear(job, heads * width, hidden)
    else:
        found.linear(job, dims.q_lora_rank, hidden, sharded=False)
        found.linear(job, heads * width, dims.q_lora_rank)
        if dims.normed:
            found.norm(job, dims.q_lora_rank)
    found.linear(job, dims.kv_lora_rank + dims.qk_pos_emb_head_dim, hidden, sharded=False)
    found.linear(job, heads * (dims.qk_head_dim + dims.v_head_dim), dims.kv_lora_rank)
    if dims.normed:
        found.norm(job, dims.kv_lora_rank)
    found.linear(job, hidden, heads * dims.v_head_dim)
    found.add(job.bias * hidden, sharded=False)


def _mlp(job: MegatronJob, width: int, found: Parameters, *, bias: bool) -> None:
    rows = width * (2 if job.gated else 1)
    found.linear(job, rows, job.hidden_size, bias * rows)
    found.linear(job, job.hidden_size, width)
    found.add(bias * job.hidden_size, sharded=False)


def _mamba(job: MegatronJob, found: Parameters) -> None:
    dims = job.mamba
    if dims is None:
        raise ValueError("a pattern with M has no Mamba dimensions")
    channels = (dims.inner + 2 * dims.num_groups * dims.state_dim) // job.tp
    rows = channels + (dims.inner + dims.num_heads) // job.tp
    found.add(rows * job.hidden_size, low=(rows, job.hidden_size) if job.low is not None else None)  # in_proj, which Muon leaves to Adam
    found.add(channels * dims.conv_kernel)
    found.add(channels)
    for _ in range(3):  # A, D, and the time steps' bias
        found.add(dims.num_heads // job.tp)
    found.add(dims.inner // job.tp)
    found.linear(job, job.hidden_size, dims.inner // job.tp)


def _delta(job: MegatronJob, found: Parameters) -> None:
    """One projection to queries, keys, values, gate, and two numbers a head; a convolution without bias."""
    dims = job.delta
    if dims is None:
        raise ValueError("a pattern with G has no gated delta net")
    channels, heads = (2 * dims.keys + dims.values) // job.tp, dims.num_value_heads // job.tp
    found.linear(job, channels + dims.values // job.tp + 2 * heads, job.hidden_size)
    found.add(channels * dims.conv_kernel)
    found.add(heads)
    found.add(heads)
    found.add(dims.value_dim, sharded=False)
    found.linear(job, job.hidden_size, dims.values // job.tp)


def _experts(job: MegatronJob, found: Parameters) -> None:
    dims = job.moe
    if dims is None:
        raise ValueError("a pattern with E has no experts")
    width = dims.ffn_hidden_size // job.etp
    rows = width * (2 if job.gated else 1)
    found.add(dims.num_experts * job.hidden_size, Rule.MATRIX, sharded=False)
    outer = dims.latent or job.hidden_size
    if dims.latent is not None:
        found.linear(job, dims.latent, job.hidden_size, sharded=False)
        found.linear(job, job.hidden_size, dims.latent, sharded=False)
    first, second = ((rows, outer), (outer, width)) if job.low is not None else (None, None)
    for _ in range(dims.num_experts // job.ep):
        found.add(rows * outer, Rule.EXPERT_MATRIX, low=first)
        found.add(width * outer, Rule.EXPERT_MATRIX, low=second)
        found.add(job.bias * rows, Rule.EXPERT_OTHER)
        found.add(job.bias * outer, Rule.EXPERT_OTHER)
    found.shapes |= {(rows, outer), (outer, width)}
    if dims.shared_ffn_hidden_size:
        found.add(job.shared_gate * job.hidden_size, sharded=False)
        _mlp(job, dims.shared_ffn_hidden_size // job.tp, found, bias=False)
