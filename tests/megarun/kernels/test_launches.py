"""The launches that are found on fake tensors are those of a real step: of every family and kind, alone and on several ranks."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.runtime
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent / "parity"))
small = importlib.import_module("parity_model")

KERNELS = {"host.kernels": "triton", "batch.seq_length": 16, "schedule": {"kind": "1f1b", "num_microbatches": 2}}
BF16 = {"precision.params": "bf16"}
FEATURES = {
    "model.features": {
        "ngram": {"num_tables": 2, "num_rows": 101, "dim": 8},
        "structure": {"num_categories": 5, "bottleneck": 4},
        "mtp": {"depth": 1, "ffn_hidden_size": 48},
    }
}


def case(pattern: str, **changed: Any) -> dict[str, Any]:
    keys = {"model.pattern": pattern, "model.num_layers": len(pattern), **KERNELS}
    more = {name.replace("__", "."): value for name, value in changed.items()}
    return small.spec_with(keys | more)


ALONE = {
    "hybrid": case("AMEDRA", **BF16, **FEATURES),
    "latent": case("AEMA", **BF16, model__attention=small.INDEXED, model__mamba=small.MIMO, recompute={"default": "selective"}),
    "delta": case("GAD", model__mlp={"ffn_hidden_size": 40, "activation": "gelu"}, optimizer__matrix="adamw"),
    "linear": case("GCM", **BF16, model__linear_attention=small.KDA, model__mamba={"kind": "mamba1", "state_dim": 4, "dt_rank": 6}),
    "rows": case("AMD", **BF16, precision__recipe={"name": "fp8_rowwise"}, data__packing="documents"),
}
"""Every letter, and every kind that has its own kernels."""
TOGETHER = {
    "context": case("AMRG", **BF16, mesh={"cp": 2}),
    "tensor": case("AMED", **BF16, mesh={"tp": 2}),
    "experts": case("AE", **BF16, mesh={"dp_shard": 2, "ep": 2}),
    "stages": case("AMEDRAMEDR", **BF16, mesh={"pp": 2}, **FEATURES),
}
"""Two ranks each."""


def differences(cases: dict[str, Any], num_processes: int, folder: Path) -> dict[str, Any]:
    specs = folder / "specs.json"
    specs.write_text(json.dumps(cases))
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST_"))}
    variables |= {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "trace"), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    start = [] if num_processes == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    trains = [sys.executable, *start, str(HERE / "launch_worker.py"), str(specs), str(folder)]
    looks = [sys.executable, str(HERE / "find_worker.py"), str(specs), str(folder)]
    for command, more in ((trains, {"TRITON_INTERPRET": "1"}), (looks, {})):
        done = subprocess.run(command, env=variables | more, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


QUICK = {name: ALONE[name] for name in ("hybrid", "linear")}


@pytest.mark.parametrize(
    ("cases", "num_processes"), [pytest.param(*each, marks=pytest.mark.slow) for each in ((QUICK, 1), (ALONE, 1), (TOGETHER, 2))]
)
def test_what_is_found_is_what_a_step_launches(cases: dict[str, Any], num_processes: int, tmp_path: Path) -> None:
    found = differences(cases, num_processes, tmp_path)
    assert len(found) == len(cases) * num_processes
    for name, each in found.items():
        assert each["only launched"] == [], name
        if cases[name.split()[0]].get("mesh", {}).get("ep", 1) == 1:  # else the router decides which variants run
            assert each["only found"] == [], name
    assert all(each["launched"] >= 8 for each in found.values())
