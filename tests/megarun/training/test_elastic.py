"""A job continues with the GPUs that are left: the plan that is taken, how processes find each other again, and a job that loses a node."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megaplan.errors import MegaplanError
from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind
from megarun.launch.session import ASKED, here_keys, session_name
from megarun.training.elastic import FIRST_PLAN, choose_plan, read_plans

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[3]
STEPS, TOLERANCE, LIMIT_SECONDS = 24, 2e-6, 1200.0
SPEC: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "elastic",
    "model": {"pattern": "D", "num_layers": 1, "hidden_size": 32, "vocab_size": 257, "mlp": {"ffn_hidden_size": 40}},
    "batch": {"micro_batch_size": 1, "seq_length": 24},
    "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32"),
}


def write(path: Path, ranks: int, rows: int = 4, **training: Any) -> Path:
    """A plan of some data ranks with a global batch of `rows`."""
    path.parent.mkdir(exist_ok=True)
    schedule, given = {"num_microbatches": rows // ranks}, {"steps": STEPS, "learning_rate": 1e-3, **training}
    write_plan(make_plan(Spec.model_validate({**SPEC, "mesh": {"dp_shard": ranks}, "schedule": schedule, "training": given})), path)
    return path


def test_the_largest_plan_with_enough_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "four.json", 4)
    write(tmp_path / "plans" / "one.json", 1)
    two = write(tmp_path / "plans" / "two.json", 2)
    write(tmp_path / "plans" / "a-copy.json", 4)
    plans = read_plans(first, tmp_path / "plans", None, tmp_path / "out")
    taken = [choose_plan(plans, tmp_path / "plans", count) for count in (1, 2, 3, 4, 5)]
    assert [job.spec.mesh.world_size for job, _ in taken] == [1, 2, 2, 4, 4]
    said = capfd.readouterr().err.splitlines()
    assert said[2:] == [f"plan {two}: 2 ranks, 1 spare processes", *(f"plan {FIRST_PLAN}: 4 ranks, {n} spare processes" for n in (0, 1))]


def test_plans_must_be_of_one_run(tmp_path: Path) -> None:
    first = write(tmp_path / "two.json", 2)
    cases = {"batch": write(tmp_path / "batch" / "a.json", 1, rows=8), "rate": write(tmp_path / "rate" / "a.json", 1, learning_rate=2e-3)}
    with pytest.raises(MegaplanError, match=r"(?s)MP667.*global batch 8 sequences of 24 tokens, PLAN's 4"):
        read_plans(first, cases["batch"].parent, None, tmp_path)
    with pytest.raises(MegaplanError, match=r"(?s)MP667.*training.learning_rate = 0.002, PLAN's 0.001"):
        read_plans(first, cases["rate"].parent, None, tmp_path)
    with pytest.raises(MegaplanError, match=r"(?s)MP667.*no \*.json"):
        read_plans(first, tmp_path / "nothing", None, tmp_path)
    write(tmp_path / "large" / "a.json", 2)
    with pytest.raises(MegaplanError, match=r"(?s)MP667.*1 processes, and plans for 2 ranks"):
        choose_plan(read_plans(first, tmp_path / "large", None, tmp_path), tmp_path / "large", 1)


def test_a_start_has_a_name_that_no_earlier_one_had() -> None:
    """Requests of an earlier start that no rank has read neither make this one complete nor change its name."""
    store, limit = dist.HashStore(), timedelta(seconds=30)
    store.set(f"{ASKED}/{store.add(ASKED, 1)}", json.dumps([1, 2, "ended"]))
    store.set(f"{ASKED}/{store.add(ASKED, 1)}", json.dumps([1, 3, "ended too"]))
    names: dict[int, str] = {}

    def join(rank: int) -> None:
        names[rank] = session_name(store, rank, 2, limit)
        PrefixStore(names[rank], store).set(here_keys(2)[rank], "1")

    found = []
    for _ in range(2):
        threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert names[0] == names[1]
        found.append(names[0])
    assert found[0] != found[1]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(Path(__file__).read_text())
    tokenize(read_corpus(tmp_path / "text"), TokenizerKind.BYTES, 257, tmp_path / "a.tokens")
    return tmp_path / "a.tokens"


def losses(folder: Path) -> dict[int, float]:
    """Losses by step; a step that was trained again has its last one."""
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    lines = [json.loads(line) for line in text.split("\n")[:-1]]
    return {line["step"]: line["loss"] for line in lines if "step_seconds" in line}


def node(number: int, port: int, *words: str) -> subprocess.Popen[bytes]:
    """A node of one process; node 0 has torchrun's rendezvous."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    meeting = f"last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=5,is_host={'true' if number == 0 else 'false'}"
    place = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}"
    command = [sys.executable, "-m", "torch.distributed.run", *place.split(), "--rdzv-conf", meeting, "--local-addr", "127.0.0.1"]
    return subprocess.Popen([*command, "-m", "megarun", *words], env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


def lose(agent: subprocess.Popen[bytes]) -> None:
    """SIGKILL to all processes of a node."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    for pid in (agent.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    agent.communicate()


@pytest.mark.slow
def test_a_job_that_loses_a_node_continues_with_the_other(tmp_path: Path, tokens: Path) -> None:
    """Half of two processes is killed: the other one takes the plan for one rank and resumes, and the losses are one process'."""
    full, half = write(tmp_path / "full.json", 2), write(tmp_path / "plans" / "half.json", 1)
    assert run(["train", str(half), "--data", str(tokens), "--out", str(tmp_path / "expected")]) == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path / "run"
    words = ["train", str(full), "--plans", str(half.parent), "--data", str(tokens), "--out", str(out), "--save-every", "2"]
    words += ["--start-timeout", "600"]
    agents = [node(number, port, *words) for number in (0, 1)]
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while max(losses(out), default=0) < 4:
            assert time.monotonic() < end, "no steps"
            assert agents[0].poll() is None
            time.sleep(0.02)
        lose(agents[1])
        said = agents[0].communicate(timeout=LIMIT_SECONDS)[1].decode()
    finally:
        for agent in agents:
            if agent.poll() is None:
                lose(agent)
    assert agents[0].returncode == 0, said
    assert f"plan {half}: 1 ranks, 0 spare processes" in said
    assert "resumed from" in said
    found, expected = losses(out), losses(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - loss) for step, loss in expected.items()) <= TOLERANCE * max(map(abs, expected.values()))


@pytest.mark.slow
def test_processes_without_a_rank_wait(tmp_path: Path, tokens: Path, torchrun: Any) -> None:
    """A plan of two ranks on three processes: the third ends with the others. After ten steps there is a line with each rank's times."""
    plan = write(tmp_path / "two.json", 2)
    write(tmp_path / "plans" / "one.json", 1)
    words = ["train", str(plan), "--plans", str(tmp_path / "plans"), "--data", str(tokens), "--out", str(tmp_path / "run"), "--steps", "10"]
    done = torchrun(3, "-m", "megarun", *words)
    assert done.returncode == 0, done.stderr
    assert f"plan {FIRST_PLAN}: 2 ranks, 1 spare processes" in done.stderr
    assert len(losses(tmp_path / "run")) == 10
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (times,) = (line for line in lines if "rank_data_seconds" in line)
    columns = [times[f"rank_{what}_seconds"] for what in ("data", "compute", "communication")]
    assert [len(column) for column in columns] == [2] * 3
    assert min(map(min, columns)) >= 0
    assert max(columns[2]) > 0, "two ranks wait for each other"
