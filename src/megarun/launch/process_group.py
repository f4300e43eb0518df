"""The launch of this process (alone or by torchrun), its device, and the job's process group."""

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
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_timeout, _set_pg_timeout

from megaplan.errors import MegaplanError
from megaplan.spec.models import Mesh
from megaplan.terminal.output import note
from megarun.errors import place, refusal
from megarun.launch.address import choose_interface, here, reachable_host
from megarun.launch.process import CONNECTION_LOST
from megarun.launch.session import here_keys, session_name, wait_for

START_TIMEOUT_SECONDS = 60.0
FLIGHT_RECORDER_ENTRIES = "2000"
RESOLVE_SECONDS = 20.0
CONNECT_FACTOR = 2.0
"""Factor of `--start-timeout` within which the ranks must have connected to each other."""
JOIN_SECONDS = 2.0  # the store's own attempts end slightly after the limit
MOST_NAMED = 8
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
TORCHRUN_KEEPS_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch variables of torchrun, or a single process.

    Attributes:
        rank: Global rank.
        world_size: Number of processes.
        local_rank: Rank on this machine.
        store: Key-value store that all processes share; under torchrun it outlives a failing rank.
        start_timeout: Time in seconds in which every other process must start and publish its settings.
    """

    rank: int
    world_size: int
    local_rank: int
    store: Store
    start_timeout: float = START_TIMEOUT_SECONDS

    @property
    def restarted(self) -> bool:
        """True if torchrun has restarted the job's processes (`--max-restarts`)."""
        return os.environ.get(RESTART_COUNT, "0").strip("0") != ""


class MissingProcessError(MegaplanError):
    """Processes are missing; the others share a store.

    Attributes:
        launch: Launch of this process.
    """

    def __init__(self, error: MegaplanError, launch: Launch) -> None:
        super().__init__(error.diagnostics)
        self.launch = launch


def read_launch(start_timeout: float = START_TIMEOUT_SECONDS, mesh: Mesh | None = None, *, elastic: bool = False) -> Launch:
    """Join torchrun's store, or rank 0's if the processes were started by other means, and wait for every other process.

    Args:
        start_timeout: Time to wait in seconds; otherwise a missing process would only show as a collective timeout minutes later.
        mesh: Mesh of the plan, for the coordinates of missing ranks.
        elastic: True if torchrun may start the job again with other nodes.

    Raises:
        MegaplanError: MP650 if a process or the store is missing; MP651 if rank 0 cannot listen at the store's port; MP652 if an
            environment variable of the launch is missing or not a number.
    """
    if "WORLD_SIZE" not in os.environ:
        if remark := choose_interface(""):
            note([remark])
        return Launch(0, 1, 0, dist.HashStore())  # type: ignore[attr-defined]
    rank, world_size, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    local_rank = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    if rank >= world_size or port >= 1 << 16:
        raise refusal("MP652", f"RANK = {rank}, WORLD_SIZE = {world_size}, MASTER_PORT = {port}")
    known = mesh if mesh is not None and mesh.world_size == world_size else None
    limit = timedelta(seconds=start_timeout)
    joined = _join(place(rank, known), rank == 0, port, limit)
    # a restarted job uses the same store, which still has addresses and errors of the previous processes
    store = PrefixStore(_session(joined, rank, world_size, limit) if elastic else f"attempt {os.environ.get(RESTART_COUNT, '0')}", joined)
    launch = Launch(rank, world_size, local_rank, store, start_timeout)
    keys = here_keys(world_size)
    store.set(keys[rank], "1")
    try:
        wait_for(store, keys, limit)
    except RuntimeError:  # raised by the store when the wait times out
        missing = [place(index, known) for index, key in enumerate(keys) if not store.check([key])]
        detail = f"{len(missing)} of {world_size} processes did not start within {start_timeout:g} s: {', '.join(missing[:MOST_NAMED])}"
        raise MissingProcessError(refusal("MP650", detail + (" …" if len(missing) > MOST_NAMED else "")), launch) from None
    return launch


def _session(store: Store, rank: int, world_size: int, limit: timedelta) -> str:
    try:
        return session_name(store, rank, world_size, limit)
    except RuntimeError:  # raised by the store when the wait times out
        raise refusal("MP650", f"rank {rank}: rank 0 of {world_size} did not start within {limit.total_seconds():g} s") from None


def _number(name: str) -> int:
    given = os.environ.get(name, "")
    if not given.isdecimal():
        raise refusal("MP652", f"{name} = {given}" if given else f"{name} is not set, WORLD_SIZE is")
    return int(given)


def _join(who: str, first: bool, port: int, limit: timedelta) -> Store:
    """The job's key-value store: torchrun's, else hosted by rank 0."""
    host = os.environ.get("MASTER_ADDR", "")
    if not host:
        raise refusal("MP652", "MASTER_ADDR is not set, WORLD_SIZE is")
    torchruns = os.environ.get(TORCHRUN_KEEPS_STORE) == str(True)
    serves = first and not torchruns
    alone = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ["WORLD_SIZE"]
    host, remark = reachable_host(host, port, min(limit.total_seconds(), RESOLVE_SECONDS), alone=alone)
    remarks = [each for each in (remark, choose_interface(host)) if each]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        note(remarks)
    joined: Future[Store] = Future()

    def join() -> None:
        try:
            # does not wait for workers: missing ranks are found in the store
            joined.set_result(TCPStore(host, port, is_master=serves, timeout=limit, wait_for_workers=False, multi_tenant=True))
        except Exception as error:
            joined.set_exception(error)

    # in a thread: TCPStore can block forever if another program owns the port
    threading.Thread(target=join, name="store", daemon=True).start()
    try:
        return joined.result(limit.total_seconds() + JOIN_SECONDS)
    except (dist.DistError, RuntimeError, OSError) as error:
        reason = (str(error).strip().splitlines() or ["no answer from the port"])[0]
        if serves:
            code, detail = "MP651", f"{who} hosts the store of the job, and cannot listen at {host}:{port}"
        else:
            keeper = "torchrun's store does not answer" if torchruns else "rank 0 did not start, or another program owns its port"
            code, detail = "MP650", f"{who}: no store at {host}:{port} within {limit.total_seconds():g} s: {keeper}"
        raise refusal(code, f"{detail}\n{reason}") from None


def choose_device(launch: Launch) -> torch.device:
    """This process's GPU if CUDA is available, else the CPU.

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


def device_text(device: torch.device) -> str:
    """The device as all ranks must have it: type, and the model of a GPU, whose kernels decide the last bits."""
    return device.type if device.type != "cuda" else f"cuda, {torch.cuda.get_device_name(device)}"


@contextmanager
def process_group(launch: Launch, device: torch.device, timeout: float | None = None) -> Iterator[None]:
    """The default process group: NCCL on CUDA, gloo on CPU, also for one process.

    A failing process of several does not destroy it, because that could deadlock with ranks that wait for this one.

    Args:
        launch: Launch of this rank.
        device: Device of this rank.
        timeout: Time in seconds after which a collective fails; torch's default if None.
    """
    # a group in a reference cycle keeps gloo's threads alive, and a thread that returns to Python during interpreter shutdown aborts the
    # process (pytorch/pytorch#190489): collecting the cycle first joins the threads
    atexit.register(gc.collect)
    backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    if bound is not None:  # torch's flight recorder: the last collectives of every rank, dumped when one times out
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
            os.environ.setdefault(name, FLIGHT_RECORDER_ENTRIES)
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    connecting = timedelta(seconds=CONNECT_FACTOR * launch.start_timeout)
    rank, size = launch.rank, launch.world_size
    try:
        dist.init_process_group(backend, timeout=connecting, device_id=bound, store=launch.store, rank=rank, world_size=size)
    except (dist.DistError, RuntimeError) as error:
        if launch.world_size == 1 or any(text in str(error) for text in CONNECTION_LOST):
            raise
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        detail = f"rank {launch.rank} on {here()} is not connected to all others within {connecting.total_seconds():g} s\n{reason}"
        hints = ("export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0    # the interface that connects the machines: ip -br address",)
        raise refusal("MP673", detail, hints=hints) from None
    _set_pg_timeout(timedelta(seconds=timeout) if timeout is not None else _get_default_timeout(dist.Backend(backend)))
    try:
        yield
    except BaseException:
        if launch.world_size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
