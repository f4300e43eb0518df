"""The GPU benchmark of the kernels: what can be held without a GPU."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[3]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("h200_kernels")


def test_small_cases_are_right_and_counted(benchmark: Any) -> None:
    rows = benchmark.check_on_cpu(benchmark.cases(small=True))
    by_name = {row["case"].split()[0]: row for row in rows}
    assert by_name.keys() >= {"rms_norm", "gated_rms_norm", "swiglu", "relu2", "ssd", "mamba3", "gated_delta", "head_gated_norm", "m2rnn"}
    swiglu = by_name["swiglu"]
    assert (swiglu["forward_bytes"], swiglu["backward_bytes"]) == (3 * 65 * 96 * 2, 5 * 65 * 96 * 2)
    head = by_name["linear_cross_entropy"]
    assert (head["forward_flops"], head["backward_flops"]) == (2 * 65 * 24 * 200, 4 * 65 * 24 * 200)
    moe = by_name["moe"]  # six tokens' width of each of two experts, three matrices
    assert (moe["forward_flops"], moe["backward_flops"]) == (6 * 65 * 2 * 24 * 16, 12 * 65 * 2 * 24 * 16)
    stated = {"attention", "indexed_attention", "linear_cross_entropy", "moe", "ssd", "mamba3", "gated_delta", "m2rnn", "selective_scan"}
    assert {name for name, row in by_name.items() if row["stated_bytes"]} == stated
    attention = by_name["attention"]  # 24 and 16 wide, of four heads; backward two products more, and the scores again
    pairs = 4 * 65 * 66 // 2
    assert (attention["forward_flops"], attention["backward_flops"]) == (2 * pairs * 40, 2 * pairs * (2 * 40 + 24))
    assert attention["stated_bytes"] == 4 * 4 * 65
    pairs = 65 * 2  # forward: activated rows and their products, before a token's are summed; the sums of six experts' rows and tiles
    assert moe["stated_bytes"] == 2 * (pairs * 16 + pairs * 24 - 65 * 24) + 2 * 6 * 4
    assert by_name["newton_schulz"]["forward_flops"] == 2 * (3 * 24**2 * 40 + 24**3)
    assert by_name["cross_entropy"]["backward_bytes"] == 65 * (2 * 200 * 2 + 4)


def test_full_sizes_are_those_of_the_published_ones(benchmark: Any) -> None:
    cases = {case.name.split()[0]: case for case in benchmark.cases()}
    assert (cases["linear_cross_entropy"].num_tokens, cases["linear_cross_entropy"].shapes["weight"]) == (16384, (131072, 4096))
    assert (cases["moe"].num_tokens, cases["moe"].shapes["gate"]) == (32768, (128, 768, 2048))


class Module:
    """A library's module."""

    def __init__(self, **names: Any) -> None:
        vars(self).update(names)


def test_libraries_are_called_as_ours(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake libraries that compute the documented results: a loss summed over rows, linear attention with a decay of each head."""
    peers = importlib.import_module("h200.peers")

    def attend(q: Any, k: Any, v: Any, g: Any, scale: float) -> tuple[Any, None]:
        decay = g.cumsum(1)
        later = torch.ones(q.shape[1], q.shape[1]).triu(1).bool().unsqueeze(-1)
        weights = (decay.unsqueeze(2) - decay.unsqueeze(1)).masked_fill(later, -torch.inf).exp()
        return torch.einsum("bihk,bjhk,bijh,bjhv->bihv", q, k, weights, v) * scale, None

    cross_entropy = torch.nn.functional.cross_entropy
    modules = {
        "liger_kernel.transformers.functional": Module(
            liger_cross_entropy=cross_entropy,
            liger_fused_linear_cross_entropy=lambda x, weight, labels, reduction: cross_entropy(x @ weight.T, labels, reduction=reduction),
        ),
        "fla.modules.fused_linear_cross_entropy": Module(
            fused_linear_cross_entropy_loss=lambda x, labels, weight, reduction: cross_entropy(x @ weight.T, labels, reduction=reduction)
        ),
        "fla.ops.simple_gla": Module(chunk_simple_gla=attend),
    }
    monkeypatch.setattr(peers, "import_module", modules.__getitem__)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: True)
    tried = []
    for case in benchmark.cases(small=True):
        for library, call in peers.peers(case):
            if case.name.split()[0] in ("cross_entropy", "linear_cross_entropy", "ssd"):
                assert benchmark.worst_error(case, "cpu", torch.float32, call) < 1e-5, (library, case.name)
                tried.append(library)
    assert sorted(tried) == ["fla", "fla", "fla", "liger_kernel", "liger_kernel"]


def test_a_library_that_is_wrong_or_fails_is_not_timed(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "timed", lambda *_: {"forward_ns": 1})
    errors = benchmark.worst_error
    monkeypatch.setattr(benchmark, "worst_error", lambda case, _, __, call: errors(case, "cpu", torch.float32, call))
    case = next(case for case in benchmark.cases(small=True) if case.name.startswith("relu2"))
    assert benchmark.peer(case, case.call, 1.0, 1.0)["forward_ns"] == 1
    assert "failure" in benchmark.peer(case, lambda x: case.call(x) * 1.01, 1.0, 1.0)
    assert benchmark.peer(case, lambda x: x.no_such_thing, 1.0, 1.0)["failure"].startswith("AttributeError")


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
