"""The GPU benchmark of the kernels: what can be held without a GPU."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("h200_kernels")


def test_small_cases_are_right_and_counted(benchmark: Any) -> None:
    rows = benchmark.check_on_cpu(benchmark.cases(small=True))
    assert {row["case"].split()[0] for row in rows} >= {"rms_norm", "gated_rms_norm", "swiglu", "relu2", "ssd", "m2rnn"}
    swiglu = next(row for row in rows if row["case"].startswith("swiglu"))
    assert (swiglu["forward_bytes"], swiglu["backward_bytes"]) == (3 * 65 * 96 * 2, 5 * 65 * 96 * 2)


def test_a_wrong_operation_is_not_measured(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in benchmark.cases(small=True) if case.name.startswith("relu2"))
    wrong = type(case)(
        case.name, case.num_tokens, case.shapes, lambda x: case.call(x) * (1 if x.dtype == torch.float64 else 1.01), case.work, case.bound
    )
    with pytest.raises(SystemExit, match="relu2"):
        benchmark.check_on_cpu([wrong])


def test_without_a_gpu_nothing_is_written(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("sys.argv", ["h200_kernels.py"])
    monkeypatch.setattr(benchmark, "RESULT", tmp_path / "result.csv")
    assert benchmark.main() == 2
    assert not (tmp_path / "result.csv").exists()
