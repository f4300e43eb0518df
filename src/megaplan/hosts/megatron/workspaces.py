"""Workspaces of GEMM libraries, by device: what one of torch's cuBLAS handles takes, and Transformer Engine's; HybridEP's buffers."""

from __future__ import annotations

import re

from megaplan.hosts.megatron.experts import dispatcher
from megaplan.hosts.megatron.setting import Setting

KIB = 2**10
LARGE_KIB, SMALL_KIB = 32_768, 8_320
"""Workspace of a handle if `CUBLAS_WORKSPACE_CONFIG` is not set: 32 MiB, or two buffers of 4,096 KiB and eight of 16."""
BLACKWELL_LARGE = "2026-05"
"""The month of NVIDIA's first image whose torch gives Blackwell what it gives Hopper. Earlier ones give it what Ampere has."""
_MAJOR = {"a100": 8, "h100": 9, "h200": 9, "b200": 10, "gb200": 10, "b300": 10, "gb300": 10}


def cublas_bytes(device: str, setting: str | None = None, month: str | None = None) -> int:
    """Bytes of one handle; the forward thread and autograd's thread have one each.

    Source: `parseChosenWorkspaceSize` of `aten/src/ATen/cuda/CublasHandlePool.cpp`, before and after it names Blackwell beside Hopper.

    Args:
        device: Name of the device, such as `gb200`.
        setting: `CUBLAS_WORKSPACE_CONFIG`; None where it is not set.
        month: Month of the image that runs, as `2026-05`; None for a new one.
    """
    if setting is not None:
        return setting_bytes(setting)
    major = _major(device)
    large = major == _MAJOR["h100"] or (major > _MAJOR["h100"] and (month is None or month >= BLACKWELL_LARGE))
    return KIB * (LARGE_KIB if large else SMALL_KIB)


def setting_bytes(setting: str) -> int:
    """Bytes of a `CUBLAS_WORKSPACE_CONFIG`: `:4096:2:16:8` is two buffers of 4,096 KiB and eight of 16."""
    return KIB * sum(int(size) * int(count) for size, count in re.findall(r":(\d+):(\d+)", setting))


def engine_bytes(device: str) -> int:
    """Bytes of Transformer Engine's workspace: 32 MiB from Hopper on, 4 MiB before."""
    return (32 if _major(device) >= _MAJOR["h100"] else 4) * KIB * KIB


def hybrid_ep_bytes(at: Setting, domain: int) -> int:
    """Bytes that HybridEP takes from the driver, outside torch's allocator, on each rank; 0 under another dispatcher.

    Rows of all tokens of the ranks that share the experts, with a score for each expert of the NVLink domain and a scale for 128 channels:
    one buffer for dispatch and combine within a domain, two beyond. Between domains there are three more of this rank's tokens for each
    other domain.

    Args:
        at: Sizes of a rank.
        domain: Devices that NVLink joins.

    Source: `NVLCoordinator` in `csrc/hybrid_ep/buffer/intranode.cu` and `HybridEpBuffer` in `csrc/hybrid_ep/hybrid_ep.cu` of DeepEP.
    """
    moe = at.spec.model.moe
    if moe is None or dispatcher(at.spec) != "hybridep":
        return 0
    ranks = at.dims.ep * at.dims.etp
    local = min(ranks, domain)
    nodes = -(-ranks // local)
    width = moe.row_width(at.dims.hidden)
    row = 2 * width + 4 * (moe.num_experts // at.dims.ep) * local
    scales = 4 * (width // 128)
    return at.stream_tokens * (ranks * (row * min(nodes, 2) + scales) + 3 * (nodes - 1) * row)


def _major(device: str) -> int:
    """The major number of a device's compute capability; of one that is not listed the newest."""
    return _MAJOR.get(device.partition("-")[0], max(_MAJOR.values()))
