"""Jobs of two nodes that lose a process or a node and continue from copies in memory; the seconds and steps that each loss costs."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

from fault_bench import Bench, losses, made_steps
from fault_launch import START_LIMIT_SECONDS, Job, environment, free_port, layout_text, rank_processes, rendezvous

from megaplan.spec.models import Mesh

STEPS = 60
FIRST_KILL = 2
"""Steps before a first kill: a process that ends in its first step may have no copy yet, and its job starts from the beginning."""
RESUMED = "resumed from copies in memory"
PROCESS, NODE = "process", "node"


@dataclass(frozen=True)
class Recovery:
    """A loss and what it has cost.

    Attributes:
        layout: Degrees of the mesh.
        ranks: Processes of the job.
        victim: The killed rank or node.
        made: Steps that had been made.
        lost: Steps that were made again.
        seconds: Seconds from the kill until the next step was made.
    """

    layout: str
    ranks: int
    victim: str
    made: int
    lost: int
    seconds: float


def recoveries(bench: Bench, mesh: Mesh, victims: Sequence[str], seed: int) -> list[Recovery]:
    """Losses of one job, one after another: a random rank, or node 1, which is replaced.

    Args:
        bench: Folder, plans and tokens.
        mesh: Layout of the job, half of its ranks on each node.
        victims: `process` or `node` for each loss.
        seed: Seed of ranks and times.

    Raises:
        AssertionError: The job fails, a loss is not recovered from memory, or a loss differs from those of a job that nothing interrupts.
    """
    draw, name = random.Random(f"{seed} {layout_text(mesh)} {victims}"), f"memory-{seed}-{layout_text(mesh)}".replace(" ", "-")
    whole, out, said = (bench.folder / f"{name}{suffix}" for suffix in ("-whole", "", ".txt"))
    words = ["train", str(bench.plan_of(mesh)), "--data", str(bench.tokens), "--steps", str(STEPS)]
    status, text = bench.forked(mesh, [*words, "--out", str(whole)])
    assert status == 0, text
    job = TwoNodes([*words, "--out", str(out), "--memory-copies"], said, mesh)
    found = []
    try:
        for victim in victims:
            job.wait_for_steps(out, max(FIRST_KILL, len(steps(out)) + draw.randint(1, 3)))
            killed = job.lose_node() if victim == NODE else job.lose_rank(draw.randrange(mesh.world_size))
            began = time.monotonic()
            time.sleep(0.1)  # a line that was being written is read
            before = steps(out)
            job.wait_for_steps(out, len(before) + 1)
            seconds, next_step = time.monotonic() - began, steps(out)[len(before)]
            found.append(Recovery(layout_text(mesh), mesh.world_size, killed, before[-1], before[-1] + 1 - next_step, seconds))
        job.end(START_LIMIT_SECONDS)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{said.read_text()}") from error
    finally:
        job.close()
    assert job.status == 0, said.read_text()
    assert said.read_text().count(RESUMED) == len(victims), said.read_text()
    assert losses(out) == losses(whole)
    return found


class TwoNodes(Job):
    """Two of torchrun's agents on this machine, of which the second one may be replaced.

    Args:
        words: Command line of the ranks, after `megarun`.
        said: File for stderr of all processes.
        mesh: Layout, half of its ranks on each node.
    """

    def __init__(self, words: Sequence[str], said: Path, mesh: Mesh) -> None:
        self._words, self._mesh, self._port = words, mesh, free_port()
        self._file = said.open("ab")
        self._agents: list[Any] = [self._agent(0), self._agent(1)]
        super().__init__(self._agents)

    def lose_rank(self, rank: int) -> str:
        """End a rank at once."""
        self.kill(rank)
        return f"rank {rank}"

    def lose_node(self) -> str:
        """End node 1 at once, and start another one in its place."""
        self.kill_node(1)
        self._agents[1].wait()
        self._agents[1] = self._agent(1)
        return "node 1"

    def wait_for_steps(self, out: Path, count: int) -> None:
        """Wait until so many steps have been made, repeated ones included."""
        self.wait_for(lambda: len(steps(out)) >= count, f"{count} steps")

    def close(self) -> None:
        """End what is left of the job."""
        for agent in self._agents:
            for process in (agent.pid, *rank_processes(agent.pid).values()):
                with suppress(ProcessLookupError):
                    os.kill(process, SIGKILL)
            agent.wait()
        self._file.close()

    def _agent(self, node: int) -> subprocess.Popen[bytes]:
        """The agent of a node."""
        place = ["--nproc-per-node", str(self._mesh.world_size // 2), *rendezvous(node, "2", 9, self._port)]
        command = [sys.executable, "-m", "torch.distributed.run", *place, "-m", "megarun", *self._words]
        # else torchrun gives a new node no address of the store
        variables = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.Popen(command, env=variables, stderr=self._file, stdout=subprocess.DEVNULL)


def steps(out: Path) -> list[int]:
    """Steps that were made, repeated ones included."""
    return [step for step, _ in made_steps(out)]
