"""Mamba-2's chunked scan: products of chunks and states at a rate of its own, and bytes of its operands."""

from __future__ import annotations

from typing import Any

from megakernels.ops.ssd.facts import Ssd
from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger, Scan

CHUNK = 128
"""Positions of a chunk (NVIDIA/Megatron-LM, megatron/core/ssm/mamba_mixer.py)."""
STATE_BYTES = 8, 28
"""Bytes of an element of the states at chunk starts that frameworks' kernels move more than ideal ones, forward and backward.

Forward 12: written in fp32, read and written in bf16 as they pass from chunk to chunk, and read. Backward 34: made again in fp32, their
gradients made in fp32, both read as gradients pass, written in bf16, and read by three kernels.

Source: state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py.
"""


def scan_seconds(flops: Any, moved: Any, rate: Any, bandwidth: Any) -> Any:
    """Seconds of a scan: F / R + B / W.

    Args:
        flops: F, of a chunk's products: C Bᵀ, its product with x, states and their outputs.
        moved: B, bytes of x, B, C, outputs and states.
        rate: R, reached FLOPs per second.
        bandwidth: W, reached bytes per second of memory.

    Source: arXiv:2405.21060, section 6, counting products of chunks.
    """
    return flops / rate + moved / bandwidth


def scan(ledger: Ledger, sizes: Ssd, seq_length: int, again: float) -> None:
    """The scan in chunks of the framework's kernels, forward and backward."""
    work, tokens = sizes._replace(chunk_size=CHUNK).work(seq_length), float(sizes.batch * sizes.positions)
    states = tokens / CHUNK * sizes.heads * sizes.width * sizes.state
    forward, moved = tokens * work.forward, tokens * work.moved_forward + STATE_BYTES[FORWARD] * states
    back = tokens * work.moved_input + STATE_BYTES[BACKWARD] * states
    ledger.scans.append(Scan(FORWARD, forward, moved))
    ledger.scans.append(Scan(BACKWARD, tokens * work.input_grad + again * forward, back + again * moved))
