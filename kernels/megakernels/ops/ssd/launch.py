"""Launch options of the scan's kernels, and the arguments that they share."""

from typing import Any

import torch
from torch import Tensor

from megakernels._common.tuning import with_options
from megakernels.facts import block_of
from megakernels.ops.ssd.facts import SSD_HEADS_PER_TABLE
from megakernels.ops.ssd.inputs import SsdInputs

OPTIONS = {
    "table": {"num_warps": 4},
    "chunk": {"num_warps": 4, "num_stages": 2},
    "pass": {"num_warps": 4},
    "output": {"num_warps": 4, "num_stages": 1},
    "state": {"num_warps": 4, "num_stages": 2},
    "pair": {"num_warps": 4, "num_stages": 1},
    "value": {"num_warps": 4, "num_stages": 2},
    "edge of C": {"num_warps": 4, "num_stages": 2},
    "edge of B": {"num_warps": 4, "num_stages": 1},
    "group": {"num_warps": 4, "num_stages": 2},
    "step": {"num_warps": 4},
}
"""Default launch options of each kernel. A tile has 64 positions, a warp group's rows of a product: more warps would repeat work.

The docstring of `ssd_edge_kernel` says why its two forms differ.
"""
FIXED = "edge of B"
"""The launch whose options no measurement changes."""


def launched(key: str, x: Tensor, **constants: Any) -> dict[str, Any]:
    """Compile-time constants of a launch, with its options on the device of x."""
    if key == FIXED:
        return {**constants, **OPTIONS[key]}
    return with_options(f"ssd_{key.partition(' ')[0]}_kernel", OPTIONS[key], constants, x.device)


def heads_of_table(num_heads: int) -> int:
    """A power of two."""
    return min(SSD_HEADS_PER_TABLE, block_of(num_heads))


def counts_of(scan: SsdInputs) -> tuple[int, ...]:
    """Heads, heads of a group, positions of all sequences and heads, and the widths of a head and of a state."""
    num_heads, width = scan.x.shape[2:]
    num_groups, state_width = scan.B.shape[2:]
    return num_heads, num_heads // num_groups, scan.x.shape[0] * scan.x.shape[1] * num_heads, width, state_width


def flags_of(scan: SsdInputs) -> dict[str, bool]:
    """Constants of the kernels over tiles."""
    return {"HAS_STARTS": scan.starts is not None, "PRECISE": scan.x.dtype == torch.float32}
