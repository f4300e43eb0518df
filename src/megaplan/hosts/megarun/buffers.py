"""What lives beside parameters and activations: rotary tables and the step's token ids and labels."""

from __future__ import annotations

from megaplan.dtypes import DType
from megaplan.spec.models import LatentAttention, Spec


def rotary_bytes(spec: Spec) -> int:
    """Cos and sin of one slot that attends, fp32 [T, R / 2] each (R-11); T is the whole sequence, whatever cp."""
    attention = spec.model.attention
    if attention is None:
        return 0
    width = attention.qk_rope_head_dim if isinstance(attention, LatentAttention) else attention.head_dim
    return 2 * spec.batch.seq_length * (width // 2) * DType.FP32.bytes


def token_bytes(spec: Spec) -> int:
    """Token ids, or labels, of all microbatches of a step: int64, held from before the step to its end."""
    batch = spec.batch
    return spec.schedule.num_microbatches * batch.micro_batch_size * (batch.seq_length // spec.mesh.cp) * DType.INT64.bytes
