"""Jobs whose ranks a case can reach: started by torchrun on one node or several, or forked from a process that has loaded torch."""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megaplan.spec.models import Mesh
from megarun.errors import place

if TYPE_CHECKING:
    from fault_aim import SelfKill

ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 60.0
"""After its own timeout a broken run has this long to end."""
START_LIMIT_SECONDS = 300.0
"""Seconds until a job has come to where a case breaks it; a loaded machine takes long to load torch in four ranks."""
ALONE, TWO_STAGES = Mesh(), Mesh(pp=2)
PRELOADED = ("s3fs", "megarun.cli.main", "megarun.training.loop", "megarun.training.elastic", "torch.distributed.checkpoint", "fault_aim")


def layout_text(mesh: Mesh) -> str:
    """`pp 2 × dp_shard 2`: every degree that is not 1."""
    degrees = [f"{axis} {degree}" for axis, degree in mesh.model_dump().items() if axis != "vocab_parallel" and degree > 1]
    return " × ".join(degrees) or "one process"


def rank_text(rank: int, mesh: Mesh) -> str:
    """Name of a rank in messages."""
    return place(rank, mesh)


class Process(Protocol):
    """Environment that a job needs of a process."""

    pid: int

    def poll(self) -> int | None:
        """Exit status, None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it runs."""


class Job:
    """The processes of a job: torchrun's agents, one per node, or the ranks themselves."""

    def __init__(self, processes: Sequence[Process], *, are_ranks: bool = False) -> None:
        self.processes, self._are_ranks = processes, are_ranks

    def poll(self) -> int | None:
        """None while a process runs; else the first exit status that is not 0, or 0."""
        found = [process.poll() for process in self.processes]
        return None if None in found else next((status for status in found if status), 0)

    @property
    def status(self) -> int:
        """The exit status of a job that has ended."""
        status = self.poll()
        assert status is not None
        return status

    def ranks(self, node: int | None = None) -> dict[int, int]:
        """Process ids by rank, of all nodes or one."""
        if self._are_ranks:
            return {rank: process.pid for rank, process in enumerate(self.processes) if process.poll() is None}
        chosen = self.processes if node is None else [self.processes[node]]
        return {rank: pid for process in chosen for rank, pid in rank_processes(process.pid).items()}

    def kill(self, rank: int) -> None:
        """SIGKILL to a rank, if it still runs."""
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(self.ranks()[rank], signal.SIGKILL)

    def kill_node(self, node: int) -> None:
        """SIGKILL to an agent and its ranks: a machine without power."""
        for pid in (self.processes[node].pid, *self.ranks(node).values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def send_signal(self, number: int, node: int | None = None) -> None:
        """To the agents, or one node's."""
        for process in self.processes if node is None else [self.processes[node]]:
            process.send_signal(number)

    def terminate(self) -> None:
        """SIGTERM to the ranks that are left, as torchrun does when one has failed."""
        for pid in self.ranks().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def end(self, limit: float = LIMIT_SECONDS) -> float:
        """Seconds until all processes have ended.

        Raises:
            AssertionError: They did not within the limit; they are killed.
        """
        began, ranks = time.monotonic(), self.ranks()
        while self.poll() is None and time.monotonic() - began < limit:
            time.sleep(0.01)
        seconds, ended = time.monotonic() - began, self.poll() is not None
        for pid in () if ended else {*self.ranks().values(), *ranks.values(), *(process.pid for process in self.processes)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert ended, f"still runs {limit:.0f} s after the fault"
        return seconds

    def wait_for(self, happened: Callable[[], bool], what: str, pause: float = 0.01) -> None:
        """Waits until it has happened while the job runs."""
        end = time.monotonic() + START_LIMIT_SECONDS
        while not happened():
            assert self.poll() is None, f"ended with {self.poll()} before {what}"
            assert time.monotonic() < end, f"no {what}"
            time.sleep(pause)


def torchrun(
    program: Sequence[str],
    words: Sequence[str],
    said: Path,
    mesh: Mesh,
    nodes: int = 1,
    meeting: Sequence[str] = (),
    *,
    elastic: bool = False,
) -> Job:
    """A job under torchrun, one agent a node, all on this machine; a job of one rank without torchrun. stderr goes to a file.

    Args:
        program: Program that torchrun starts.
        words: Command line of the program.
        said: File for stderr of all processes.
        mesh: Decides the number of ranks.
        nodes: Agents, with equally many ranks each.
        meeting: torchrun's options for the place where the ranks of one node meet.
        elastic: True if the nodes that are left start again when one is lost.
    """
    command, port = [sys.executable], free_port()
    if mesh.world_size > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(mesh.world_size // nodes)]
    started = []
    with said.open("ab") as file:
        for node in range(nodes):
            if mesh.world_size == 1:
                place_ = []
            elif elastic:
                place_ = rendezvous(node, f"1:{nodes}", 3, port, "keep_alive_max_attempt=5")
            elif nodes > 1:
                place_ = [*f"--nnodes {nodes} --node-rank {node} --master-addr 127.0.0.1 --master-port {port}".split()]
            else:
                place_ = list(meeting or ["--standalone"])
            full = [*command, *place_, *program, *words]
            started.append(subprocess.Popen(full, env=environment(), stdout=subprocess.DEVNULL, stderr=file))
    return Job(started)


def rendezvous(node: int, nodes: str, restarts: int, port: int, *more: str) -> list[str]:
    """torchrun's options for nodes that meet again after a loss; node 0 has the rendezvous."""
    conf = ",".join(("last_call_timeout=2", "keep_alive_interval=2", f"is_host={'true' if node == 0 else 'false'}", *more))
    place_ = f"--nnodes {nodes} --max-restarts {restarts} --rdzv-id job --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}"
    return [*place_.split(), "--rdzv-conf", conf, "--local-addr", "127.0.0.1"]


class Forks:
    """Ranks forked from one server that has loaded torch, as processes started by hand with torchrun's variables."""

    def __init__(self) -> None:
        # modules that the server preloads; Python 3.11 does not pass it a path
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment()["PYTHONPATH"]])
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, Path(__file__).stem])

    def start(self, words: Sequence[str], said: Path, mesh: Mesh, self_kills: Mapping[int, "SelfKill"] | None = None) -> Job:
        """Every rank of a job; stderr goes to a file, and some ranks may end themselves."""
        port, started = str(free_port()), []
        for rank in range(mesh.world_size):
            shared = {"WORLD_SIZE": str(mesh.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if mesh.world_size > 1 else {}
            process = self._context.Process(
                target=_rank, args=(variables, list(words), str(said), (self_kills or {}).get(rank)), daemon=True
            )
            process.start()
            started.append(_Forked(process))
        return Job(started, are_ranks=True)


class _Forked:
    def __init__(self, process: Any) -> None:
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        status: int | None = self._process.exitcode
        return status

    def send_signal(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sig)


def _rank(variables: Mapping[str, str], words: Sequence[str], said: str, self_kill: "SelfKill | None") -> None:
    """One rank, in its own process."""
    import torch  # noqa: PLC0415
    from fault_aim import aimed  # noqa: PLC0415

    from megarun.cli.main import run  # noqa: PLC0415
    from megarun.launch.failure import exit_process  # noqa: PLC0415

    torch.set_num_threads(1)
    os.environ.update({**environment(), **variables})
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), 2)
    with aimed(self_kill.place, self_kill.strike, self_kill.times) if self_kill else contextlib.nullcontext():
        exit_process(run(words))


def environment() -> dict[str, str]:
    """Environment of a child process."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def rank_processes(launcher: int) -> dict[int, int]:
    """Process ids of a launcher's ranks, by rank."""
    found = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == launcher:
                variables = dict(each.split("=", 1) for each in (process / "environ").read_text().split("\0") if "=" in each)
                if "RANK" in variables:
                    found[int(variables["RANK"])] = int(process.name)
    return found
