"""Small jobs to trace."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarun.job.job import Job

sys.path.insert(0, str(Path(__file__).parent))  # trace_checks
ROOT = Path(__file__).parents[3]
BF16 = {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32", "reduce": "fp32"}


def even_spans(spec: dict[str, Any]) -> list[list[int]]:
    """Layers of each slot."""
    mesh, num_layers = spec.get("mesh", {}), spec["model"]["num_layers"]
    slots = mesh.get("pp", 1) * mesh.get("vpp", 1)
    return [[index * num_layers // slots, (index + 1) * num_layers // slots] for index in range(slots)]


@pytest.fixture(scope="session")
def spans_of() -> Callable[[dict[str, Any]], list[list[int]]]:
    """Cuts a spec evenly."""
    return even_spans


@pytest.fixture(scope="session")
def worker() -> Any:
    """The module that torchrun runs, imported here for the jobs it builds."""
    loader = importlib.util.spec_from_file_location("real_worker", Path(__file__).with_name("real_worker.py"))
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def job_with(spec_with: Any, worker: Any) -> Callable[..., Job]:
    """The small hybrid (A M E D R) with dotted keys replaced, cut evenly."""

    def build(overrides: dict[str, Any] | None = None) -> Job:
        spec = spec_with(overrides)
        job: Job = worker.build_job({"spec": spec, "spans": even_spans(spec)})
        return job

    return build


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Environment of a process that must find this project."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"}


@pytest.fixture(autouse=True)
def quiet_torch() -> Any:
    """Two threads fight over two cores for tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
