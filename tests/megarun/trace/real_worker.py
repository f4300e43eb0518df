"""Traces every rank that torchrun started, on real tensors, several times, and saves what each found.

torchrun --nproc-per-node N real_worker.py CASES.json OUT
"""

import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.job import Job
from megarun.launch import process_group, read_launch
from megarun.parallel.mesh import build_mesh
from megarun.trace.rank import trace_process


def build_job(case: dict[str, Any]) -> Job:
    spec = Spec.model_validate(case["spec"])
    inventory = build_inventory(spec)
    return Job(spec, inventory, build_layout(spec, inventory, [tuple(span) for span in case["spans"]]))


def main(cases: list[dict[str, Any]], out: Path) -> None:
    warnings.simplefilter("ignore")
    launch, device = read_launch(), torch.device("cpu")
    with process_group(launch, device):
        for case in cases:
            job = build_job(case)
            found = [trace_process(job, build_mesh(job.spec.mesh, device), with_values=True) for _ in range(case["repeats"])]
            (out / f"{case['name']}.{launch.rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
