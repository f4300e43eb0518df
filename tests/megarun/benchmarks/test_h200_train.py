"""The GPU benchmark of training: its plans are legal and of the size it says, its sums are right, and without a GPU it measures nothing."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[3]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("benchmarks/accuracy", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module("h200_train")


def test_each_plan_runs_with_kernels_and_without_eager_and_compiled(benchmark: Any) -> None:
    cases = {case.name: case for case in importlib.import_module("matrix").cases(matrix=benchmark.PLANS)}
    assert benchmark.all_runs() == [name + how for name in cases for how in ("", ", compiled")]
    for name in ("hybrid", "mamba2"):
        plain, kernels = cases[name], cases[f"{name}-kernels"]
        assert [case.job.spec.host.kernels for case in (plain, kernels)] == ["reference", "triton"]
        assert plain.job.spec.model == kernels.job.spec.model
        assert plain.budget.fits
        assert kernels.budget.worst.allocated_bytes < plain.budget.worst.allocated_bytes
        assert 1.0e9 < plain.budget.worst.parameters < 2.0e9
    batch = cases["mamba2"].job.spec.batch
    assert (batch.micro_batch_size, batch.seq_length) == (4, 4096)


def test_rates_are_of_the_steps_after_the_first(benchmark: Any) -> None:
    found = {"seconds": [9.0, 2.0, 4.0, 3.0], "step_tokens": 600, "flops_per_token": 5e9, "peak_flops": 1e13}
    found["phases"] = {"init": {"allocated": 70}, "forward_backward": {"allocated": 200}}
    found["estimate"] = {"init": {"allocated": 80}, "forward_backward": {"allocated": 190}}
    rates = benchmark.rates(found, 1)
    assert (rates["step_seconds"], rates["tokens_per_second"]) == (3.0, 200)
    assert (rates["tflop_per_second"], rates["mfu"]) == (1.0, 0.1)
    assert (rates["peak_bytes"], rates["estimate_bytes"], round(rates["peak_error"], 6)) == (200, 190, -0.05)
    nothing = benchmark.rates(found | {"phases": {"init": {"allocated": None}}}, 1)
    assert (nothing["mfu"], nothing["peak_bytes"], nothing["peak_error"]) == (None, None, None)


def test_a_run_that_fails_is_kept_as_such(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark, "RESULT", tmp_path / "result.json")
    benchmark.keep("hybrid", {"failure": "out of memory"}, "2026-01-01")
    benchmark.keep("mamba2", {"failure": "stopped after 280 s"}, "2026-01-02")
    kept = benchmark.json.loads((tmp_path / "result.json").read_text())
    assert [kept[name]["failure"] for name in ("hybrid", "mamba2")] == ["out of memory", "stopped after 280 s"]
    assert not benchmark.report("hybrid", kept["hybrid"])


def test_without_a_gpu_nothing_is_written(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("sys.argv", ["h200_train.py"])
    monkeypatch.setattr(benchmark, "RESULT", tmp_path / "result.json")
    assert benchmark.main() == 2
    assert not (tmp_path / "result.json").exists()


@pytest.mark.slow
def test_the_harness_runs_without_a_gpu() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks/h200_train.py"), "--cpu"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["tiny-hybrid", "tiny-hybrid-kernels"]
