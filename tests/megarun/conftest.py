"""Small specs, one process as the reference, and torchrun for the rest."""

import copy
import importlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megaplan.spec.models import Spec
from megarun.launch.process_group import process_group, read_launch

torch.set_num_threads(1)  # as torchrun's workers have: small tensors, and sums in one order
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
FP32 = dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32")
BASE: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "small",
    "model": {
        "pattern": "AMEDR",
        "num_layers": 5,
        "hidden_size": 32,
        "vocab_size": 61,
        "attention": {"kind": "gqa", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
        "mamba": {"kind": "mamba2", "expand": 2, "head_dim": 16, "state_dim": 8, "num_groups": 2, "chunk_size": 8},
        "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16},
        "recurrent": {"kind": "m2rnn", "num_heads": 3, "key_dim": 4, "value_dim": 4, "save_every": 8},
        "mlp": {"ffn_hidden_size": 40},
    },
    "sharding": {"reshard_after_forward": False},
    "batch": {"micro_batch_size": 2, "seq_length": 24},
    "host": {"kernels": "reference"},
    "precision": FP32,
    "training": {"steps": 10, "learning_rate": 3.0e-3},
}


@pytest.fixture(scope="session")
def spec_with() -> Callable[..., dict[str, Any]]:
    """The small spec as plain values, with dotted keys replaced."""

    def build(overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        spec = copy.deepcopy(BASE)
        for key, value in (overrides or {}).items():
            *path, last = key.split(".")
            section = spec
            for step in path:
                section = section.setdefault(step, {})
            section[last] = copy.deepcopy(value)
        return spec

    return build


@pytest.fixture(scope="session")
def worker() -> Any:
    """The module that the worlds of the parity matrix run: its jobs, its rows."""
    sys.path.insert(0, str(FOLDER / "parity"))
    return importlib.import_module("parity_worker")


@pytest.fixture
def golden(tmp_path: Path) -> Callable[[str, str], None]:
    """Compare a diagnostic with its golden text; `MEGAPLAN_WRITE_GOLDEN=1 pytest …` rewrites it, for review as a diff."""

    def check(name: str, said: str) -> None:
        start = re.search(rf"(error|warning|note)\[{name[:5]}\]", said)
        assert start, said
        text = said[start.start() :]
        text = text[: text.index(f"hint: megaplan explain {name[:5]}\n")] + f"hint: megaplan explain {name[:5]}\n"
        for found, shown in ((str(tmp_path.parent), ""), (socket.gethostname(), "HOST")):
            text = text.replace(found, shown)
        text = re.sub(r"(?<=sha256 )[0-9a-f]{16}", "0123456789abcdef", re.sub(r"/\S*/(?=(run|out)\b)", "", text))
        path = ROOT / "tests" / "golden" / "errors" / "runtime" / f"{name}.txt"
        if os.environ.get("MEGAPLAN_WRITE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return check


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process group of this process alone."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with process_group(read_launch(), torch.device("cpu")):
        yield


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes FSDP2 wrap stages of one process, too: its groups can be tested without a second rank."""
    monkeypatch.setattr(Spec, "has_whole_state", False)


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script or module under torchrun on this machine."""

    def run(num_processes: int, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes), *words]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)

    return run
