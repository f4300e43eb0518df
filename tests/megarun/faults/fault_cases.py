"""Every fault of the table: what is done to a run, and what must follow. Each returns its row."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fault_bench import (
    SPEC,
    STEPS,
    Bench,
    Outcome,
    copy_of,
    end,
    first_line,
    free_port,
    losses,
    newest_step,
    rank_processes,
    wait_for_step,
)

from megarun.batches import Batches
from megarun.checkpoint.manifest import list_checkpoints, read_manifest
from megarun.trainer import Trainer

ERROR = 2
BEFORE = 6  # steps of a run that is damaged: checkpoints after 4 and 6


class RefusedError(Exception):
    """This machine does not let the fault happen."""


def killed(bench: Bench, seed: int) -> Outcome:
    """kill -9 of one rank at a random moment; saves are under way at most of them."""
    draw = random.Random(seed)
    step, rank, delay = draw.randint(1, STEPS - 4), draw.randint(0, 1), draw.uniform(0, 0.1)
    out, said = bench.folder / f"killed-{seed}", bench.folder / f"killed-{seed}.txt"
    process = bench.launch(out, said)
    wait_for_step(out, step, process)
    time.sleep(delay)
    with contextlib.suppress(KeyError, ProcessLookupError):  # a machine so fast that the run is over
        os.kill(rank_processes(process.pid)[rank], signal.SIGKILL)
    seconds = end(process)
    saved = newest_step(out)
    happened = f"kill -9 of rank {rank} in step {step + 1} or later (seed {seed})"
    if saved == 0:  # nothing to go on from, and a run is never written over
        row = refused(bench, happened + ", before the first save", bench.words(bench.one, out), "MP608")
        return replace(row, steps_lost=max(losses(out)), seconds=seconds)
    resumed, lost = bench.resume(out, saved)
    return Outcome(happened, first_line(resumed, "resumed from"), lost, seconds)


def stopped(bench: Bench, number: signal.Signals, seed: int) -> Outcome:
    """A signal to the launcher at a random moment; no step is lost."""
    draw = random.Random(seed)
    step, delay = draw.randint(1, STEPS - 6), draw.uniform(0, 0.05)
    out, said = bench.folder / f"{number.name}-{seed}", bench.folder / f"{number.name}-{seed}.txt"
    process = bench.launch(out, said)
    wait_for_step(out, step, process)
    time.sleep(delay)
    process.send_signal(number)
    seconds = end(process)
    assert process.returncode != 0
    assert newest_step(out) == max(losses(out)) < STEPS
    _, lost = bench.resume(out, newest_step(out))
    assert lost == 0
    return Outcome(
        f"{number.name} to torchrun in step {step + 1} or later (seed {seed})", first_line(said.read_text(), "saved"), 0, seconds
    )


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "data file of the newest checkpoint truncated": ("__0_0.distcp", lambda path: os.truncate(path, path.stat().st_size - 100)),
    "a bit of its data file flipped": ("__0_0.distcp", flip),
    "its data file deleted": ("__0_0.distcp", Path.unlink),
    "a bit of its index flipped": ("index.json", flip),
    "its manifest truncated": ("manifest.json", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "its manifest deleted": ("manifest.json", Path.unlink),
}


def damaged(bench: Bench, what: str) -> Outcome:
    """The checkpoint before is used, and the damage said."""
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
        read = first_line(said, "resumed from")  # a folder without a manifest is no checkpoint
    return Outcome(what, read, lost, time.monotonic() - began)


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
    return Outcome("disk full during the second save", first_line(said, "error[MP645]"), lost, seconds)


def refused(bench: Bench, happened: str, words: list[str], code: str) -> Outcome:
    """A command that must end with one error and leave what is saved as it was."""
    status, said, seconds = bench.here(words)
    assert status == ERROR, said
    return Outcome(happened, first_line(said, f"error[{code}]"), None, seconds)


def rank_missing(bench: Bench) -> Outcome:
    """Rank 1 of 2 is never started."""
    status, said, seconds = bench.alone(bench.folder / "missing", free_port(), "--start-timeout", "3")
    assert status == ERROR, said
    assert "MP650" in said
    return Outcome("a rank never starts (--start-timeout 3)", first_line(said, "did not start", "no store"), None, seconds)


def port_in_use(bench: Bench) -> Outcome:
    """Another program listens where the processes should meet."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, said, seconds = bench.alone(bench.folder / "port", taken.getsockname()[1], "--start-timeout", "3")
    assert status == ERROR, said
    assert "MP650" in said
    return Outcome("the port of the meeting place is in use (--start-timeout 3)", first_line(said, "no store"), None, seconds)


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
    row = refused(bench, "the plan is made anew for another model after the checkpoint", bench.words(plan, out), "MP641")
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
            gradient.to_local().view(-1)[0] = torch.nan
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
    assert read_manifest(list_checkpoints(bench.folder / f"nan-{where}")[0]).course.skipped == ((3, 4),)
    return Outcome(f"NaN in {'what a batch computes' if where == 'data' else 'a gradient'}", first_line(said, "skipped batch"), 0, seconds)


Case = Callable[[Bench], Outcome]
SIGNALS = [(number, seed) for number in (signal.SIGTERM, signal.SIGINT) for seed in (1, 2)]
KILLS: dict[str, Case] = {f"kill -9, seed {seed}": (lambda bench, seed=seed: killed(bench, seed)) for seed in range(20)}
STOPS: dict[str, Case] = {f"{n.name}, seed {s}": (lambda bench, n=n, s=s: stopped(bench, n, s)) for n, s in SIGNALS}
QUICK: dict[str, Case] = {
    "NaN in data": lambda bench: not_finite(bench, "data"),
    "NaN in a gradient": lambda bench: not_finite(bench, "gradient"),
    **{what: (lambda bench, what=what: damaged(bench, what)) for what in DAMAGES},
    "disk full": disk_full,
    "wrong token file": wrong_tokens,
    "truncated token file": truncated_tokens,
    "plan edited by hand": edited_by_hand,
    "another model": another_model,
}
PROCESSES: dict[str, Case] = {"a rank never starts": rank_missing, "port in use": port_in_use}
