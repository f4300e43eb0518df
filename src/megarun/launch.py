"""How this process was started: alone, or by torchrun; its device, and the job's process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from megarun.errors import refusal


@dataclass(frozen=True, slots=True)
class Launch:
    """torchrun's variables, or one process.

    Attributes:
        rank: Global rank.
        world_size: Processes that were started.
        local_rank: Rank on this machine.
        store: The key-value store all processes share; it belongs to torchrun and outlives a failing rank.
    """

    rank: int
    world_size: int
    local_rank: int
    store: Store


def read_launch() -> Launch:
    """Join the store of torchrun where there is one."""
    if "WORLD_SIZE" not in os.environ:
        return Launch(0, 1, 0, dist.HashStore())  # type: ignore[attr-defined]
    store, rank, world_size = next(rendezvous("env://"))
    return Launch(rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), store)


def choose_device(launch: Launch) -> torch.device:
    """This process's GPU where CUDA is there, else the CPU.

    Raises:
        MegaplanError: MP604 if there are fewer GPUs than processes on this machine.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if launch.local_rank >= count:
        raise refusal("MP604", f"rank {launch.rank}: LOCAL_RANK = {launch.local_rank}, devices = {count}")
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(launch: Launch, device: torch.device) -> Iterator[None]:
    """The default process group: NCCL on CUDA, gloo on CPU, also for one process.

    Of several, a failing process leaves it standing: to take it down would wait for ranks that wait for this one.
    """
    backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=launch.store, rank=launch.rank, world_size=launch.world_size, device_id=bound)
    try:
        yield
    except BaseException:
        if launch.world_size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
