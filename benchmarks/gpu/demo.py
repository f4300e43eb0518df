"""The demo's training on the device, compared with the same training on the CPU, at fp32."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.checks import Emit

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-3
"""Relative difference of a loss."""
NO_INTERPRETER = {"TRITON_INTERPRET": "0"}


def compare_with_cpu(emit: Emit, num_steps: int = 20, token_bytes: int = 2_000_000) -> None:
    """Train both at the same time, emit both losses and their largest difference."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        origin = importlib.util.find_spec("torch").origin  # type: ignore[union-attr]
        headers, tokens = Path(str(origin)).parent / "include", out / "headers.tokens"
        _megarun("data", "tokenize", str(headers), "-o", str(tokens), "--limit-bytes", str(token_bytes)).communicate()
        words = ["train", str(ROOT / "plans/tiny-hybrid.json"), "--data", str(tokens), "--steps", str(num_steps), "--out"]
        started = {name: _megarun(*words, str(out / name), hidden=name == "cpu") for name in ("cpu", "device")}
        for name, process in started.items():
            _, error = process.communicate()
            if process.returncode:
                raise RuntimeError(f"training on the {name}: {(error.strip().splitlines() or ['no message'])[-1]}")
        cpu, device = (_losses(out / name) for name in started)
    if not len(cpu) == len(device) == num_steps:
        raise RuntimeError(f"{len(cpu)} and {len(device)} losses of {num_steps} steps")
    worst = max(abs(a - b) / abs(b) for a, b in zip(device, cpu, strict=True))
    emit({"steps": num_steps, "largest_relative_difference": worst, "right": worst <= TOLERANCE, "cpu": cpu, "losses": device})


def _megarun(*words: str, hidden: bool = False) -> subprocess.Popen[str]:
    environment = {**os.environ, **NO_INTERPRETER, **({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})}
    path = [str(ROOT / "src"), str(ROOT / "kernels"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    command = [sys.executable, "-m", "megarun", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


def _losses(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "step_seconds" in line]
