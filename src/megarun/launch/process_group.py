"""How this process was started: alone, or by torchrun; its device, and the job's process group."""

from __future__ import annotations

import atexit
import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from megaplan.errors import MegaplanError
from megaplan.spec.models import Mesh
from megarun.errors import place, refusal

START_TIMEOUT_SECONDS = 60.0
JOIN_SECONDS = 2.0  # a store ends its own attempts a little after the limit
MOST_NAMED = 8
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
TORCHRUN_KEEPS_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True)
class Launch:
    """torchrun's variables, or one process.

    Attributes:
        rank: Global rank.
        world_size: Processes that were started.
        local_rank: Rank on this machine.
        store: The key-value store all processes share; it belongs to torchrun and outlives a failing rank.
        start_timeout: Seconds in which every other process must have started, and said what it trains.
    """

    rank: int
    world_size: int
    local_rank: int
    store: Store
    start_timeout: float = START_TIMEOUT_SECONDS

    @property
    def restarted(self) -> bool:
        """Whether torchrun has started the job's processes before (`--max-restarts`)."""
        return int(os.environ.get(RESTART_COUNT, "0")) > 0


class NeverMetError(MegaplanError):
    """Processes are missing, but those that came have a store.

    Attributes:
        launch: This process's.
    """

    def __init__(self, error: MegaplanError, launch: Launch) -> None:
        super().__init__(error.diagnostics)
        self.launch = launch


def read_launch(start_timeout: float = START_TIMEOUT_SECONDS, mesh: Mesh | None = None) -> Launch:
    """Join the store of torchrun, or rank 0's where processes were started by other means, and wait for every other process.

    Args:
        start_timeout: Seconds to wait; a process that never comes would otherwise be met in some collective, minutes later.
        mesh: The plan's, to name who is missing.

    Raises:
        MegaplanError: MP650 if a process, or the store, did not come; MP651 if rank 0 cannot have the store's port; MP652 if a variable
            of the launch is missing or no number.
    """
    if "WORLD_SIZE" not in os.environ:
        return Launch(0, 1, 0, dist.HashStore())  # type: ignore[attr-defined]
    rank, world_size, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    known = mesh if mesh is not None and mesh.world_size == world_size else None
    limit = timedelta(seconds=start_timeout)
    # a restarted job meets the same store: addresses and errors of the processes before would still be in it
    store = PrefixStore(f"attempt {os.environ.get(RESTART_COUNT, '0')}", _join(place(rank, known), rank == 0, port, limit))
    launch = Launch(rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), store, start_timeout)
    keys = [f"megarun/here/{index}" for index in range(world_size)]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, limit)
    except RuntimeError:  # what the store raises when the wait times out
        missing = [place(index, known) for index, key in enumerate(keys) if not store.check([key])]
        detail = f"{len(missing)} of {world_size} processes did not start within {start_timeout:g} s: {', '.join(missing[:MOST_NAMED])}"
        raise NeverMetError(refusal("MP650", detail + (" …" if len(missing) > MOST_NAMED else "")), launch) from None
    return launch


def _number(name: str) -> int:
    given = os.environ.get(name, "")
    if not given.isdecimal():
        raise refusal("MP652", f"{name} = {given}" if given else f"{name} is not set, WORLD_SIZE is")
    return int(given)


def _join(who: str, first: bool, port: int, limit: timedelta) -> Store:
    """The job's key-value store: torchrun's own, else rank 0 has it."""
    host = os.environ.get("MASTER_ADDR", "")
    if not host:
        raise refusal("MP652", "MASTER_ADDR is not set, WORLD_SIZE is")
    torchruns = os.environ.get(TORCHRUN_KEEPS_STORE) == str(True)
    serves = first and not torchruns
    joined: Future[Store] = Future()

    def join() -> None:
        try:
            # does not wait for workers: missing ranks show in the store
            joined.set_result(TCPStore(host, port, is_master=serves, timeout=limit, wait_for_workers=False, multi_tenant=True))
        except Exception as error:
            joined.set_exception(error)

    # in a thread: TCPStore can block forever if another program owns the port
    threading.Thread(target=join, name="store", daemon=True).start()
    try:
        return joined.result(limit.total_seconds() + JOIN_SECONDS)
    except (dist.DistError, RuntimeError, OSError) as error:
        reason = (str(error).strip().splitlines() or ["what listens there does not answer"])[0]
        if serves:
            code, detail = "MP651", f"{who} keeps the store that all processes meet in, and cannot listen at {host}:{port}"
        else:
            keeper = "torchrun's store does not answer" if torchruns else "rank 0 did not start, or another program has its port"
            code, detail = "MP650", f"{who}: nobody to meet at {host}:{port} within {limit.total_seconds():g} s: {keeper}"
        raise refusal(code, f"{detail}\n{reason}") from None


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
    # a group that Python still holds in a cycle keeps gloo's threads, and one that returns to Python while it shuts down aborts the process
    # (pytorch/pytorch#190489): collected before that, its threads are joined
    atexit.register(gc.collect)
    backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=launch.store, rank=launch.rank, world_size=launch.world_size, device_id=bound)
    try:
        yield
    except BaseException:
        if launch.world_size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
