"""Elementwise operations of modules that torch runs one by one: copies of heads, rotations and biases, by the bytes that each moves.

Their time is bytes over memory bandwidth, without a correction factor.
"""

from typing import NamedTuple

from megakernels.ops.attention.facts import AttentionSizes
from megakernels.ops.rope.facts import ROPE
from megaplan.blocks.work import OpWork, Works
from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger
from megaplan.cost.step.workload import TimedStep

COPY = 4.0
"""Bytes per copied 16-bit element: one read, one write."""
ROTATED = 20.0, 30.0
"""Bytes of a rotated element, forward and backward: two products, the negated half, its concatenation and a sum; slices in backward."""
JOINED = 4.0, 14.0
"""Bytes of an element of heads of which a part is rotated: both parts are concatenated; backward adds the gradients of two slices."""
SEPARATE_BIAS, SEPARATE_DROPOUT = 4.0, 5.0
"""Bytes per element of the residual stream that a bias and a dropout move as separate operations; a mask has one byte."""
LOGIT = 38.0, 14.0
"""Bytes of a logit in a loss of torch's operations in fp32, forward and backward: cast, maximum, difference, exponential, sum, quotient."""
KIND = "copied"


class Modules(NamedTuple):
    """The way in which modules write attention's heads and a block's output.

    Attributes:
        packs: Queries, keys and values are concatenated before FlashAttention.
        rotates: Rotations are torch's operations, not one kernel.
        separate_bias: Bias, dropout and the sum with the residual stream are separate operations.
        separate_norms: A block that runs parallel to the previous one has its own norm.
        separate_gradients: Tensor ranks reduce the gradient of such a block's input by itself.
    """

    packs: bool = False
    rotates: bool = False
    separate_bias: bool = False
    separate_norms: bool = False
    separate_gradients: bool = False


MODULES = {"megatron": Modules(), "gpt-neox": Modules(*[True] * 5)}
"""Megatron-LM's, `ParallelAttention` and `bias_dropout_add` of megatron/model/transformer.py in 2022 and 2023; GPT-NeoX's,
`ParallelSelfAttention` and `ParallelTransformerLayer` of the same file in EleutherAI/gpt-neox at 8dc25da9."""


def modules_of(work: TimedStep) -> Modules | None:
    """The modules of a step's software; None if a fitted factor includes their bytes."""
    name, fused = work.software.modules, work.software.fused_rotation
    if name is None:
        return None
    return MODULES[name] if fused is None else MODULES[name]._replace(rotates=not fused)


def rotates(work: TimedStep) -> bool:
    """True if rotations are counted here, not as one kernel."""
    modules = modules_of(work)
    return modules is not None and modules.rotates


def heads(ledger: Ledger, work: TimedStep, ops: Works, again: float) -> None:
    """Add the bytes that modules move for a rank's heads in addition to products and core; backward runs the forward `again` times."""
    modules = modules_of(work)
    core = next((op.facts for op in ops if isinstance(op.facts, AttentionSizes)), None)
    if modules is None or core is None:
        return
    forward, backward = copied(core, flash=not work.software.unfused_attention, packs=modules.packs)
    turned = next((op for op in ops if op.facts is ROPE), None)
    if turned is not None and modules.rotates:
        share, more = _rotating(work), _rotation(turned, (core.heads + core.groups) * core.width)
        forward, backward = forward + share * more[0], backward + share * more[1]
    tokens = core.batch * core.queries
    ledger.move(FORWARD, tokens * forward, KIND)
    ledger.move(BACKWARD, tokens * (backward + again * forward), KIND)


def copied(core: AttentionSizes, *, flash: bool, packs: bool) -> tuple[float, float]:
    """Bytes of a token that copies of heads move, forward and backward.

    Megatron's layout has positions first; FlashAttention needs the sequence dim first, so that its inputs and output are copied.
    Query heads that share a key head get copies of it. Backward joins the gradients of the three.
    """
    query, keys, made = core.heads * core.width, core.groups * (core.width + core.value_width), core.heads * core.value_width
    shared = core.heads > core.groups
    read = (query + made + keys) / 2 if shared else keys  # a shared key head is read once, and each of its copies is written
    before = query + read if flash else read * shared
    packed = query + (query + made if shared else keys) if flash and packs else 0
    return COPY * (made + before + packed), COPY * (made * flash + query + keys + read * shared)


def _rotating(work: TimedStep) -> float:
    """Share of the layers of attention that rotate."""
    attention, count = work.spec.model.attention, sum(block.family == "A" for block in work.inventory.layers)
    return 1 - len(attention.nope_layers) / count if attention is not None and count else 1.0


def _rotation(op: OpWork, width: float) -> tuple[float, float]:
    """Bytes per token of rotations with torch's operations, forward and backward; `width` is that of all query and key heads together."""
    turned = op.work.moved_forward / COPY
    joined = width if 0 < turned < width else 0.0
    return ROTATED[0] * turned + JOINED[0] * joined, ROTATED[1] * turned + JOINED[1] * joined


def loss(ledger: Ledger, work: TimedStep, logits: float) -> bool:
    """Add a loss of this many logits that torch runs in fp32, operation by operation; returns False if the software has another loss.

    Source: `_VocabParallelCrossEntropy` of megatron/core/tensor_parallel/cross_entropy.py in NVIDIA/Megatron-LM, and the cast before it.
    """
    if modules_of(work) is None or work.software.fused_loss:
        return False
    for run in (FORWARD, BACKWARD):
        ledger.move(run, LOGIT[run] * logits, KIND)
    return True


def stream(ledger: Ledger, work: TimedStep, letter: str, again: float) -> None:
    """Add bias and dropout of a block's output if they are separate operations."""
    modules, model = modules_of(work), work.spec.model
    if modules is None or not modules.separate_bias:
        return
    section = {"A": ("attention", "output_bias"), "D": ("mlp", "bias")}.get(letter, ("", ""))
    biased = bool(getattr(getattr(model, section[0], None), section[1], False))
    tokens = work.tokens / (work.mesh.tp if work.software.sequence_parallel else 1)
    moved, dropped = tokens * model.hidden_size, SEPARATE_DROPOUT * (work.spec.host.hidden_dropout > 0)
    forward = SEPARATE_BIAS * biased + dropped
    ledger.move(FORWARD, moved * forward, KIND)
    ledger.move(BACKWARD, moved * (dropped + again * forward), KIND)
