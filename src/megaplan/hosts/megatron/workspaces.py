"""Memory of libraries: workspaces of cuBLAS and Transformer Engine by device, and the buffers of HybridEP and NCCL's all-to-all."""

import re
from math import ceil

from megaplan.devices import Device
from megaplan.hosts.megatron.experts import dispatcher
from megaplan.hosts.megatron.setting import Setting

KIB = 2**10
SMALL_KIB = 8_320
"""Workspace of a handle if `CUBLAS_WORKSPACE_CONFIG` is not set, without Hopper's 32 MiB: two buffers of 4,096 KiB and eight of 16.

Source: `parseChosenWorkspaceSize` of `aten/src/ATen/cuda/CublasHandlePool.cpp`, before and after it names Blackwell and Hopper.
"""
BLACKWELL_LARGE = "2026-05"
"""The month of NVIDIA's first image whose torch gives Blackwell Hopper's size. Earlier releases give it Ampere's size."""
CONNECTION_BYTES = 12 * KIB * KIB
"""A channel between two ranks has these on each: a receive buffer and a send buffer."""
MOST_CHANNELS, PEERS_A_ROUND = 32, 8
LINK_BYTES_PER_SECOND, NETWORK_CHANNEL_BYTES_PER_SECOND = 25 * 10**9, 14 * 10**9
"""Bandwidth of an NVLink in one direction, and the most that NCCL lets one channel of a network carry."""
_NVIDIA = frozenset({"ampere", "hopper", "blackwell"})
_MAJOR = {"a100": 8, "h100": 9, "h200": 9, "b200": 10, "gb200": 10, "b300": 10, "gb300": 10}


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


def all_to_all_bytes(at: Setting, device: Device) -> int:
    """Bytes that NCCL takes from the driver for the experts' all-to-all over NVLink; 0 under another dispatcher.

    The first all-to-all connects a rank with all peers of its experts, on their own channels. A connection has a send buffer of 2 MiB,
    and a receive buffer of 10 MiB: for NCCL's three protocols 4 MiB, 4.7 MiB and 512 KiB, in pages of 2 MiB. Peers that are reached
    over a network share buffers, which are in the device's own item of NCCL.

    Channels to a peer are two for each of a device's links, at most 32. If experts span several NVLink domains, it is the number that a
    network adapter needs, halved until all peers' channels of a round are at most 32.

    Source: `p2pSendSetup` and `p2pRecvSetup` of `src/transport/p2p.cc`, `ncclTopoGetNchannels` and `ncclTopoComputeP2pChannels` of
    `src/graph/paths.cc`, NCCL 2.30. Published: 23.6 GiB with 64 ranks in one domain (Megatron-LM, issue 6392), allocations of 10 and of
    2 MiB on 32 channels to each of 7 peers (nccl, issue 1685).
    """
    dims, domain = at.dims, device.domain.value
    if at.spec.model.moe is None or dispatcher(at.spec) != "alltoall" or device.generation not in _NVIDIA:
        return 0
    near = min(dims.ep * dims.etp, domain) // dims.etp
    if near == dims.ep:
        channels = _power_of_two(2 * max(1, device.node_bandwidth.value // LINK_BYTES_PER_SECOND))
    else:
        channels = _power_of_two(max(1, ceil(device.network_bandwidth.value / NETWORK_CHANNEL_BYTES_PER_SECOND)))
        while channels > 1 and channels * ceil(dims.ep / PEERS_A_ROUND) > MOST_CHANNELS:
            channels //= 2
    return (near - 1) * min(channels, MOST_CHANNELS) * CONNECTION_BYTES


def _power_of_two(number: int) -> int:
    """The smallest power of two of at least a number."""
    return 1 << (number - 1).bit_length()


def _major(device: str) -> int:
    """The major number of a device's compute capability; of one that is not listed the newest."""
    return _MAJOR.get(device.partition("-")[0], max(_MAJOR.values()))
