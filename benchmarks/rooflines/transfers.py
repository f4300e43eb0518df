"""Kind, payload and group of a collective."""

import sys
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from rooflines.aten import tensor_bytes, tensors_of
from rooflines.work import Transfer

NAMESPACES = ("c10d", "_c10d_functional")
KINDS = {
    "_allgather_base_": "gather",
    "allgather_": "gather",
    "allgather_into_tensor_coalesced_": "gather",
    "all_gather_into_tensor": "gather",
    "all_gather_into_tensor_out": "gather",
    "_reduce_scatter_base_": "gather",
    "reduce_scatter_": "gather",
    "reduce_scatter_tensor": "gather",
    "allreduce_": "reduce",
    "all_reduce": "reduce",
    "all_reduce_": "reduce",
    "broadcast_": "gather",
    "broadcast": "gather",
    "alltoall_base_": "exchange",
    "alltoall_": "exchange",
    "all_to_all_single": "exchange",
    "send": "send",
}
"""Kind of each collective; messages are counted at the sender."""
NOTHING = ("recv_", "recv_any_source_", "wait_tensor", "barrier", "monitored_barrier_")
OVERLAPPED_BY = "/torch/distributed/fsdp/"
"""Callers whose collectives run on their own streams (FSDP2); all other collectives block the computation."""


def transfer_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Transfer | None:
    """The transfer of a dispatched collective; None if it sends nothing.

    Raises:
        ValueError: The collective is unknown.
    """
    name = func._opname
    if name in NOTHING:
        return None
    if name not in KINDS:
        raise ValueError(f"{func}: unknown collective; add it to KINDS in benchmarks/rooflines/transfers.py")
    ranks = dist.get_process_group_ranks(_group((*args, *kwargs.values())))
    kind, sizes = KINDS[name], [tensor_bytes(each) for each in tensors_of((args, kwargs))]
    if kind == "gather" and func.namespace == "_c10d_functional":
        payload = sizes[0] if name.startswith("reduce") else sizes[0] * len(ranks)
    else:
        payload = max(sizes, default=0)  # the larger of input and output
    return Transfer(
        f"{func.namespace}.{name}", kind, payload, len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1, _called_by(OVERLAPPED_BY)
    )


def _group(values: tuple[Any, ...]) -> dist.ProcessGroup:
    for value in values:
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, str):
            try:
                return _resolve_process_group(value)
            except (LookupError, ValueError, RuntimeError):
                continue  # name of a reduction
        if "ScriptObject" in type(value).__name__:
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:
                continue  # a reduction
    raise ValueError("a collective without a process group")


def _called_by(part: str) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if part in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
