"""Kills in each place of a job in two layouts, kills of a job that starts again, and losses that copies in memory make good."""

import random
from dataclasses import replace

from fault_aim import SelfKill
from fault_bench import Bench, Case, Outcome, losses, newest_step, refused, resume_layout
from fault_blame import blamed
from fault_kills import AGAIN, AIMED, BY_FIRST_RANK, EVALUATION, UPLOAD
from fault_launch import START_LIMIT_SECONDS, TWO_STAGES, layout_text, rank_text
from fault_layouts import FOUR, SHARDED, TENSOR
from fault_memory import NODE, PROCESS, RESUMED, recoveries

from megaplan.spec.models import Mesh

LAYOUTS = (TENSOR, FOUR)
BEFORE = 4
STEPS_OF_STRIKE = 6


def killed_inside(bench: Bench, place: str, mesh: Mesh, restarted: bool = False) -> Outcome:
    """A rank ends inside of a place, of the job's first start or of its second one; the others end, and the job resumes."""
    draw = random.Random(f"{place} {layout_text(mesh)}")
    rank = 0 if place in BY_FIRST_RANK else draw.randrange(mesh.world_size)
    name = f"killed_inside-{place}-{layout_text(mesh)}-{restarted}".replace(" ", "-")
    out, said = bench.folder / name, bench.folder / f"{name}.txt"
    more = ["--eval-data", str(bench.tokens), "--eval-every", "2", "--eval-batches", "1"] if place == EVALUATION else []
    words = [*bench.words(bench.plan_of(mesh), out), *more]
    bench.expected_of(mesh)
    if restarted:
        status, text = bench.forked(mesh, [*words, "--steps", str(BEFORE)])
        assert status == 0, text
    first, last = (1, 1) if restarted else AIMED[place]
    times = min(max(2, first), last) if last < STEPS_OF_STRIKE else STEPS_OF_STRIKE
    job = bench.fork(words, said, mesh, {rank: SelfKill(place, times, draw.uniform(0, 0.01), bench.folder / f"{name}-struck")})
    job.wait_for(lambda: rank not in job.ranks(), f"the end of rank {rank}")
    job.terminate()
    seconds = job.end(START_LIMIT_SECONDS)
    assert (bench.folder / f"{name}-struck").exists()
    assert blamed(said.read_text()) <= {rank}, said.read_text()
    happened = f"kill -9 of {rank_text(rank, mesh)} inside of {place}{' of a restart' if restarted else ''}"
    made, saved = max(losses(out), default=0), newest_step(out)
    if made and not saved:
        row = refused(bench, f"{happened}, before the first save", bench.words(bench.one, out), "MP608")
        return replace(row, steps_lost=made, seconds=seconds, status=job.status)
    start = bench.resume_from(out, resume_layout(mesh), *more)
    assert start == saved
    read = f"resumed from step-{saved:08d}, {saved} steps done" if saved else "a new start"
    return Outcome(happened, read, max(0, made - start) if made else None, seconds, job.status)


def lost(bench: Bench, mesh: Mesh, victim: str) -> Outcome:
    """A process or a node is lost between two steps; its job continues from copies in memory without any other command."""
    bench.note_size(mesh.world_size, 2)
    (found,) = recoveries(bench, mesh, [victim], seed=len(victim))
    assert found.lost <= 1
    happened = f"kill -9 of {found.victim} under --memory-copies: seconds to the next step"
    return Outcome(happened, f"{RESUMED}, {found.made - found.lost} steps done", found.lost, found.seconds, 0)


ENDS: dict[str, Case] = {
    **{
        f"kill -9 inside of {place}, {layout_text(mesh)}": (lambda bench, a=place, b=mesh: killed_inside(bench, a, b))
        for mesh in LAYOUTS
        for place in AIMED
        if place != UPLOAD
    },
    **{
        f"kill -9 inside of {place} of a restart": (lambda bench, a=place: killed_inside(bench, a, TWO_STAGES, restarted=True))
        for place in AGAIN
    },
    **{
        f"{victim} lost, copies in memory, {layout_text(mesh)}": (lambda bench, a=mesh, b=victim: lost(bench, a, b))
        for mesh in (SHARDED, FOUR)
        for victim in (PROCESS, NODE)
    },
}
