"""Trains a list of cases on the ranks that torchrun started, and saves what each case computed.

torchrun --nproc-per-node N layout_worker.py CASES.json OUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megaplan.inventory.build import build_inventory
from megaplan.layout.build import build_layout
from megaplan.spec.models import Spec
from megarun.batches import Batches
from megarun.job import Job
from megarun.launch import process_group, read_launch
from megarun.optim.muon import Muon
from megarun.parallel.mesh import build_mesh
from megarun.trainer import Trainer

CPU = torch.device("cpu")


class CountingRows:
    """Sequences that count upwards from a random start: a function of (step, seed), easy to learn."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        starts = np.random.default_rng((seed, step)).integers(0, self.vocab_size, size=(num_rows, 1))
        return (starts + np.arange(seq_length + 1)) % self.vocab_size


def build_job(case: dict[str, Any]) -> Job:
    spec = Spec.model_validate(case["spec"])
    inventory = build_inventory(spec)
    return Job(spec, inventory, build_layout(spec, inventory, [tuple(span) for span in case["spans"]]))


def train_case(case: dict[str, Any]) -> dict[str, Any]:
    """What this rank computed: initial parameters, gradients of the first batch, losses, final parameters; tensors whole."""
    job = build_job(case)
    mesh = build_mesh(job.spec.mesh, CPU)
    trainer = Trainer(job, mesh)
    batches = Batches(CountingRows(job.spec.model.vocab_size), job.spec, mesh)
    parameters = [named for stage in trainer.stages for named in stage.named_parameters()]
    initial = {name: _whole(p) for name, p in parameters}
    trainer.accumulate_gradients(*batches.at(0))
    gradients = {name: _whole(p.grad) for name, p in parameters}
    for _, parameter in parameters:
        parameter.grad = None
    results = [trainer.step(step, *batches.at(step)) for step in range(case["steps"])]
    return {
        "coordinate": mesh.coordinate,
        "initial": initial,
        "gradients": gradients,
        "losses": [result.loss for result in results],
        "norms": [result.gradient_norm for result in results],
        "parameters": {name: _whole(p) for name, p in parameters},
        "resident_bytes": trainer.resident_bytes(),
    }


def compare_muon() -> dict[str, list[torch.Tensor]]:
    """Three steps of Muon on whole and on sharded copies of odd shapes and a stack, side by side."""
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    shapes = [((5, 7), 1), ((6, 4), 3), ((3, 4, 6), 3), ((1, 8), 1)]
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape, _ in shapes]
    whole = [torch.nn.Parameter(start.clone()) for start in starts]
    sharded = [torch.nn.Parameter(distribute_tensor(start, mesh, [Shard(0)])) for start in starts]
    options = {"lr": 0.1, "weight_decay": 0.1, "moments_dtype": torch.float32, "iteration_dtype": torch.float32, "num_steps": 5}
    optimizers = [Muon(zip(params, (count for _, count in shapes), strict=True), **options) for params in (whole, sharded)]
    for _ in range(3):
        for a, b in zip(whole, sharded, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = distribute_tensor(a.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    return {"whole": [p.detach() for p in whole], "sharded": [_whole(p) for p in sharded]}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def main(cases: list[dict[str, Any]], out: Path) -> None:
    launch = read_launch()
    with process_group(launch, CPU):
        for case in cases:
            record = compare_muon() if case["name"] == "muon" else train_case(case)
            torch.save(record, out / f"{case['name']}.{launch.rank}.pt")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
