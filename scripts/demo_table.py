"""The demo's closing table: losses of three layouts side by side, and the corpus' unigram entropy.

Exits 1 if a layout's loss is more than 1e-5 (relative) from one process's, or the last loss is not below the entropy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

LAYOUTS = {"one": "one process", "pp2": "2 stages (1F1B)", "dp2": "2 data shards"}
TOLERANCE = 1e-5


def losses(folder: Path) -> dict[int, float]:
    """Loss by step of one run."""
    records = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "step_seconds" in record}


def main(out: Path) -> int:
    """Print the table; the exit status says whether the claims hold."""
    runs = {name: losses(out / name) for name in LAYOUTS}
    inspected = subprocess.run(
        [sys.executable, "-m", "megarun", "data", "inspect", str(out / "headers.tokens"), "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    entropy = json.loads(inspected.stdout)["unigram_entropy_nats"]
    common = sorted(set.intersection(*(set(run) for run in runs.values())))
    worst = max(abs(runs[name][step] - runs["one"][step]) / abs(runs["one"][step]) for name in LAYOUTS for step in common)
    last = max(runs["pp2"])

    table = Table(title="loss, nats per token")
    table.add_column("step", justify="right")
    for title in LAYOUTS.values():
        table.add_column(title, justify="right")
    shown = sorted({common[0], *common[4::5], common[-1], *(step for step in runs["pp2"] if step % 20 == 0), last})
    for step in shown:
        table.add_row(str(step), *(f"{runs[name][step]:.6f}" if step in runs[name] else "" for name in LAYOUTS))
    Console().print(table)
    parity, learned = worst <= TOLERANCE, runs["pp2"][last] < entropy
    print(f"largest relative difference over {len(common)} common steps: {worst:.1e} ({'within' if parity else 'ABOVE'} {TOLERANCE:.0e})")
    print(f"last loss {runs['pp2'][last]:.4f} is {'below' if learned else 'NOT BELOW'} the unigram entropy {entropy:.4f}")
    return 0 if parity and learned else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
