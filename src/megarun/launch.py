"""How this process was started: alone, or by torchrun; its device, and the job's process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from megaplan.spec.models import Spec
from megarun.errors import refusal
from megarun.parallel.mesh import AXES


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


def check_world_size(spec: Spec, launch: Launch, command: str) -> None:
    """Refuse another number of processes than the plan's.

    Args:
        spec: Whose mesh counts the ranks.
        launch: How many there are.
        command: What follows `megarun`, for the hint.

    Raises:
        MegaplanError: MP601.
    """
    planned = spec.mesh.world_size
    if planned == launch.world_size:
        return
    degrees = {axis: getattr(spec.mesh, axis) for axis in AXES}
    detail = f"mesh.world_size = {' · '.join(degrees)} = {' · '.join(map(str, degrees.values()))} = {prod(degrees.values())}"
    num_nodes, rest = divmod(planned, spec.device.per_node)
    if planned == 1:
        hint = f"megarun {command}"
    elif num_nodes < 1 or (num_nodes == 1 and rest == 0):
        hint = f"torchrun --standalone --nproc-per-node {planned} -m megarun {command}"
    else:
        per_node = spec.device.per_node if rest == 0 else 1
        nodes = f"--nnodes {planned // per_node} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        hint = f"torchrun {nodes} -m megarun {command}"
    raise refusal("MP601", f"{detail}, processes started = {launch.world_size}", "mesh", (hint,))


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
    """The default process group: NCCL on CUDA, gloo on CPU, also for one process. Left standing if the body fails."""
    backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=launch.store, rank=launch.rank, world_size=launch.world_size, device_id=bound)
    yield
    dist.destroy_process_group()
