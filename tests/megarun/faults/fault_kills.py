"""kill -9 at random times, inside of saves too, in every layout and storage of a matrix; the job then resumes in its own layout."""

import random
import shutil
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fault_bench import SAVE_EVERY, STEPS, Bench, losses, newest_step, wait_for_step
from fault_blame import blamed
from fault_launch import ALONE, TWO_STAGES, Job, layout_text
from fault_layouts import EXPERTS, FOUR, FOUR_EXPERTS, FOUR_TENSOR, SHARDED, TENSOR

from megaplan.spec.models import Mesh
from megarun.remote import any_path

FOLDER, STORAGE, LOST = "folder", "file://", "file://, --out lost"
"""Places of checkpoints: in --out; behind a URL of fsspec; there, and --out goes with the killed job."""
LAYOUTS = (ALONE, TWO_STAGES, SHARDED, TENSOR, EXPERTS, FOUR, FOUR_TENSOR, FOUR_EXPERTS, Mesh(dp_shard=2, tp=2))
CELLS = tuple(product(LAYOUTS, (FOLDER, STORAGE, LOST)))
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
        victim: The killed rank, or all.
        in_save: True if a save had begun and was not complete.
        made: Steps that had been made.
        saved: Step of the newest complete checkpoint; 0 if there was none.
        lost: Steps that were made again.
        seconds: Seconds from the kill to the end of the last process.
    """

    number: int
    layout: str
    ranks: int
    storage: str
    victim: str
    in_save: bool
    made: int
    saved: int
    lost: int
    seconds: float


def kill(bench: Bench, seed: int, number: int) -> Kill:
    """One kill of a seed; the cells of the matrix take turns.

    Raises:
        AssertionError: The job does not end, blames a rank that was not killed, or does not resume from its newest complete checkpoint
            with the losses of a job that nothing interrupts.
    """
    draw = random.Random(f"{seed} {number}")
    mesh, storage = CELLS[number % len(CELLS)]
    folder = bench.folder / f"kill-{seed}-{number}"
    out, said, url = folder / "run", folder / "said.txt", f"file://{folder}/storage"
    folder.mkdir()
    more = [] if storage == FOLDER else ["--checkpoint-url", url]
    saves = out if storage == FOLDER else any_path(url)
    bench.expected_of(mesh)
    job = bench.forks.start([*bench.words(bench.plan_of(mesh), out), *more], said, mesh)
    _wait(job, out, draw)
    chosen = range(mesh.world_size) if draw.random() < 1 / 3 else [draw.randrange(mesh.world_size)]
    for rank in chosen:
        job.kill(rank)
    time.sleep(draw.uniform(0, NOTICED_SECONDS))
    job.terminate()
    seconds = job.end()
    assert blamed(said.read_text()) <= set(chosen), said.read_text()
    made, saved, in_save = max(losses(out), default=0), newest_step(saves), _in_save(out)
    assert job.status != 0 or made == STEPS, said.read_text()
    if storage == LOST:
        shutil.rmtree(out)
    if saved or storage == LOST:
        start = bench.resume_from(out, mesh, *more)
        assert start == saved, f"resumed after {start} steps, and {saved} were saved"
        assert made - start <= MOST_LOST or saved == 0
    else:  # nothing to resume from, and a run is never overwritten
        status, text, _ = bench.here([*bench.words(bench.one, out), *more])
        assert status, text
        assert "MP608" in text, text
    shutil.rmtree(folder)
    victim = "all" if len(chosen) == mesh.world_size else f"rank {chosen[0]}"
    return Kill(number, layout_text(mesh), mesh.world_size, storage, victim, in_save, made, saved, max(0, made - saved), seconds)


def _wait(job: Job, out: Path, draw: random.Random) -> None:
    """Waits until a random time: after a step, or, as often, after a save has begun."""
    wait_for_step(out, draw.randint(1, STEPS - 4), job)
    if draw.random() < 1 / 2:
        time.sleep(draw.uniform(0, 0.3))
        return
    end = time.monotonic() + 2
    while not _in_save(out) and job.poll() is None and time.monotonic() < end:
        time.sleep(0.0005)
    time.sleep(draw.uniform(0, 0.06))


def _in_save(out: Path) -> bool:
    """True if the folder of a save, or what is staged for an upload, is there and not complete."""
    return any(out.glob("checkpoints/.step-*.partial/*")) or any(out.glob("upload/rank-*/step-*"))
