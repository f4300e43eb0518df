"""Faults of ranks that neither end nor continue: the job ends within its time limit, and the stuck rank is the one that is named."""

import contextlib
import os
import re
import signal
import time

from fault_bench import Bench, Case, Outcome, first_line, losses, newest_step, resume_layout, wait_for_step
from fault_launch import TWO_STAGES, Job, layout_text, rank_text

from megaplan.spec.models import Mesh

STEP_TIMEOUT = 4
HANG_AFTER = 5
LIMITS = ("--step-timeout", str(STEP_TIMEOUT))
HANGING = """
import os, sys, time
from pathlib import Path
marker, rank = Path(sys.argv.pop(1)), sys.argv.pop(1)
import megarun.data.batches as batches
real, times = batches.Batches.at, [0]
def at(self, step):
    times[0] += 1
    if times[0] == %d and os.environ["RANK"] == rank:
        marker.touch()
        time.sleep(3600)
    return real(self, step)
batches.Batches.at = at
from megarun.cli.main import run
from megarun.launch.failure import exit_process
exit_process(run())
"""


def _ended(bench: Bench, out: str, happened: str, rank: int, seconds: float, job: Job, text: str, mesh: Mesh) -> Outcome:
    """One error, and it names the stuck rank; nothing past the last checkpoint is lost."""
    assert job.status != 0
    assert text.count("error[MP660]") == 1, text
    read = re.sub(r" on \S+, process \d+", "", first_line(text, f"{rank_text(rank, mesh)} on"))
    saved, made = newest_step(bench.folder / out), max(losses(bench.folder / out))
    bench.resume(bench.folder / out, saved, resume_layout(mesh))
    return Outcome(happened, f"error[MP660]: …: {re.sub(r'[0-9]+ s', 'N s', read)}", made - saved, seconds, job.status)


def stopped_process(bench: Bench, rank: int, mesh: Mesh = TWO_STAGES, nodes: int = 1) -> Outcome:
    """SIGSTOP: the process is there and does nothing, also no thread of it."""
    name = f"stopped-{rank}-{layout_text(mesh)}-{nodes}".replace(" ", "-")
    out, said = bench.folder / name, bench.folder / f"{name}.txt"
    job = bench.launch(out, said, *LIMITS, mesh=mesh, nodes=nodes)
    wait_for_step(out, HANG_AFTER, job)
    stopped = job.ranks()[rank]
    os.kill(stopped, signal.SIGSTOP)
    try:
        seconds = job.end()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
    happened = f"SIGSTOP to rank {rank} (--step-timeout {STEP_TIMEOUT})"
    return _ended(bench, name, happened, rank, seconds, job, said.read_text(), mesh)


def hanging(bench: Bench, rank: int, *, signalled: bool) -> Outcome:
    """A rank does not return from reading a batch; without a time limit that comes soon, SIGTERM ends it."""
    name = f"hanging-{rank}-{signalled}"
    out, said, program, marker = (bench.folder / f"{name}{suffix}" for suffix in ("", ".txt", ".py", ".here"))
    program.write_text(HANGING % HANG_AFTER)
    more = () if signalled else LIMITS
    process = bench.launch(out, said, *more, program=[str(program), str(marker), str(rank)])
    process.wait_for(marker.exists, "the hang")
    if signalled:
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
    seconds = process.end()
    happened = f"rank {rank} hangs while it reads a batch" + (", then SIGTERM to torchrun" if signalled else f" ({' '.join(LIMITS)})")
    if signalled and "error[MP660]" not in said.read_text():  # torchrun has killed it 30 s after the signal
        raise AssertionError(said.read_text())
    return _ended(bench, name, happened, rank, seconds, process, said.read_text(), TWO_STAGES)


HANGS: dict[str, Case] = {
    **{f"SIGSTOP of rank {rank}": (lambda bench, rank=rank: stopped_process(bench, rank)) for rank in range(2)},
    **{f"rank {rank} hangs": (lambda bench, rank=rank: hanging(bench, rank, signalled=False)) for rank in range(2)},
    "rank 1 hangs, and SIGTERM": lambda bench: hanging(bench, 1, signalled=True),
}
