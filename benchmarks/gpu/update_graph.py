r"""Plans trained with the update as a CUDA graph and without: steps, losses bit by bit, bytes against the estimate.

python benchmarks/gpu/update_graph.py [--steps 6] [--graphs none,microbatch,step] [--out FILE] [NAME ...]

Names are files of `specs/`; without a GPU those of small plans, whose steps are eager with every value. Each run is a separate process.
Exits 1 if a run failed, or if its losses are not those of the first value.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kernels", "benchmarks")]
NAMES = ("nam56r", "nemotron-16l", "hybrid-1b", "llama-16l")
WARM = 3
"""Steps that are not timed: two eager ones, and the one that records."""
GIB = 2**30


def train(name: str, graphs: str, num_steps: int, sender: Any) -> None:
    """Train a plan, and send what is found."""
    import torch  # noqa: PLC0415
    from gpu.measure import How, train_plan  # noqa: PLC0415

    torch.manual_seed(0)
    how = How(num_steps=num_steps, most_seconds=120, expandable=True, overrides=(f"host.cuda_graphs={graphs}",))
    train_plan(name, how, partial(_send, sender))


def _send(sender: Any, found: dict[str, Any]) -> None:
    sender.send(found)


def trained(name: str, graphs: str, num_steps: int) -> dict[str, Any] | None:
    """The findings of a run in its own process; None if it failed."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(name, graphs, num_steps, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


def lines(name: str, graphs: str, found: dict[str, Any], losses: list[float]) -> list[str]:
    """A run's lines: its steps and losses, and each phase's peaks with the estimate's."""
    later, same = found["seconds"][WARM:] or found["seconds"][-1:], found["losses"] == losses
    times = ", ".join(f"{1000 * each:.1f}" for each in found["seconds"])
    said = "equal in every bit" if same else f"DIFFERENT: {found['losses']} and {losses}"
    text = [f"{name} {graphs}: {1000 * statistics.median(later):.1f} ms a step (all: {times}); losses {said}"]
    for phase, peaks in found["phases"].items():
        wanted = found["estimate"].get(phase, {})
        sizes = (f"{key} {_gib(peaks[key])} ({_gib(wanted.get(key))})" for key in ("allocated", "reserved", "device"))
        text.append(f"  {phase}: {', '.join(sizes)} GiB, in brackets as estimated")
    return text


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.3f}"


def main() -> int:
    """Train every plan in every way; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--graphs", default="microbatch,step")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    failed = False
    for name in args.names:
        losses: list[float] | None = None
        for graphs in args.graphs.split(","):
            found = trained(name, graphs, args.steps)
            if found is None:
                failed = True
                print(f"{name} {graphs}: FAILED", flush=True)
                continue
            losses = found["losses"] if losses is None else losses
            failed = failed or found["losses"] != losses
            print("\n".join(lines(name, graphs, found, losses)), flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"graphs": graphs, **found}) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
