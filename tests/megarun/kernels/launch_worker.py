"""Trains a step of each spec on real tensors with the launches of Triton's interpreter, and saves them.

TRITON_INTERPRET=1 python launch_worker.py SPECS.json OUT, alone or under torchrun. Only kernels whose results are places are interpreted;
the others leave what is in memory, which decides no launch.
"""

import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from real_worker import experts_in_turn
from triton.runtime.interpreter import InterpretedFunction

from megaplan.plan.make import make_plan
from megaplan.spec.models import Spec
from megarun.engine.trainer import Trainer, sharded_stages
from megarun.job.job import Job
from megarun.kernels.launches import KernelLaunch, recorded
from megarun.launch.process_group import process_group, read_launch
from megarun.parallel.groups.mesh import build_mesh
from megarun.trace.rank import FINITE, empty_batch

PLACES = ("route_kernel", "count_kernel", "place_kernel", "ngram_rows_kernel")


class Unjudged(Trainer):
    """The trainer with finite losses: what is not interpreted has no values."""

    def read_all(self, values: torch.Tensor) -> list[float]:
        return [FINITE] * len(super().read_all(values))


def job_of(values: dict[str, Any]) -> Job:
    return Job.from_plan(make_plan(Spec.model_validate(values)))


def launches_of_step(job: Job) -> list[KernelLaunch]:
    found: list[KernelLaunch] = []
    interpret = InterpretedFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append(recorded(kernel, args, options))
        return interpret(kernel, *args, grid=grid, warmup=warmup, **options) if kernel.fn.__name__ in PLACES else None

    InterpretedFunction.run = run
    try:
        mesh = build_mesh(job.spec.mesh, torch.device("cpu"))
        trainer = Unjudged(job, mesh, sharded_stages(job, mesh))
        trainer.step(0, empty_batch(job, trainer))
    finally:
        InterpretedFunction.run = interpret
    return found


def main(specs: dict[str, Any], out: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    launch, device = read_launch(), torch.device("cpu")
    with process_group(launch, device):
        for name, values in specs.items():
            job = job_of(values)
            with experts_in_turn((0, 8) if job.spec.mesh.ep > 1 else None):  # as planned: the router has no values here
                found = launches_of_step(job)
            (out / f"{name}.{launch.rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
