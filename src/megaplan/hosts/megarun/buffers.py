"""Memory outside blocks: rotary tables, sums of a step, its token ids, labels and document starts, and tensors between pipeline stages."""

from __future__ import annotations

from megaplan.blocks.dims import Dims
from megaplan.dtypes import DType
from megaplan.families.registry import families_of
from megaplan.inventory.tensors import Outside
from megaplan.spec.depths import depth_blocks
from megaplan.spec.models import GroupedQueryAttention, Spec
from megaplan.spec.step_graphs import replays_graphs


def boundary_bytes(dims: Dims) -> int:
    """One microbatch's residual stream on a rank: a receive buffer, a stage's output, or the gradient that is being sent.

    torch allocates one receive buffer per microbatch when the first step starts, for activations and for gradients, and keeps them for the
    whole run. A stage keeps its output until the microbatch's backward has ended.

    Source: torch/distributed/pipelining/stage.py (`_prepare_forward_infra`, `fwd_cache`).
    """
    batch, tokens, hidden = dims.residual
    return batch * tokens * hidden * dims.dtype.bytes


def rotary_bytes(spec: Spec) -> int:
    """Cos and sin of one slot with attention, fp32 [T, ⌈R / 2⌉] each (R-11); T is the number of positions of a CP rank.

    Twice that if layers with a window have another base.
    """
    attention = spec.model.attention
    tables = 2 if isinstance(attention, GroupedQueryAttention) and attention.window_rope_theta is not None else 1
    return tables * 2 * (spec.batch.seq_length // spec.mesh.cp) * _frequencies(spec) * DType.FP32.bytes


def rotary_scratch_bytes(spec: Spec) -> int:
    """Scratch while a table is computed: angles and sines in fp64 [T, ⌈R / 2⌉], and the frequencies."""
    return _frequencies(spec) * (2 * (spec.batch.seq_length // spec.mesh.cp) + 1) * FP64_BYTES


def _frequencies(spec: Spec) -> int:
    """⌈R / 2⌉: an odd width, which no layer rotates, has a table too."""
    widths = (family.rotary(section) for family, section in families_of(spec.model) if family.rotary is not None)
    return sum(-(-width // 2) for width in widths)


FP64_BYTES = 8
"""Bytes of an fp64 value, the dtype of angles while computed and of a step's sums, which no tensor of a spec has."""


def step_sum_bytes(spec: Spec) -> dict[str, int]:
    """Bytes of each family's sums over the microbatches of a step; families without such sums are absent.

    A relation bias adds, in fp32, the parts of its table's gradient from the layers of a stage.
    """
    sums = {family.letter: family.step_sums(section) * FP64_BYTES for family, section in families_of(spec.model)}
    relation, attention = spec.model.features.relation_bias, spec.model.attention
    if spec.model.features.mtp is not None:
        sums[Outside.MTP] = sum(block.family.step_sums(block.section) for block in depth_blocks(spec.model)) * FP64_BYTES
    if relation is not None and attention is not None:
        sums[Outside.RELATION_BIAS] = relation.num_relations * (attention.num_heads // spec.mesh.tp) * DType.FP32.bytes
    return {letter: num_bytes for letter, num_bytes in sums.items() if num_bytes}


def token_bytes(spec: Spec) -> int:
    """Token ids, or labels, of all microbatches of an optimizer step: int64, held from before the step to its end.

    A TP rank has those of its own tokens; under `vocab_parallel` of all tokens, because every rank looks all of them up.
    """
    return _rows(spec) * _positions(spec) * DType.INT64.bytes


def input_bytes(spec: Spec) -> int:
    """Inputs of the first slot, in the same way: ids, for n-grams the ids before each token, one byte each for a class and a platform."""
    return token_bytes(spec) + _side_bytes(spec)


def label_bytes(spec: Spec) -> int:
    """Inputs of the last slot, in the same way: labels, also of each depth of multi-token prediction, and inputs of its side embeddings."""
    mtp = spec.model.features.mtp
    if mtp is None:
        return token_bytes(spec)
    return token_bytes(spec) * (1 + mtp.depth) + (_side_bytes(spec) * mtp.depth if mtp.side_embeddings else 0)


def _side_bytes(spec: Spec) -> int:
    features = spec.model.features
    ngram, num_categories = features.ngram, sum(each is not None for each in (features.structure, features.platform))
    own = spec.batch.seq_length // (spec.mesh.cp * spec.mesh.tp)
    before = 0 if ngram is None else (ngram.max_order - 1) * own * DType.INT64.bytes
    return _rows(spec) * (before + num_categories * own)


def every_stage_bytes(spec: Spec) -> int:
    """Inputs of every rank, for all microbatches of a step.

    Document starts of packed rows are int32 for each position of the rank's CP pieces; a relation bias needs one byte, the class, for each
    position of the sequence.
    """
    starts = 0 if spec.data.packing == "none" else (spec.batch.seq_length // spec.mesh.cp) * DType.INT32.bytes
    classes = 0 if spec.model.features.relation_bias is None else spec.batch.seq_length
    return _rows(spec) * (starts + classes)


def _positions(spec: Spec) -> int:
    mesh = spec.mesh
    return spec.batch.seq_length // (mesh.cp if mesh.vocab_parallel else mesh.cp * mesh.tp)


def _rows(spec: Spec) -> int:
    return spec.schedule.microbatches_per_update * spec.batch.micro_batch_size


def graph_bytes(spec: Spec) -> int:
    """Tensors that CUDA graphs of a microbatch have in addition to those of eager steps: its inputs, and the sum of the losses, fp64.

    With packed rows also the number by which the loss is divided, fp32. 0 where steps are eager.
    """
    if not replays_graphs(spec):
        return 0
    inputs = (input_bytes(spec) + label_bytes(spec) + every_stage_bytes(spec)) // spec.schedule.microbatches_per_update
    return inputs + FP64_BYTES + (DType.FP32.bytes if spec.data.packing == "documents" else 0)


def further_loss_bytes(spec: Spec) -> int:
    """The last slot's loss of further tokens, summed over the microbatches of a step."""
    return 0 if spec.model.features.mtp is None else FP64_BYTES
