"""Predict the Mamba-2 baselines of NAM56R on eight H200, which no constant was fitted to.

python benchmarks/step_times/flagship.py ROWS.json [--page docs/reference/accuracy-time-nam56r.md]

Each run is a spec under host megatron; CUDA graphs and fp8 are launch flags beside it. Runs of Mamba-3, M²RNN, the indexer and prediction
depths have no term yet.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from megaplan.cost.step.constants import intervals  # noqa: E402
from megaplan.cost.step.from_spec import software_of, workload_of  # noqa: E402
from megaplan.cost.step.predict import predict_step  # noqa: E402
from megaplan.spec.load import spec_from_document  # noqa: E402

Row = dict[str, Any]
GRAPHED = {"attn": "attn", "mamba": "mamba", "moe_router": "moe_router", "moe_preprocess": "moe_preprocess"}
ALL_PARTS = frozenset(GRAPHED.values())
HEAD = Path(__file__).with_name("flagship.md")


def main() -> None:
    """Read the rows, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--page", type=Path, help="write the table here")
    arguments = parser.parse_args()
    timed = [row for row in json.loads(arguments.rows.read_text(encoding="utf-8")) if row.get("iter_ms") and row["status"] == "ok"]
    rows = [row for row in timed if row["ssm"] == "mamba2-ssd" and not row["mtp_depths"]]
    found = [(row, predicted(row) / (row["iter_ms"] / 1000)) for row in rows]
    text = page(found, len(timed) - len(rows))
    print(text)
    if arguments.page:
        arguments.page.write_text(text, encoding="utf-8")


def document(row: Row) -> dict[str, Any]:
    """The spec of a run."""
    letters = "".join("M" if letter == "R" else letter for letter in (row["pattern"] * 5)[: row["layers"]])
    heads, groups = map(int, row["attention"].removeprefix("gqa").split("/"))
    hidden = row["hidden"]
    model: dict[str, Any] = {
        **{"pattern": letters, "num_layers": len(letters), "hidden_size": hidden, "vocab_size": 65536},
        "attention": {"kind": "gqa", "num_heads": heads, "num_kv_heads": groups, "head_dim": hidden // heads},
        "mamba": {"kind": "mamba2", "num_groups": 8, "num_heads": 64 if "mamba heads 64" in row["note"] else 2 * hidden // 64},
        "moe": {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 896, "shared_ffn_hidden_size": 1024, "activation": "relu2"},
    }
    if "capacity 1.5" in row["moe_mode"]:
        model["moe"]["capacity_factor"] = 1.5
    data = row["dp"]
    return {
        **{"format": "megaplan.spec/1", "name": row["id"], "model": model, "host": {"name": "megatron", "moe_dispatcher": "alltoall"}},
        "mesh": {"dp_shard": data, "tp": row["tp"], "vocab_parallel": row["tp"] > 1},
        "batch": {"micro_batch_size": row["mbs"], "seq_length": row["seq"]},
        "schedule": {"num_microbatches": row["gbs"] // row["mbs"] // data},
        "recompute": {"blocks": {"A": "selective"}} if "core_attn" in (row["recompute"] or "") else {},
        "device": {"name": "h200"},
    }


def predicted(row: Row) -> float:
    """Seconds of a run's step."""
    spec = spec_from_document(document(row))
    software = software_of(spec)
    flags = row["cuda_graph"] or ""
    graphs = frozenset(part for word, part in GRAPHED.items() if word in flags) or (ALL_PARTS if flags.startswith("te") else frozenset())
    software = software._replace(graphs=graphs, dtype="fp8" if row["precision"].startswith("FP8") else "bf16")
    return predict_step(workload_of(spec, ((0, spec.model.num_layers),), [0], software)).seconds


def page(found: list[tuple[Row, float]], others: int) -> str:
    """The page: its head, and a row for each run."""
    low, high = intervals()["uncalibrated"]
    narrow = [ratio for row, ratio in found if row["tp"] == 1]
    factor = median(narrow)
    head = HEAD.read_text(encoding="utf-8").format(
        count=len(found),
        median=100 * median(abs(ratio - 1) for _, ratio in found),
        bias=100 * (median(ratio for _, ratio in found) - 1),
        covered=sum(low <= 1 / ratio <= high for _, ratio in found),
        left=100 * median(abs(ratio / factor - 1) for ratio in narrow),
        others=others,
    )
    names = ("run", "dtype", "CUDA graphs", "routing", "tp", "microbatch", "sequences", "measured ms", "error %")
    lines: list[tuple[object, ...]] = [names, ("---",) * 4 + ("---:",) * 5]
    for row, ratio in sorted(found, key=lambda pair: -abs(pair[1] - 1)):
        about = (row["id"], row["precision"], row["cuda_graph"], row["moe_mode"], row["tp"], row["mbs"], row["gbs"], row["iter_ms"])
        lines.append((*about, f"{100 * (ratio - 1):+.1f}"))
    return head + "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines) + "\n"


if __name__ == "__main__":
    main()
