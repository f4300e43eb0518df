"""The demo's training on one GPU beside the same training on the CPU: losses within 1e-3 of each other at fp32.

python benchmarks/h200_demo.py [--steps 20] [--data FILE]

Needs a GPU; writes benchmarks/results/h200_demo.json. Without --data, tokens come from the headers of the installed torch.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/h200_demo.json"
TOLERANCE = 1e-3


def losses(plan: Path, tokens: Path, out: Path, steps: int, *, gpu: bool) -> list[float]:
    """Train and read the losses."""
    hidden = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "megarun", "train", str(plan), "--data", str(tokens), "--out", str(out), "--steps", str(steps)]
    subprocess.run(command, check=True, env={**os.environ, **hidden})
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "step_seconds" in line]


def main() -> int:
    """Train twice, compare, record; 1 past tolerance, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    import torch  # noqa: PLC0415  (after the arguments, which answer at once)

    if not torch.cuda.is_available():
        sys.stderr.write("no GPU here; nothing was run and nothing written\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        tokens = arguments.data or out / "headers.tokens"
        if arguments.data is None:
            origin = importlib.util.find_spec("torch").origin  # type: ignore[union-attr]
            words = ["data", "tokenize", str(Path(str(origin)).parent / "include"), "-o", str(tokens), "--limit-bytes", "8000000"]
            subprocess.run([sys.executable, "-m", "megarun", *words], check=True)
        plan = ROOT / "plans/tiny-hybrid.json"
        on_cpu = losses(plan, tokens, out / "cpu", arguments.steps, gpu=False)
        on_gpu = losses(plan, tokens, out / "gpu", arguments.steps, gpu=True)
    worst = max(abs(gpu - cpu) / abs(cpu) for gpu, cpu in zip(on_gpu, on_cpu, strict=True))
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "steps": arguments.steps,
        "largest_relative_difference": worst,
        "tolerance": TOLERANCE,
        "cpu": on_cpu,
        "gpu": on_gpu,
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(f"largest relative difference {worst:.1e} over {arguments.steps} steps (tolerance {TOLERANCE:.0e})")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
