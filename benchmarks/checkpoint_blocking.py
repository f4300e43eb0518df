"""Time that training waits for asynchronous saves and for copies in memory, against its steps without: 98 million parameters, fp32, AdamW.

python benchmarks/checkpoint_blocking.py [--steps 5] [--every 2]    writes results/checkpoint_blocking.json

It exits with 1 where a save, or the copies of a step, block 3% of a step or more.

Saves are those of one process. They go to `--out`, and from a local stage to a storage: `file://`, which is written as an object store is.
Copies in memory are those of two ranks of FSDP2, each under its own torchrun as on two nodes, and happen in every step.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megaplan.inventory.build import build_inventory
from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megarun.checkpoint.save import Saver
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

RESULT = Path(__file__).parent / "results" / "checkpoint_blocking.json"
BAR = 0.03
COPYING = """
import json, os, sys, time
folder, seconds = sys.argv.pop(1), {"keep": [], "wait": []}
from megarun.checkpoint.memory import MemoryCopies
def timed(name, real):
    def call(self, *words):
        began = time.perf_counter()
        real(self, *words)
        seconds[name].append(time.perf_counter() - began)
    return call
for name in seconds:
    setattr(MemoryCopies, name, timed(name, getattr(MemoryCopies, name)))
from megarun.cli.main import run
status = run()
with open(os.path.join(folder, os.environ["RANK"] + ".json"), "w") as file:
    json.dump(seconds, file)
os._exit(status)
"""
"""A rank that leaves the seconds of every call that begins a copy, and of every one that waits for it before an update."""
SPEC: dict[str, Any] = {
    "format": "megaplan.spec/1",
    "name": "checkpoint-blocking",
    "model": {
        "pattern": "AD",
        "num_layers": 32,
        "hidden_size": 640,
        "vocab_size": 2048,
        "attention": {"kind": "gqa", "num_heads": 10, "num_kv_heads": 10, "head_dim": 64},
        "mlp": {"ffn_hidden_size": 2240},
    },
    "sharding": {"reshard_after_forward": False},
    "batch": {"micro_batch_size": 2, "seq_length": 1024},
    "precision": dict.fromkeys(("params", "grads", "master", "moments", "reduce"), "fp32"),
    "optimizer": {"matrix": "adamw"},
    "training": {"learning_rate": 1.0e-4},
}


def train(folder: Path, name: str, steps: int, every: int, *more: str) -> tuple[float, list[float]]:
    """Seconds of all steps except the first, saves left out, and of each save; the wait for the last one is not training."""
    blocked: list[float] = []
    save = Saver.save

    def timed(self: Saver, *words: Any) -> None:
        began = time.perf_counter()
        save(self, *words)
        blocked.append(time.perf_counter() - began)

    Saver.save = timed  # type: ignore[method-assign]
    out = folder / name
    words = ["train", str(folder / "plan.json"), "--data", str(folder / "small.tokens"), "--out", str(out)]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            status = run([*words, "--steps", str(steps), "--save-every", str(every), *more])
    finally:
        Saver.save = save  # type: ignore[method-assign]
    if status:
        raise SystemExit(said.getvalue())
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
    return sum(seconds[1:]), blocked


def train_on_two_nodes(folder: Path, name: str, steps: int, *more: str) -> tuple[float, list[float]]:
    """Seconds of all steps except the first, and the slower rank's wait in each step: to begin a copy, and for it before the update."""
    program, left, out = folder / "rank.py", folder / f"{name}-ranks", folder / name
    program.write_text(COPYING)
    left.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    train = ["train", str(folder / "two.json"), "--data", str(folder / "small.tokens"), "--out", str(out), "--steps", str(steps), *more]
    nodes = []
    for node in range(2):
        place = f"--nnodes 2 --nproc-per-node 1 --node-rank {node} --master-addr 127.0.0.1 --master-port {port}".split()
        command = [sys.executable, "-m", "torch.distributed.run", *place, str(program), str(left), *train]
        nodes.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}))
    statuses = [node.wait() for node in nodes]
    if any(statuses):
        raise SystemExit(f"{name}: a node failed")
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
    ranks = [json.loads(path.read_text()) for path in sorted(left.glob("*.json"))]
    # `keep` also waits here, but not for long: the previous update has already waited
    waits = [[begun + waited for begun, waited in zip(rank["keep"], rank["wait"][2::2], strict=False)] for rank in ranks]
    return sum(seconds[1:]), [max(each) for each in zip(*waits, strict=True)]


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--every", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    spec = Spec.model_validate(SPEC)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        (folder / "text" / "a.txt").write_text("".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))))
        tokenize(read_corpus(folder / "text"), TokenizerKind.BYTES, 257, folder / "small.tokens")
        write_plan(make_plan(spec), folder / "plan.json")
        write_plan(make_plan(Spec.model_validate({**SPEC, "mesh": {"dp_shard": 2}})), folder / "two.json")
        plain, _ = train(folder, "plain", chosen.steps, 0)
        cases = {
            "folder": train(folder, "saving", chosen.steps, chosen.every),
            "upload": train(folder, "uploading", chosen.steps, chosen.every, "--checkpoint-url", f"file://{folder}/storage"),
        }
        plain_of_two, _ = train_on_two_nodes(folder, "two", chosen.steps)
        copied, waits = train_on_two_nodes(folder, "copying", chosen.steps, "--memory-copies")
    step, step_of_two = plain / (chosen.steps - 1), plain_of_two / (chosen.steps - 1)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, one thread",
        "num_parameters": build_inventory(spec).parameters,
        "num_steps": chosen.steps,
        "tokens_a_step": spec.batch.seq_length * spec.batch.micro_batch_size,
        "save_every": chosen.every,
        "step_seconds_without_saving": round(step, 4),
        "cases": {
            name: {
                "step_seconds_while_saving": round(seconds / (chosen.steps - 1), 4),
                "seconds_of_each_save": [round(each, 4) for each in saves],
                "longest_save_of_a_step": round(max(saves) / step, 4),
            }
            for name, (seconds, saves) in cases.items()
        },
        "copies in memory of two nodes": {
            "step_seconds_without_copies": round(step_of_two, 4),
            "step_seconds_while_copying": round(copied / (chosen.steps - 1), 4),
            "seconds_of_each_step": [round(each, 4) for each in waits],
            "longest_of_a_step": round(max(waits) / step_of_two, 4),
        },
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    RESULT.write_text(text)
    longest = max(max(saves) for _, saves in cases.values())
    return 0 if longest < BAR * step and max(waits) < BAR * step_of_two else 1


if __name__ == "__main__":
    sys.exit(main())
