"""The GPU benchmark of memory: its plans are legal and large enough, and without a GPU it trains and measures nothing."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[2]
GIB = 2**30


def matrix() -> Any:
    loader = importlib.util.spec_from_file_location("h200_matrix", ROOT / "benchmarks/accuracy/matrix.py")
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    sys.modules[loader.name] = module
    loader.loader.exec_module(module)
    return module


def test_plans_fill_a_good_part_of_one_gpu() -> None:
    cases = list(matrix().cases(matrix=ROOT / "benchmarks/h200/memory.yaml"))
    assert len(cases) >= 10
    for case in cases:
        assert case.job.spec.mesh.world_size == 1
        assert 15 * GIB < case.budget.worst.allocated_bytes < 110 * GIB
        assert case.budget.fits
    families = {block.family.value for case in cases for block in case.job.inventory.layers}
    assert families == set("AMERD")


def test_without_a_gpu_three_steps_run_and_no_number_is_made_up() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks/h200_memory.py")]
    done = subprocess.run([*command, "--cpu-check"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "phases init, first_forward_backward, first_optimizer, forward_backward, optimizer" in done.stdout
    assert "no memory is measured" in done.stdout
    refused = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
