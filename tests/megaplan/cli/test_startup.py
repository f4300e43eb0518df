"""Modules that `estimate` loads; NO_COLOR and pipes get plain text."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # megaplan and megakernels of one checkout


def loaded_by(*words: str) -> set[str]:
    code = f"import sys; from megaplan.cli.main import run; run({list(words)!r}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=ENVIRONMENT)
    return set(done.stderr.splitlines()[-1].split())


OF_SERVING = {"megaplan.post_training", "megaplan.post_training.engines"}
"""Modules that a spec with `serving` needs."""


@pytest.mark.parametrize(
    "words", [["plans/nam56r-8xh200.yaml"], ["plans/mixtral-8x7b.yaml", "--set", "host={name: megatron}"]], ids=["megarun", "megatron"]
)
def test_estimate_loads_neither_torch_nor_numpy_nor_scipy_nor_rich(words):
    modules = loaded_by("estimate", *words)
    assert "megaplan.budget.peaks" in modules
    assert not [name for name in modules if "post_training" in name and name not in OF_SERVING]
    heavy = {"torch", "numpy", "scipy", "triton", "rich", "megarun"}
    assert heavy & {name.partition(".")[0] for name in modules} == set()


def test_the_version_needs_no_model():
    modules = loaded_by("--version")
    assert not any(name.startswith(("megaplan.spec", "megaplan.budget", "yaml")) for name in modules)


def test_output_into_a_pipe_is_plain():
    command = [sys.executable, "-m", "megaplan", "estimate", "plans/nam56r-8xh200.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=ENVIRONMENT)
    assert "\x1b" not in done.stdout + done.stderr
