"""How this process was started: alone, or by torchrun; its device, and the job's process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megaplan.spec.models import Mesh
from megarun.errors import place, refusal

START_TIMEOUT_SECONDS = 60.0
MOST_NAMED = 8
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"


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

    @property
    def restarted(self) -> bool:
        """Whether torchrun has started the job's processes before (`--max-restarts`)."""
        return int(os.environ.get(RESTART_COUNT, "0")) > 0


def read_launch(start_timeout: float = START_TIMEOUT_SECONDS, mesh: Mesh | None = None) -> Launch:
    """Join the store of torchrun where there is one, and wait for every other process.

    Args:
        start_timeout: Seconds to wait; a process that never comes would otherwise be met in some collective, minutes later.
        mesh: The plan's, to name who is missing.

    Raises:
        MegaplanError: MP650 if a process, or the store, did not come.
    """
    if "WORLD_SIZE" not in os.environ:
        return Launch(0, 1, 0, dist.HashStore())  # type: ignore[attr-defined]
    limit = timedelta(seconds=start_timeout)
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=limit))
    except (dist.DistError, RuntimeError, OSError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        reason = str(error).strip().splitlines()[0]
        raise refusal("MP650", f"rank {os.environ.get('RANK', '?')}: no store at {where} with every rank: {reason}") from None
    # a restarted job meets the same store: addresses and errors of the processes before would still be in it
    store = PrefixStore(f"attempt {os.environ.get(RESTART_COUNT, '0')}", store)
    keys = [f"megarun/here/{index}" for index in range(world_size)]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, limit)
    except RuntimeError:  # what the store raises when the wait times out
        known = mesh if mesh is not None and mesh.world_size == world_size else None
        missing = [place(index, known) for index, key in enumerate(keys) if not store.check([key])]
        detail = f"{len(missing)} of {world_size} processes did not start within {start_timeout:g} s: {', '.join(missing[:MOST_NAMED])}"
        raise refusal("MP650", detail + (" …" if len(missing) > MOST_NAMED else "")) from None
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
