"""One rank of pp 2 × dp 2 raises or is killed while another waits for ever: all end within a minute, and one error is read."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind
from megarun.launch.failure import has_lost_peer

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 60
PROGRAM = """
import os, time
import megarun.data.batches as batches
real = batches.Batches.at
def at(self, step):
    if step == 1 and os.environ["RANK"] == "2":
        {action}
    if step == 1 and os.environ["RANK"] == "1":
        time.sleep({sleep})
    return real(self, step)
batches.Batches.at = at
from megarun.cli.main import run
from megarun.launch.failure import exit_process
exit_process(run())
"""


def start(rank: int, port: int, words: list[str]) -> subprocess.Popen[str]:
    """A process as a launcher that never stops any would start it."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **place, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_job(tmp_path: Path, spec_with: Any, program: str) -> tuple[list[int | None], list[str]]:
    """Exit statuses and stderr of four ranks that no launcher stops."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(Path(__file__).read_text())
    tokenize(read_corpus(tmp_path / "text"), TokenizerKind.BYTES, 257, tmp_path / "small.tokens")
    mesh = {"pp": 2, "dp_shard": 2}
    spec = spec_with({"model.vocab_size": 257, "schedule.num_microbatches": 2, "training.steps": 5, "mesh": mesh})
    write_plan(make_plan(Spec.model_validate(spec)), tmp_path / "plan.json")
    (tmp_path / "program.py").write_text(program)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["train", str(tmp_path / "plan.json"), "--data", str(tmp_path / "small.tokens"), "--out", str(tmp_path / "out")]
    began = time.monotonic()
    processes = [start(rank, port, [str(tmp_path / "program.py"), *arguments]) for rank in range(4)]
    try:
        said = [process.communicate(timeout=LIMIT_SECONDS - (time.monotonic() - began))[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], said


@pytest.mark.slow
@pytest.mark.requirement("R-59")
def test_every_rank_ends_when_one_has_failed(tmp_path: Path, spec_with: Any) -> None:
    """Rank 2 raises, rank 1 sleeps for an hour, and no launcher stops anyone: one error, with rank and coordinate, within a minute."""
    statuses, said = run_job(tmp_path, spec_with, PROGRAM.format(action='raise OSError("the disk was removed")', sleep=3600))
    assert statuses == [2, 2, 2, 2]
    assert "".join(said).count("error[") == 1
    assert "rank 2 (pp 1, dp_shard 0) of 4 failed first:" in said[2]
    assert "OSError: the disk was removed" in said[2]


@pytest.mark.slow
@pytest.mark.requirement("R-59")
def test_a_rank_that_is_killed_is_named_by_those_that_lose_it(tmp_path: Path, spec_with: Any) -> None:
    """Not the rank that notices it is blamed, and it is not a bug."""
    statuses, said = run_job(tmp_path, spec_with, PROGRAM.format(action="os.kill(os.getpid(), 9)", sleep=0))
    assert statuses == [2, 2, -9, 2]
    text = "".join(said)
    assert text.count("error[") == text.count("error[MP668]") == 1
    assert " of 4 noticed:" in text
    assert "failed first" not in text
    assert "rank 2 (pp 1, dp_shard 0): its process has ended; last seen in step " in text


def test_an_error_of_a_file_is_not_a_lost_peer() -> None:
    """Texts count only of torch's errors; one that wraps another counts as that."""
    assert not has_lost_peer(BrokenPipeError(32, "Broken pipe"))
    assert not has_lost_peer(RuntimeError("shape mismatch"))
    wrapped = ValueError("stage 1")
    wrapped.__cause__ = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
    assert has_lost_peer(wrapped)
