"""Steps that the tests of compiled kernels run in their own processes, which fork and change Triton's driver.

python compile_steps.py NAMES PLAN
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megarun.job.run import read_job
from megarun.kernels.ahead import KernelsAhead, Outcome
from megarun.kernels.cache import cache_folder, settle
from megarun.kernels.command import look_up
from megarun.kernels.target import Target

HOPPER = Target((9, 0), 132)


def ahead(plan: str, before: Callable[[KernelsAhead], None] = lambda _: None, *, local_ranks: int = 1) -> list[Any]:
    """The outcome of every rank of a machine, and what was shown on the way."""
    job, _ = read_job(plan, None)
    store, shown = dist.HashStore(), []  # type: ignore[attr-defined]
    os.environ["LOCAL_WORLD_SIZE"] = str(local_ranks)
    found: list[Outcome] = []
    ranks = []
    for rank in range(local_ranks):
        os.environ["LOCAL_RANK"] = str(rank)
        ranks.append(KernelsAhead(job, 2))
        ranks[-1].begin_for(HOPPER, rank)
    before(ranks[0])
    for rank, kernels in enumerate(ranks):
        os.environ["LOCAL_RANK"] = str(rank)
        found.append(kernels.finish(store, rank, lambda: False, lambda done, known: shown.append((done, known))))
        kernels.close()
    return [[each._asdict() for each in found], shown]


def threaded(plan: str) -> list[Any]:
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    try:
        return ahead(plan)
    finally:
        over.set()


def stopped(plan: str) -> Any:
    """The run was asked to stop before its kernels were there; its compiler ends with it."""
    job, _ = read_job(plan, None)
    kernels = KernelsAhead(job, 1)
    kernels.begin_for(HOPPER, 0)
    process = kernels._process.pid
    outcome = kernels.finish(dist.HashStore(), 0, lambda: True, lambda *_: None)  # type: ignore[attr-defined]
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return [outcome.error, "ended"]
    return [outcome.error, "runs"]


def moved(plan: str) -> Any:
    """Kernels of the plan in a cache that was made elsewhere: before and after its entries are settled, and of all."""
    job, _ = read_job(plan, None)
    before, found = look_up(job, HOPPER)
    changed = settle(cache_folder())
    return [before, look_up(job, HOPPER)[0], found, changed > 0, settle(cache_folder())]


STEPS: dict[str, Callable[[str], Any]] = {
    "moved": moved,
    "ranks": lambda plan: ahead(plan, local_ranks=2),
    "killed": lambda plan: ahead(plan, lambda kernels: os.kill(kernels._process.pid, signal.SIGKILL)),
    "threaded": threaded,
    "stopped": stopped,
}

if __name__ == "__main__":
    print(json.dumps({name: STEPS[name](sys.argv[2]) for name in sys.argv[1].split(",")}))  # noqa: T201  read by the test
