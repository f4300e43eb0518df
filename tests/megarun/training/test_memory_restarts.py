"""Processes of two nodes on this machine, or a node, are killed: torchrun starts all again, and they continue from copies in memory."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]
ROOT = Path(__file__).parents[3]
STEPS, LIMIT_SECONDS = 30, 1200.0
SPEC: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "memory",
    "model": {"pattern": "D", "num_layers": 1, "hidden_size": 32, "vocab_size": 257, "mlp": {"ffn_hidden_size": 40}},
    "mesh": {"dp_shard": 2},
    "batch": {"micro_batch_size": 1, "seq_length": 24},
    "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32"),
    "training": {"steps": STEPS, "learning_rate": 1e-3},
}
Job = Callable[..., list[int]]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Train on two nodes and kill a process so many times, or replace node 1; the steps that each kill has cost."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(Path(__file__).read_text())
    tokenize(read_corpus(tmp_path / "text"), TokenizerKind.BYTES, 257, tmp_path / "a.tokens")
    write_plan(make_plan(Spec.model_validate(SPEC)), tmp_path / "plan.json")

    def train(out: Path, kills: int, *, node_lost: bool = False) -> list[int]:
        drawn = random.Random(kills)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        words = ["train", str(tmp_path / "plan.json"), "--data", str(tmp_path / "a.tokens"), "--out", str(out), "--memory-copies"]
        said = out.with_suffix(".txt").open("wb")
        agents = [node(number, port, said, *words) for number in range(2)]
        lost = []
        try:
            for _ in range(kills):
                wait_for(len(steps(out)) + drawn.randint(1, 3), out)
                if node_lost:
                    lose(agents[1])
                    agents[1] = node(1, port, said, *words)
                else:
                    os.kill(drawn.choice(children(drawn.choice(agents).pid)), signal.SIGKILL)
                time.sleep(0.1)  # a line that was being written is read
                made = steps(out)
                wait_for(len(made) + 1, out)
                lost.append(made[-1] + 1 - steps(out)[len(made)])
            assert [agent.wait(LIMIT_SECONDS) for agent in agents] == [0, 0], out.with_suffix(".txt").read_text()
        finally:
            said.close()
            for agent in agents:
                lose(agent)
        return lost

    return train


def node(number: int, port: int, said: Any, *words: str) -> subprocess.Popen[bytes]:
    """A node of one process; node 0 has torchrun's rendezvous."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else torchrun gives a new node no address of the store
    meeting = f"last_call_timeout=2,keep_alive_interval=2,is_host={'true' if number == 0 else 'false'}"
    place = f"--nnodes 2 --nproc-per-node 1 --max-restarts 9 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}"
    command = [sys.executable, "-m", "torch.distributed.run", *place.split(), "--rdzv-conf", meeting, "--local-addr", "127.0.0.1"]
    return subprocess.Popen([*command, "-m", "megarun", *words], env=environment, stderr=said, stdout=subprocess.DEVNULL)


def lose(agent: subprocess.Popen[bytes]) -> None:
    """End a node at once."""
    for process in (agent.pid, *children(agent.pid)):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    agent.wait()


def children(parent: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.name))
    return found


def records(out: Path) -> list[dict[str, Any]]:
    """Metrics of the steps that were made, in the order in which they were written."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line for line in map(json.loads, lines) if "step_seconds" in line]


def steps(out: Path) -> list[int]:
    """Steps that were made, again included."""
    return [line["step"] for line in records(out)]


def wait_for(number: int, out: Path) -> None:
    """Wait for so many steps."""
    end = time.monotonic() + LIMIT_SECONDS
    while len(steps(out)) < number:
        assert time.monotonic() < end, out.with_suffix(".txt").read_text()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "node_lost"), [(1, False), (8, False), (1, True)])
def test_a_killed_process_or_node_costs_a_step_at_most(job: Job, tmp_path: Path, kills: int, node_lost: bool) -> None:
    """No checkpoint is saved; the losses are those of a job that nothing interrupts, bit by bit."""
    job(tmp_path / "whole", 0)
    assert all(lost <= 1 for lost in job(tmp_path / "killed", kills, node_lost=node_lost))
    whole, killed = ({line["step"]: line["loss"] for line in records(tmp_path / name)} for name in ("whole", "killed"))
    assert whole == killed
    assert (tmp_path / "killed.txt").read_text().count("resumed from copies in memory") == kills
