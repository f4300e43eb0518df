"""One rank of pp 2 × dp 2 raises while another waits for ever: all end within a minute, and the first error is read."""

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

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 60
PROGRAM = """
import os, time
import megarun.data.batches as batches
real = batches.Batches.at
def at(self, step):
    if step == 1 and os.environ["RANK"] == "2":
        raise OSError("the disk was removed")
    if step == 1 and os.environ["RANK"] == "1":
        time.sleep(3600)
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


@pytest.mark.requirement("R-59")
def test_every_rank_ends_when_one_has_failed(tmp_path: Path, spec_with: Any) -> None:
    """Rank 2 raises, rank 1 sleeps for an hour, and no launcher stops anyone: one error, with rank and coordinate, within a minute."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(Path(__file__).read_text())
    tokenize(read_corpus(tmp_path / "text"), TokenizerKind.BYTES, 257, tmp_path / "small.tokens")
    mesh = {"pp": 2, "dp_shard": 2}
    spec = spec_with({"model.vocab_size": 257, "schedule.num_microbatches": 2, "training.steps": 5, "mesh": mesh})
    write_plan(make_plan(Spec.model_validate(spec)), tmp_path / "plan.json")
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["train", str(tmp_path / "plan.json"), "--data", str(tmp_path / "small.tokens"), "--out", str(tmp_path / "out")]
    began = time.monotonic()
    processes = [start(rank, port, [str(tmp_path / "program.py"), *arguments]) for rank in range(4)]
    try:
        said = [process.communicate(timeout=LIMIT_SECONDS - (time.monotonic() - began)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [2, 2, 2, 2]
    errors = "".join(error for _, error in said)
    assert errors.count("error[") == 1
    assert "rank 2 (pp 1, dp_shard 0) of 4 failed first:" in said[2][1]
    assert "OSError: the disk was removed" in said[2][1]
