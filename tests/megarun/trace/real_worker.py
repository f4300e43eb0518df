"""Traces every rank that torchrun started, on real tensors, several times, and saves what each found.

torchrun --nproc-per-node N real_worker.py CASES.json OUT
"""

import json
import pickle
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.job.job import Job
from megarun.launch.process_group import process_group, read_launch
from megarun.model import moe
from megarun.parallel.groups.mesh import build_mesh
from megarun.trace.rank import trace_process


def build_job(case: dict[str, Any]) -> Job:
    spec = Spec.model_validate(case["spec"])
    inventory = build_inventory(spec)
    return Job(spec, inventory, build_layout(spec, inventory, [tuple(span) for span in case["spans"]]))


@contextmanager
def experts_in_turn(among: tuple[int, int] | None) -> Iterator[None]:
    """Let tokens choose experts of a half-open range in turn, which a trace can state; None leaves the choice to the router."""
    if among is None:
        yield
        return
    first, stop = among
    route = moe.route

    def route_in_turn(x: torch.Tensor, weight: torch.Tensor, top_k: int, *rest: Any, **choice: Any) -> tuple[torch.Tensor, ...]:
        weights, _, probs = route(x, weight, top_k, *rest, **choice)
        turns = torch.arange(x.shape[0], dtype=torch.int32)[:, None] + torch.arange(top_k, dtype=torch.int32)
        return weights, turns % (stop - first) + first, probs

    moe.route = route_in_turn
    try:
        yield
    finally:
        moe.route = route


def main(cases: list[dict[str, Any]], out: Path) -> None:
    warnings.simplefilter("ignore")
    launch, device = read_launch(), torch.device("cpu")
    with process_group(launch, device):
        for case in cases:
            job = build_job(case)
            mesh = build_mesh(job.spec.mesh, device)
            with experts_in_turn(case.get("experts")):
                found = [trace_process(job, mesh, with_values=True) for _ in range(case["repeats"])]
            (out / f"{case['name']}.{launch.rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
