"""Mamba-2's chunked scan: the products of chunks and states at a separate rate, and the bytes of its operands."""

from typing import Any

from megakernels.ops.ssd.facts import Ssd
from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger, Scan

CHUNK = 128
"""Positions of a chunk (NVIDIA/Megatron-LM, megatron/core/ssm/mamba_mixer.py)."""
STATE_BYTES = 8, 28
"""Bytes per element of the states at chunk starts that frameworks' kernels move in addition to ideal ones, forward and backward.

The kernels move 12 bytes in forward: a write in fp32, a read and a bf16 write by the pass from chunk to chunk, and a read. In backward they
move 34: the states and their gradients are computed in fp32, the pass reads both and writes bf16, and three kernels read these.

Source: state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py.
"""


def scan_seconds(flops: Any, moved: Any, rate: Any, bandwidth: Any) -> Any:
    """Seconds of a scan: F / R + B / W.

    Args:
        flops: F, FLOPs of the products of chunks: C Bᵀ, its product with x, the states and their outputs.
        moved: B, bytes of x, B, C, outputs and states.
        rate: R, reached FLOPs per second.
        bandwidth: W, reached bytes per second of memory.

    Source: arXiv:2405.21060, section 6, counting products of chunks.
    """
    return flops / rate + moved / bandwidth


def scan(ledger: Ledger, sizes: Ssd, seq_length: int, again: float) -> None:
    """Add forward and backward of the scan with the chunk size of the framework's kernels."""
    work, tokens = sizes._replace(chunk_size=CHUNK).work(seq_length), float(sizes.batch * sizes.positions)
    states = tokens / CHUNK * sizes.heads * sizes.width * sizes.state
    forward, moved = tokens * work.forward, tokens * work.moved_forward + STATE_BYTES[FORWARD] * states
    back = tokens * work.moved_input + STATE_BYTES[BACKWARD] * states
    ledger.scans.append(Scan(FORWARD, forward, moved))
    ledger.scans.append(Scan(BACKWARD, tokens * work.input_grad + again * forward, back + again * moved))
