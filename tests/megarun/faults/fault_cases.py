"""Every fault of the table: the action on a run, and the required outcome. Each returns its row."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fault_aim
import torch
from fault_bench import (
    ERROR,
    SPEC,
    STEPS,
    Bench,
    Case,
    Outcome,
    copy_of,
    first_line,
    flip,
    losses,
    newest_step,
    refused,
    wait_for_step,
)
from fault_blame import blamed, ended
from fault_ends import ENDS
from fault_errors import ERRORS
from fault_files import FILES
from fault_hangs import HANGS
from fault_launch import START_LIMIT_SECONDS, Job, free_port
from fault_layouts import LAYOUTS
from fault_outputs import OUTPUTS
from fault_replicas import REPLICAS
from fault_storage import STORAGE
from fault_trust import ODD_RANKS, TRUST
from torch.distributed.tensor import DTensor

from megarun.checkpoint.manifest import list_checkpoints, read_manifest
from megarun.data.batches import Batches
from megarun.engine.trainer import Trainer

STATUS = 128  # of a command that a signal has ended, plus the signal's number
BEFORE = 6  # steps of a run that is damaged: checkpoints after 4 and 6


class RefusedError(Exception):
    """This machine does not let the fault happen."""


def killed(bench: Bench, seed: int) -> Outcome:
    """kill -9 of one rank at a random time, usually during a save."""
    draw = random.Random(seed)
    step, rank, delay = draw.randint(1, STEPS - 4), draw.randint(0, 1), draw.uniform(0, 0.1)
    out, said = bench.folder / f"killed-{seed}", bench.folder / f"killed-{seed}.txt"
    process = bench.launch(out, said)
    wait_for_step(out, step, process)
    time.sleep(delay)
    process.kill(rank)
    seconds = process.end()
    assert blamed(said.read_text()) <= {rank}, said.read_text()
    saved = newest_step(out)
    happened = f"kill -9 of rank {rank} in step {step + 1} or later (seed {seed})"
    if saved == 0:  # nothing to resume from, and a run is never overwritten
        row = refused(bench, happened + ", before the first save", bench.words(bench.one, out), "MP608")
        return replace(row, steps_lost=max(losses(out)), seconds=seconds)
    resumed, lost = bench.resume(out, saved)
    return Outcome(happened, ended(said.read_text()) + first_line(resumed, "resumed from"), lost, seconds, process.status)


def stopped(bench: Bench, number: signal.Signals, seed: int) -> Outcome:
    """A signal to the launcher at a random time; no step is lost."""
    draw = random.Random(seed)
    step, delay = draw.randint(1, STEPS - 6), draw.uniform(0, 0.05)
    out, said = bench.folder / f"{number.name}-{seed}", bench.folder / f"{number.name}-{seed}.txt"
    process = bench.launch(out, said)
    wait_for_step(out, step, process)
    time.sleep(delay)
    process.send_signal(number)
    seconds = process.end()
    assert process.status != 0
    assert newest_step(out) == max(losses(out)) < STEPS
    _, lost = bench.resume(out, newest_step(out))
    assert lost == 0
    return Outcome(
        f"{number.name} to torchrun in step {step + 1} or later (seed {seed})",
        first_line(said.read_text(), "saved"),
        0,
        seconds,
        process.status,
    )


def held_out(bench: Bench) -> list[str]:
    """Command-line options for periodic evaluation."""
    return ["--eval-data", str(bench.tokens), "--eval-every", "6", "--eval-batches", "4"]


def struck_here(bench: Bench, number: signal.Signals, place: str) -> Outcome:
    """A signal inside of a save or an evaluation of one process: saved checkpoints are complete, and no step is lost."""
    out = bench.folder / f"{number.name}-here-{place}".replace(" ", "-")
    with fault_aim.aimed(place, fault_aim.sending(number, os.getpid())):
        status, said, seconds = bench.here(bench.words(bench.one, out, *held_out(bench)))
    assert status == STATUS + number, said
    assert 0 < newest_step(out) == max(losses(out)) < STEPS
    _, lost = bench.resume(out, newest_step(out))
    assert lost == 0
    return Outcome(f"{number.name} to one process inside of {place}", first_line(said, "saved"), 0, seconds, status)


def struck(bench: Bench, number: signal.Signals, place: str) -> Outcome:
    """A signal to the launcher inside of rank 1's save or evaluation: all ranks stop after the same step, before torchrun kills them."""
    name = f"{number.name}-{place}".replace(" ", "-")
    process, out, said, counts = _launch_aimed(bench, name, place, number.name)
    process.wait_for((counts / fault_aim.STRUCK).exists, place)
    seconds = process.end()
    assert process.status != 0
    assert 0 < newest_step(out) == max(losses(out)) < STEPS, said.read_text()
    assert [int((counts / str(rank)).read_text()) for rank in range(2)] == [newest_step(out)] * 2
    _, lost = bench.resume(out, newest_step(out))
    assert lost == 0
    return Outcome(f"{number.name} to torchrun inside of {place}", first_line(said.read_text(), "saved"), 0, seconds, process.status)


def disk_full_of_one(bench: Bench) -> Outcome:
    """The second save of rank 1 meets a full disk, rank 0's does not: both end, before the third save."""
    process, out, said, counts = _launch_aimed(bench, "full-of-one", "the writing of a save", fault_aim.full_disk.__name__)
    process.wait_for((counts / fault_aim.STRUCK).exists, "the second save")
    seconds = process.end()
    assert process.status != 0
    assert newest_step(out) == 2, said.read_text()
    read = first_line(said.read_text(), "error[MP645]")
    _, lost = bench.resume(out, 2)
    return Outcome("disk full for one of two ranks during the second save", read, lost, seconds, process.status)


def _launch_aimed(bench: Bench, name: str, place: str, strike: str) -> tuple[Job, Path, Path, Path]:
    """The process, its run, its output, and the place where its ranks count updates."""
    out, said, counts = bench.folder / name, bench.folder / f"{name}.txt", bench.folder / f"{name}-updates"
    counts.mkdir()
    program = [str(Path(fault_aim.__file__)), place, strike, "1", str(counts)]
    return bench.launch(out, said, *held_out(bench), program=program), out, said, counts


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "data file of the newest checkpoint truncated": ("__0_0.distcp", lambda path: os.truncate(path, path.stat().st_size - 100)),
    "a bit of its data file flipped": ("__0_0.distcp", flip),
    "its data file deleted": ("__0_0.distcp", Path.unlink),
    "a bit of its index flipped": ("index.json", flip),
    "its manifest truncated": ("manifest.json", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "its manifest deleted": ("manifest.json", Path.unlink),
}


def damaged(bench: Bench, what: str) -> Outcome:
    """The previous checkpoint is used, and the damage reported."""
    kept = bench.folder / "kept"
    if not kept.exists():
        bench.whole("kept", BEFORE)
    out = copy_of(kept, what.replace(" ", "-"))
    name, action = DAMAGES[what]
    action(list_checkpoints(out)[0] / name)
    began = time.monotonic()
    said, lost = bench.resume(out, BEFORE - 2)
    assert lost == 2
    read = first_line(said, "warning[MP646]", "resumed from") + "; " + first_line(said, "resumed from")
    if name == "manifest.json" and "MP646" not in said:
        read = first_line(said, "resumed from")  # a folder without a manifest is not a checkpoint
    return Outcome(what, read, lost, time.monotonic() - began, 0)


def disk_full(bench: Bench) -> Outcome:
    """A file system that holds one checkpoint and not two."""
    size = sum(file.bytes for file in read_manifest(list_checkpoints(bench.whole("sized", 2))[0]).files.values())
    disk = bench.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size * 17 // 10 // 1024}k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        raise RefusedError(f"mount: {mounted.stderr.strip()}")
    try:
        status, said, seconds = bench.here(bench.words(bench.one, disk / "run"))
        assert status == ERROR
        assert newest_step(disk / "run") == 2
        assert "MP645" in said
        shutil.copytree(disk / "run", bench.folder / "full")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    _, lost = bench.resume(bench.folder / "full", 2)
    return Outcome("disk full during the second save", first_line(said, "error[MP645]"), lost, seconds, status)


def rank_missing(bench: Bench, missing: int) -> Outcome:
    """One rank of two is never started; the other is started without torchrun."""
    out, wanted = bench.folder / f"missing-{missing}", ("no store" if missing == 0 else "did not start")
    status, said, seconds = bench.alone(1 - missing, out, free_port(), "--start-timeout", "3")
    assert status == ERROR, said
    assert "MP650" in said
    assert f"rank {missing}" in first_line(said, wanted)
    where = "fixed address and port" if missing else "fixed address and port, whose store it keeps"
    return Outcome(
        f"rank {missing} never starts ({where}, --start-timeout 3)", _without_port(first_line(said, wanted)), None, seconds, status
    )


LATE = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(3600)
from megarun.cli.main import run
from megarun.launch.failure import exit_process
exit_process(run())
"""


def rank_late(bench: Bench) -> Outcome:
    """torchrun with a fixed address starts both ranks, and one hangs before it comes to megarun."""
    (bench.folder / "late.py").write_text(LATE)
    out, said = bench.folder / "late", bench.folder / "late.txt"
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    process = bench.launch(out, said, "--start-timeout", "3", program=[str(bench.folder / "late.py")], meeting=meeting)
    seconds = process.end(START_LIMIT_SECONDS)
    assert process.status != 0
    assert said.read_text().count("error[MP650]") == 1, said.read_text()
    read = first_line(said.read_text(), "did not start")
    assert read.endswith("rank 1 (pp 1)")
    return Outcome(
        "rank 1 hangs before it starts, under torchrun --master-addr --master-port (--start-timeout 3)",
        read,
        None,
        seconds,
        process.status,
    )


def _without_port(said: str) -> str:
    return re.sub(r"(?<=127\.0\.0\.1:)\d+", "PORT", said)


def port_in_use(bench: Bench) -> Outcome:
    """Another program listens where the processes should meet."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, said, seconds = bench.alone(0, bench.folder / "port", taken.getsockname()[1], "--start-timeout", "3")
    assert status == ERROR, said
    assert "MP651" in said
    read = _without_port(first_line(said, "cannot listen"))
    return Outcome("the port of the meeting place is in use", read, None, seconds, status)


def wrong_tokens(bench: Bench) -> Outcome:
    return refused(bench, "the token file is another file", _with_data(bench, bench.one), "MP612")


def truncated_tokens(bench: Bench) -> Outcome:
    path = bench.folder / "truncated.tokens"
    path.write_bytes(bench.tokens.read_bytes()[:-100])
    return refused(bench, "the token file is truncated", _with_data(bench, path), "MP614")


def _with_data(bench: Bench, data: Path) -> list[str]:
    return ["train", str(bench.one), "--data", str(data), "--out", str(bench.folder / "tokens")]


def edited_by_hand(bench: Bench) -> Outcome:
    document = json.loads(bench.one.read_text())
    document["inputs"]["model"]["mlp"]["ffn_hidden_size"] = 48
    path = bench.folder / "edited.json"
    path.write_text(json.dumps(document))
    return refused(bench, "the plan file is edited by hand after the checkpoint", bench.words(path, bench.folder / "edited"), "MP406")


def another_model(bench: Bench) -> Outcome:
    plan = bench.plan("another", {"model": {**SPEC["model"], "mlp": {"ffn_hidden_size": 48}}})
    out = bench.whole("before-edit", 2)
    row = refused(bench, "the plan is replaced by another model's after the checkpoint", bench.words(plan, out), "MP641")
    assert newest_step(out) == 2
    return row


@contextlib.contextmanager
def poison(batch: int, where: str) -> Iterator[None]:
    """NaN out of the first stage, or in a gradient, on one batch."""
    at, accumulate, number = Batches.at, Trainer.accumulate_gradients, [0]

    def noting(self: Batches, step: int) -> Any:
        number[0] = step
        return at(self, step)

    def poisoned(self: Trainer, *rows: Any) -> torch.Tensor:
        bad = number[0] == batch
        hook = self.stages[0].register_forward_hook(lambda _, __, output: output * torch.nan) if bad and where == "data" else None
        partial = accumulate(self, *rows)
        if hook is not None:
            hook.remove()
        elif bad:
            gradient = next(self.stages[0].parameters()).grad
            assert gradient is not None
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient  # whole without FSDP2
            local.view(-1)[0] = torch.nan
        return partial

    Batches.at, Trainer.accumulate_gradients = noting, poisoned  # type: ignore[method-assign]
    try:
        yield
    finally:
        Batches.at, Trainer.accumulate_gradients = at, accumulate  # type: ignore[method-assign]


def not_finite(bench: Bench, where: str) -> Outcome:
    """The step is skipped and the run ends well."""
    with poison(3, where):
        status, said, seconds = bench.here(bench.words(bench.one, bench.folder / f"nan-{where}", "--steps", "8"))
    assert status == 0, said
    assert read_manifest(list_checkpoints(bench.folder / f"nan-{where}")[0]).data_progress.skipped == ((3, 4),)
    return Outcome(
        f"NaN in {'what a batch computes' if where == 'data' else 'a gradient'}", first_line(said, "skipped batch"), 0, seconds, status
    )


STOPPING = (signal.SIGTERM, signal.SIGINT)
STOP_PLACES = ("the copy of a save", "the writing of a save", "an evaluation", "a step", "an update")
SIGNALS = [(number, seed) for number in STOPPING for seed in (1, 2)]
KILLS: dict[str, Case] = {f"kill -9, seed {seed}": (lambda bench, seed=seed: killed(bench, seed)) for seed in range(8)}
STOPS: dict[str, Case] = {
    **{f"{n.name}, seed {s}": (lambda bench, n=n, s=s: stopped(bench, n, s)) for n, s in SIGNALS},
    **{f"{n.name} inside of {place}": (lambda bench, n=n, place=place: struck(bench, n, place)) for n in STOPPING for place in STOP_PLACES},
}
STRUCK_HERE = [(signal.SIGTERM, "the writing of a save"), (signal.SIGINT, "an evaluation")]
STRUCK_SLOW = [(signal.SIGUSR1, "the writing of a save"), (signal.SIGHUP, "an evaluation")]
QUICK: dict[str, Case] = {
    "NaN in data": lambda bench: not_finite(bench, "data"),
    "NaN in a gradient": lambda bench: not_finite(bench, "gradient"),
    **{what: (lambda bench, what=what: damaged(bench, what)) for what in DAMAGES},
    **{f"{n.name} here inside of {place}": (lambda bench, n=n, place=place: struck_here(bench, n, place)) for n, place in STRUCK_HERE},
    "disk full": disk_full,
    "wrong token file": wrong_tokens,
    "truncated token file": truncated_tokens,
    "plan edited by hand": edited_by_hand,
    "another model": another_model,
    **TRUST,
    **OUTPUTS,
}
PROCESSES: dict[str, Case] = {
    "disk full of one": disk_full_of_one,
    **ODD_RANKS,
    "rank 1 never starts": lambda bench: rank_missing(bench, 1),
    "rank 0 never starts": lambda bench: rank_missing(bench, 0),
    "a rank is late": rank_late,
    "port in use": port_in_use,
}
SLOW: dict[str, Case] = {
    **{f"{n.name} here inside of {place}": (lambda bench, n=n, place=place: struck_here(bench, n, place)) for n, place in STRUCK_SLOW},
    **FILES,
    **HANGS,
    **STORAGE,
    **LAYOUTS,
    **REPLICAS,
    **ERRORS,
    **ENDS,
}
"""Not in the fast tests, where tests/megarun/checkpoint and tests/megarun/launch hold the same by unit."""
