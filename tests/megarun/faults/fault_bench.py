"""A small run to break: its plans and tokens, its uninterrupted losses, and launches that a case can kill, stop and resume."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.checkpoint.manifest import list_checkpoints, read_manifest
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

ROOT = Path(__file__).parents[3]
STEPS, SAVE_EVERY = 24, 2
ERROR = 2
LIMIT_SECONDS = 60.0
"""After its own timeout a broken run has this long to end."""
SPEC: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "faults",
    "model": {
        "pattern": "AMED",
        "num_layers": 4,
        "hidden_size": 32,
        "vocab_size": 257,
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
        "mamba": {"kind": "mamba2", "expand": 2, "head_dim": 16, "state_dim": 8, "num_groups": 2, "chunk_size": 8},
        "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16},
        "mlp": {"ffn_hidden_size": 40},
    },
    "schedule": {"kind": "1f1b", "num_microbatches": 2},
    "batch": {"micro_batch_size": 2, "seq_length": 24},
    "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32"),
    "training": {"steps": STEPS, "learning_rate": 1.0e-3},
}


@dataclass(frozen=True)
class Outcome:
    """A row of the table.

    Attributes:
        happened: The fault.
        said: What the user read.
        steps_lost: Steps that had to be made again; None where nothing had been made.
        seconds: From the fault to the end of the process.
        status: Exit status of the process, of torchrun if it started the ranks.
    """

    happened: str
    said: str
    steps_lost: int | None
    seconds: float
    status: int


class Bench:
    """One folder in which cases run; plan, tokens and the uninterrupted losses are made once."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)  # as torchrun's workers have
        self.folder = folder
        text = folder / "text"
        text.mkdir(parents=True)
        (text / "a.txt").write_text("".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))))
        self.tokens = folder / "small.tokens"
        tokenize(read_corpus(text), TokenizerKind.BYTES, 257, self.tokens)
        self.one, self.two = self.plan("one", {}), self.plan("two", {"mesh": {"pp": 2}})

    def plan(self, name: str, changes: dict[str, Any]) -> Path:
        """A plan of the small spec with sections replaced."""
        path = self.folder / f"{name}.json"
        write_plan(make_plan(Spec.model_validate({**SPEC, **changes})), path)
        return path

    def words(self, plan: Path, out: Path, *more: str) -> list[str]:
        """The command line, after `megarun`."""
        return ["train", str(plan), "--data", str(self.tokens), "--out", str(out), "--save-every", str(SAVE_EVERY), *more]

    def here(self, words: list[str]) -> tuple[int, str, float]:
        """Status, stderr and seconds of a command in this process."""
        began, said = time.monotonic(), io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = run(words)
        return status, said.getvalue(), time.monotonic() - began

    def whole(self, name: str, steps: int = STEPS) -> Path:
        """A new folder with a run of one process."""
        out = self.folder / name
        assert self.here(self.words(self.one, out, "--steps", str(steps)))[0] == 0
        return out

    @cached_property
    def expected(self) -> dict[int, float]:
        """Losses of the run that nothing interrupts."""
        return losses(self.whole("expected"))

    def launch(
        self, out: Path, said: Path, *more: str, program: Sequence[str] = ("-m", "megarun"), meeting: Sequence[str] = ("--standalone",)
    ) -> subprocess.Popen[bytes]:
        """Two stages under torchrun, stderr in a file."""
        command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", "2", *program]
        words = self.words(self.two, out, *more)
        with said.open("wb") as file:
            return subprocess.Popen([*command, *words], env=environment(), stdout=subprocess.DEVNULL, stderr=file)

    def alone(self, rank: int, out: Path, port: int, *more: str) -> tuple[int, str, float]:
        """One rank of two, started by hand."""
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        began = time.monotonic()
        command = [sys.executable, "-m", "megarun", *self.words(self.two, out, *more)]
        done = subprocess.run(command, env=environment() | place, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
        return done.returncode, done.stderr, time.monotonic() - began

    def resume(self, out: Path, newest: int) -> tuple[str, int]:
        """Resume with one process; returns its output, and the number of repeated steps. The loss curve equals the uninterrupted one."""
        made = max(losses(out), default=0)
        status, said, _ = self.here(self.words(self.one, out))
        assert status == 0, said
        found = re.search(r"(\d+) steps done", said)
        start = int(found.group(1)) if found else 0
        assert start >= newest, f"step {newest} was saved, and the run continued from {start}"
        assert losses(out) == self.expected
        return said, max(0, made - start)


def environment() -> dict[str, str]:
    """Of a child process."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def losses(out: Path) -> dict[int, float]:
    """By step; the last one of a step that was made twice. Lines of another kind, or cut off, are left out."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}\n") and line.startswith("{")]
    return {each["step"]: each["loss"] for each in records if "step_seconds" in each}


def newest_step(out: Path) -> int:
    """Of the finished checkpoints; 0 if there is none."""
    found = list_checkpoints(out)
    return read_manifest(found[0]).step if found else 0


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


def wait_for_step(out: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Until that many steps are done."""
    wait_for(process, lambda: max(losses(out), default=0) >= step, f"step {step}")


def wait_for(process: subprocess.Popen[bytes], happened: Callable[[], bool], what: str) -> None:
    """Until it has happened while the process runs."""
    end = time.monotonic() + LIMIT_SECONDS
    while not happened():
        assert process.poll() is None, f"ended with {process.returncode} before {what}"
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.01)


def first_line(said: str, *wanted: str) -> str:
    """The first line that has one of the words, without folders of this machine."""
    for line in said.splitlines():
        if any(word in line for word in wanted):
            return re.sub(r"/\S*/(?=[^/\s]+)", "", line).strip()
    raise AssertionError(f"none of {wanted} in:\n{said}")


def end(process: subprocess.Popen[bytes]) -> float:
    """Seconds until it has ended; it and its ranks are killed if it does not."""
    began = time.monotonic()
    ranks = rank_processes(process.pid)
    try:
        process.wait(timeout=LIMIT_SECONDS)
    finally:
        for pid in (process.pid, *ranks.values()):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return time.monotonic() - began


def copy_of(run_folder: Path, name: str) -> Path:
    """A run to break, of one that is kept."""
    out = run_folder.with_name(name)
    shutil.copytree(run_folder, out)
    return out


def refused(bench: Bench, happened: str, words: list[str], code: str) -> Outcome:
    """A command that must end with one error and leave what is saved as it was."""
    status, said, seconds = bench.here(words)
    assert status == ERROR, said
    return Outcome(happened, first_line(said, f"error[{code}]"), None, seconds, status)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
