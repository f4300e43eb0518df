"""kill -9 in every phase of a job, at random times, in every layout and storage of a matrix; the job then resumes in its own layout."""

import random
import shutil
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fault_aim import SelfKill
from fault_bench import SAVE_EVERY, STEPS, Bench, losses, made_steps, newest_step, wait_for_step
from fault_blame import blamed
from fault_launch import ALONE, START_LIMIT_SECONDS, TWO_STAGES, Job, layout_text
from fault_layouts import EXPERTS, FOUR, FOUR_EXPERTS, FOUR_TENSOR, SHARDED, TENSOR
from fault_memory import NODE, PROCESS, recoveries

from megaplan.spec.models import Mesh
from megarun.remote import any_path

FOLDER, FUSE, STORAGE, S3 = "folder", "folder on FUSE", "file://", "s3://"
LOST, LOST_S3 = f"{STORAGE}, --out lost", f"{S3}, --out lost"
"""Places of checkpoints: in --out; behind a URL of fsspec; there, and --out goes with the killed job."""
LAYOUTS = (ALONE, TWO_STAGES, SHARDED, TENSOR, EXPERTS, FOUR, FOUR_TENSOR, FOUR_EXPERTS, Mesh(dp_shard=2, tp=2))
STORAGES = (FOLDER, FUSE, STORAGE, LOST, S3, LOST_S3)
CELLS = tuple(product(LAYOUTS, STORAGES))
ANY_TIME, ANY_SAVE, START, RESTART = "any time", "a save that has begun", "the start", "a restart"
EVALUATION, REMOVAL, UPLOAD, COMPILE = "an evaluation", "the removal of old checkpoints", "an upload", "a compilation"
AIMED = {
    "the building of stages": (1, 1),
    "a step": (1, STEPS - 2),
    "an update": (1, STEPS - 2),
    EVALUATION: (1, 4),
    "the copy of a save": (1, 4),
    "the writing of a save": (1, 4),
    "the commit of a save": (1, 4),
    REMOVAL: (3, 5),
    UPLOAD: (1, 8),
}
"""Places at which a rank ends itself, with the range of the entry's number."""
BY_FIRST_RANK = ("the commit of a save", REMOVAL)
COMPILATIONS = {COMPILE: (1, 2)}
"""The same, of jobs with `--compile`."""
PHASES = (ANY_TIME, ANY_SAVE, START, RESTART, *AIMED, COMPILE)
AGAIN = ("the building of stages", "the loading of a checkpoint", "a step")
"""Places of a restart."""
COMPILED = (ALONE, TWO_STAGES, SHARDED)
"""Layouts whose blocks are compiled in a kill of that phase."""
COMMAND, RESTARTED, MEMORY = "the same command", "torchrun --max-restarts", "--memory-copies"
RECOVERIES = {9: RESTARTED, 29: RESTARTED, 39: MEMORY}
"""Recovery of a kill by its number modulo `TURN`; the same command else."""
TURN = 40
START_SECONDS = 1.5
NOTICED_SECONDS = 0.1  # until torchrun signals the other ranks
MOST_LOST = 2 * SAVE_EVERY
"""A save is written while training continues, and the next one waits for it."""


@dataclass(frozen=True)
class Kill:
    """Outcome of a kill.

    Attributes:
        number: Number of the kill among those of a seed.
        layout: Degrees of the mesh.
        ranks: Processes of the job.
        storage: Place of the checkpoints.
        recovery: Command that continued the job.
        victim: The killed rank, or all.
        phase: Phase that the kill was aimed at.
        in_save: True if a save had begun and was not complete.
        made: Steps that had been made.
        saved: Step of the newest complete checkpoint; 0 if there was none.
        lost: Steps that were made again.
        seconds: Seconds from the kill to the end of the last process; to the next step, where the job itself continues.
    """

    number: int
    layout: str
    ranks: int
    storage: str
    recovery: str
    victim: str
    phase: str
    in_save: bool
    made: int
    saved: int
    lost: int
    seconds: float


def kill(bench: Bench, seed: int, number: int) -> Kill:
    """One kill of a seed; the cells of the matrix take turns, and phases are drawn.

    Raises:
        AssertionError: The job does not end, blames a rank that was not killed, or does not resume from its newest complete checkpoint
            with the losses of a job that nothing interrupts.
    """
    draw = random.Random(f"{seed} {number}")
    mesh, storage = CELLS[number % len(CELLS)]
    recovery = RECOVERIES.get(number % TURN, COMMAND)
    if recovery != COMMAND:
        return _continued(bench, seed, number, mesh if mesh.world_size > 1 else TWO_STAGES, recovery)
    inside, lost_out = storage in (FOLDER, FUSE), storage in (LOST, LOST_S3)
    unmet = {UPLOAD} if inside else set()
    phase = draw.choice([each for each in PHASES if each not in unmet | ({COMPILE} if mesh not in COMPILED else set())])
    folder = (bench.places[FUSE] if storage == FUSE else bench.folder) / f"kill-{seed}-{number}"
    out, url = folder / "run", f"s3://{bench.places[S3]}/{folder.name}" if storage in (S3, LOST_S3) else f"file://{folder}/storage"
    folder.mkdir()
    more = [] if inside else ["--checkpoint-url", url]
    if phase == EVALUATION:
        more += ["--eval-data", str(bench.tokens), "--eval-every", "2", "--eval-batches", "1"]
    compiled = phase == COMPILE
    more += ["--compile"] * compiled
    saves = out if inside else any_path(url)
    bench.expected_of(mesh, compiled)
    victims: set[int] = set()
    made, seconds, in_save = 0, 0.0, False
    for each in (ANY_TIME, RESTART) if phase == RESTART else (phase,):
        killed = _killed(bench, mesh, [*bench.words(bench.plan_of(mesh), out), *more], out, each, draw)
        victims |= killed.victims
        seconds, in_save, made = max(seconds, killed.seconds), _in_save(out), max(made, *losses(out), 0)
        assert killed.status != 0 or made == STEPS, killed.said
        if lost_out and out.exists():
            shutil.rmtree(out)
        saved = newest_step(saves)
        if not saved and not lost_out:
            break  # nothing to restart from
    if saved or lost_out or not losses(out):
        start = bench.resume_from(out, mesh, *more)
        assert start == saved, f"resumed after {start} steps, and {saved} were saved"
        assert made - start <= MOST_LOST or saved == 0
    else:  # nothing to resume from, and a run is never overwritten
        status, text, _ = bench.here([*bench.words(bench.one, out), *more])
        assert status, text
        assert "MP608" in text, text
    shutil.rmtree(folder, ignore_errors=storage == FUSE)  # a server may learn of a last close later
    victim = "all" if len(victims) == mesh.world_size else " and ".join(f"rank {rank}" for rank in sorted(victims))
    counts = in_save, made, saved, max(0, made - saved), seconds
    return Kill(number, layout_text(mesh), mesh.world_size, storage, recovery, victim, phase, *counts)


def _continued(bench: Bench, seed: int, number: int, mesh: Mesh, recovery: str) -> Kill:
    """A kill of a job that continues by itself: its ranks start again, from the newest checkpoint or from copies in memory."""
    draw, layout = random.Random(f"{seed} {number} continued"), layout_text(mesh)
    if recovery == MEMORY:
        (found,) = recoveries(bench, mesh, [draw.choice((PROCESS, NODE))], seed=1000 * seed + number)
        assert found.lost <= 1, found
        place = FOLDER, recovery, found.victim, ANY_TIME, False
        return Kill(number, layout, mesh.world_size, *place, found.made, found.made - found.lost, found.lost, found.seconds)
    folder, rank = bench.folder / f"kill-{seed}-{number}", draw.randrange(mesh.world_size)
    folder.mkdir()
    out, said = folder / "run", folder / "said.txt"
    bench.expected_of(mesh)
    job = bench.launch(out, said, mesh=mesh, meeting=("--standalone", "--max-restarts", "1"))
    job.wait_for(lambda: newest_step(out) > 0, "a checkpoint")
    time.sleep(draw.uniform(0, 0.3))
    in_save = _in_save(out)
    job.kill(rank)
    began = time.monotonic()
    time.sleep(NOTICED_SECONDS)  # a line that was being written is read
    saved, before = newest_step(out), made_steps(out)
    while job.poll() is None and len(made_steps(out)) == len(before):
        time.sleep(0.01)
    seconds, made = time.monotonic() - began, before[-1][0]
    job.end(START_LIMIT_SECONDS)
    assert job.status == 0, said.read_text()
    assert losses(out) == bench.expected_of(mesh)
    after = made_steps(out)[len(before) :]
    lost = made + 1 - after[0][0] if after else 0
    assert lost <= MOST_LOST, f"{lost} steps lost"
    shutil.rmtree(folder)
    return Kill(number, layout, mesh.world_size, FOLDER, recovery, f"rank {rank}", ANY_TIME, in_save, made, saved, lost, seconds)


@dataclass(frozen=True)
class _Killed:
    victims: set[int]
    status: int
    said: str
    seconds: float


def _killed(bench: Bench, mesh: Mesh, words: list[str], out: Path, phase: str, draw: random.Random) -> _Killed:
    """Start a job and kill one or all of its ranks in a phase."""
    said, struck = out.parent / f"said-{len(list(out.parent.iterdir()))}.txt", out.parent / "struck"
    struck.unlink(missing_ok=True)
    rank = draw.randrange(mesh.world_size)
    chosen = set(range(mesh.world_size)) if draw.random() < 1 / 3 else {rank}
    self_kills = {}
    entries = AIMED | COMPILATIONS
    if phase in entries or phase == RESTART:
        place = draw.choice(AGAIN) if phase == RESTART else phase
        rank = 0 if place in BY_FIRST_RANK else rank
        chosen = chosen if len(chosen) > 1 else {rank}
        self_kills = {
            rank: SelfKill(place, draw.randint(*entries.get(place, (1, 1))) if phase != RESTART else 1, draw.uniform(0, 0.02), struck)
        }
    job = bench.forks.start(words, said, mesh, self_kills)
    if self_kills:
        end = time.monotonic() + START_LIMIT_SECONDS
        while not struck.exists() and job.poll() is None and time.monotonic() < end:
            time.sleep(0.0005)
        if len(chosen) == 1:
            while struck.exists() and rank in job.ranks() and time.monotonic() < end:
                time.sleep(0.0005)
    else:
        _wait(job, out, phase, draw)
    for each in chosen:
        job.kill(each)
    time.sleep(draw.uniform(0, NOTICED_SECONDS))
    job.terminate()
    seconds = job.end()
    text = said.read_text() if said.exists() else ""
    assert blamed(text) <= chosen, text
    return _Killed(chosen, job.status, text, seconds)


def _wait(job: Job, out: Path, phase: str, draw: random.Random) -> None:
    """Waits until a random time: of the start, after a step, or after a save has begun."""
    if phase == START:
        time.sleep(draw.uniform(0, START_SECONDS))
        return
    wait_for_step(out, draw.randint(1, STEPS - 4), job)
    if phase == ANY_TIME:
        time.sleep(draw.uniform(0, 0.3))
        return
    end = time.monotonic() + 2
    while not _in_save(out) and job.poll() is None and time.monotonic() < end:
        time.sleep(0.0005)
    time.sleep(draw.uniform(0, 0.06))


def _in_save(out: Path) -> bool:
    """True if the folder of a save, or what is staged for an upload, is there and not complete."""
    return any(out.glob("checkpoints/.step-*.partial/*")) or any(out.glob("upload/rank-*/step-*"))
