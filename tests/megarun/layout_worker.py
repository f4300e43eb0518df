"""Trains a list of cases on the ranks that torchrun started, and saves each case's losses and final parameters.

torchrun --nproc-per-node N layout_worker.py CASES.json OUT
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.batches import Batches
from megarun.job import Job
from megarun.launch import process_group, read_launch
from megarun.parallel.mesh import build_mesh
from megarun.trainer import Trainer


class LearnableRows:
    """Sequences that count upwards from a random start: a function of (step, seed), easy to learn."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        starts = np.random.default_rng((seed, step)).integers(0, self.vocab_size, size=(num_rows, 1))
        return (starts + np.arange(seq_length + 1)) % self.vocab_size


def main(cases: list[dict], out: Path) -> None:
    launch = read_launch()
    with process_group(launch, torch.device("cpu")):
        for case in cases:
            spec = Spec.model_validate(case["spec"])
            inventory = build_inventory(spec)
            job = Job(spec, inventory, build_layout(spec, inventory, [tuple(span) for span in case["spans"]]))
            mesh = build_mesh(spec.mesh, torch.device("cpu"))
            trainer = Trainer(job, mesh)
            batches = Batches(LearnableRows(spec.model.vocab_size), spec, mesh)
            results = [trainer.step(step, *batches.at(step)) for step in range(case["steps"])]
            whole = {
                name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in trainer.stage.named_parameters()
            }
            if mesh.data_rank == 0:
                record = {
                    "losses": [r.loss for r in results],
                    "norms": [r.gradient_norm for r in results],
                    "parameters": whole,
                    "resident_bytes": trainer.resident_bytes(),
                }
                torch.save(record, out / f"{case['name']}.pp{mesh.coordinate['pp']}.pt")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
