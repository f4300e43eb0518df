"""A small run to break: its plans and tokens, its uninterrupted losses, and launches that a case can kill, stop and resume."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fault_launch import ALONE, LIMIT_SECONDS, START_LIMIT_SECONDS, TWO_STAGES, Forks, Job, environment, layout_text, torchrun

from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Mesh, Spec
from megarun.checkpoint.manifest import list_checkpoints, read_manifest
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

if TYPE_CHECKING:
    from fault_aim import SelfKill

STEPS, SAVE_EVERY = 12, 2
ERROR = 2
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
        said: Text that the user read.
        steps_lost: Steps that had to be made again; None where nothing had been made.
        seconds: Seconds from the fault to the end of the process.
        status: Exit status of the process, of torchrun if it started the ranks.
        ranks: Processes of the job.
        nodes: torchrun's agents.
    """

    happened: str
    said: str
    steps_lost: int | None
    seconds: float
    status: int
    ranks: int = 1
    nodes: int = 1


Case = Callable[["Bench"], Outcome]


class Bench:
    """One folder in which cases run; plan, tokens and the uninterrupted losses are made once.

    Attributes:
        folder: The folder.
        tokens: Token file of all runs.
        one: Plan of one process.
        two: Plan of two stages.
        places: Other places of runs and checkpoints: a folder on FUSE, a bucket of an S3 server.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)  # as torchrun's workers have
        self.folder = folder
        text = folder / "text"
        text.mkdir(parents=True)
        (text / "a.txt").write_text("".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))))
        self.tokens = folder / "small.tokens"
        tokenize(read_corpus(text), TokenizerKind.BYTES, 257, self.tokens)
        self.one, self.two = self.plan("one", {}), self.plan("two", {"mesh": {"pp": 2}})
        self.forks = Forks()
        self._layouts = {ALONE: self.one, TWO_STAGES: self.two}
        self._expected: dict[tuple[Mesh, bool], dict[int, float]] = {}
        self.places: dict[str, Any] = {}
        self._largest = (1, 1)

    def row(self, case: Case) -> Outcome:
        """Result of a case, with the size of the largest job that it launched."""
        self._largest = (1, 1)
        found = case(self)
        return replace(found, ranks=self._largest[0], nodes=self._largest[1])

    def plan(self, name: str, changes: dict[str, Any]) -> Path:
        """A plan of the small spec with sections replaced."""
        path = self.folder / f"{name}.json"
        write_plan(make_plan(Spec.model_validate({**SPEC, **changes})), path)
        return path

    def plan_of(self, mesh: Mesh) -> Path:
        """The plan of the small spec in a layout."""
        if mesh not in self._layouts:
            name = layout_text(mesh).replace(" × ", "-").replace(" ", "")
            self._layouts[mesh] = self.plan(name, sections(mesh))
        return self._layouts[mesh]

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

    def expected_of(self, mesh: Mesh, compiled: bool = False) -> dict[int, float]:
        """Losses of the run in a layout that nothing interrupts, with compiled blocks or without."""
        key = mesh, compiled
        if key not in self._expected:
            alone = resume_layout(mesh) == ALONE and not compiled
            self._expected[key] = self.expected if alone else self._uninterrupted(mesh, ["--compile"] * compiled)
        return self._expected[key]

    def _uninterrupted(self, mesh: Mesh, more: list[str]) -> dict[int, float]:
        out = self.folder / f"expected-{self.plan_of(mesh).stem}{'-'.join(more)}"
        status, said = self.forked(mesh, [*self.words(self.plan_of(mesh), out), *more])
        assert status == 0, said
        return losses(out)

    def fork(self, words: Sequence[str], said: Path, mesh: Mesh, self_kills: Mapping[int, "SelfKill"] | None = None) -> Job:
        """A job whose ranks are forked, some of which may end themselves; stderr in a file."""
        self.note_size(mesh.world_size, 1)
        return self.forks.start(words, said, mesh, self_kills)

    def note_size(self, ranks: int, nodes: int) -> None:
        """Note the size of a job of the case."""
        self._largest = max(self._largest, (ranks, nodes))

    def forked(self, mesh: Mesh, words: Sequence[str]) -> tuple[int, str]:
        """Status and stderr of a job whose ranks are forked, and which nothing breaks."""
        said = self.folder / "forked.txt"
        said.unlink(missing_ok=True)
        job = self.forks.start(words, said, mesh)
        job.end(START_LIMIT_SECONDS)
        return job.status, said.read_text()

    def launch(
        self,
        out: Path,
        said: Path,
        *more: str,
        mesh: Mesh = TWO_STAGES,
        nodes: int = 1,
        program: Sequence[str] = ("-m", "megarun"),
        meeting: Sequence[str] = (),
        elastic: bool = False,
    ) -> Job:
        """A job under torchrun, two stages if no layout is given; stderr in a file."""
        self.note_size(mesh.world_size, nodes)
        return torchrun(program, self.words(self.plan_of(mesh), out, *more), said, mesh, nodes, meeting, elastic=elastic)

    def alone(self, rank: int, out: Path, port: int, *more: str) -> tuple[int, str, float]:
        """One rank of two, started by hand."""
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        began, self._largest = time.monotonic(), (2, 1)
        command = [sys.executable, "-m", "megarun", *self.words(self.two, out, *more)]
        done = subprocess.run(command, env=environment() | place, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
        return done.returncode, done.stderr, time.monotonic() - began

    def resume(self, out: Path, newest: int, mesh: Mesh = ALONE) -> tuple[str, int]:
        """Resume in a layout; returns its output, and the number of repeated steps. The loss curve equals that layout's uninterrupted one.

        Pipeline stages compute what one process does, bitwise: a job of them may resume as one process, which takes less time.
        """
        made = max(losses(out), default=0)
        said, start = self._resumed(out, mesh)
        assert start >= newest, f"step {newest} was saved, and the run continued from {start}"
        return said, max(0, made - start)

    def resume_from(self, out: Path, mesh: Mesh, *more: str) -> int:
        """Resume as `resume` does, also with a new folder and checkpoints elsewhere; the number of steps that were not made again."""
        return self._resumed(out, mesh, *more)[1]

    def _resumed(self, out: Path, mesh: Mesh, *more: str) -> tuple[str, int]:
        known, words, compiled = losses(out), [*self.words(self.plan_of(mesh), out), *more], "--compile" in more
        status, said = self.here(words)[:2] if mesh == ALONE and not compiled else self.forked(mesh, words)
        assert status == 0, said
        found = re.search(r"(\d+) steps done", said)
        start = int(found.group(1)) if found else 0
        assert losses(out) == {step: loss for step, loss in self.expected_of(mesh, compiled).items() if known or step > start}
        return said, start


def sections(mesh: Mesh) -> dict[str, Any]:
    """A layout as changes of the small spec."""
    return {"mesh": {axis: degree for axis, degree in mesh.model_dump().items() if degree not in (1, False)}}


def resume_layout(mesh: Mesh) -> Mesh:
    """One process if it computes the same as the layout bitwise, as for pipeline stages; else the layout."""
    return ALONE if mesh in (ALONE, TWO_STAGES) else mesh


def made_steps(out: Path) -> list[tuple[int, float]]:
    """Step and loss in the order in which they were made, repeated steps included. Lines of another kind, or cut off, are left out."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}\n") and line.startswith("{")]
    return [(each["step"], each["loss"]) for each in records if "step_seconds" in each]


def losses(out: Path) -> dict[int, float]:
    """Losses by step; the last one of a step that was made twice."""
    return dict(made_steps(out))


def newest_step(out: Path) -> int:
    """Largest step of the finished checkpoints; 0 if there is none."""
    found = list_checkpoints(out)
    return read_manifest(found[0]).step if found else 0


def first_line(said: str, *wanted: str) -> str:
    """The first line that has one of the words, without folders of this machine."""
    for line in said.splitlines():
        if any(word in line for word in wanted):
            return re.sub(r"/\S*/(?=[^/\s]+)", "", line).strip()
    raise AssertionError(f"none of {wanted} in:\n{said}")


def wait_for_step(out: Path, step: int, job: Job) -> None:
    """Waits until that many steps are done."""
    job.wait_for(lambda: max(losses(out), default=0) >= step, f"step {step}")


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
