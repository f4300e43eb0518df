"""Published post-training, predicted: writes docs/reference/rl.md.

python benchmarks/rl/run.py [--check]     --check exits 1 if the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

import megaplan
from megaplan.post_training.values import RlEstimate

HERE = Path(__file__).parent
PROMPT = 115


class Iteration(NamedTuple):
    """A published iteration with its prediction."""

    row: dict[str, Any]
    found: RlEstimate

    @property
    def error(self) -> float:
        """Per cent by which the predicted iteration is off."""
        return 100 * (self.found.iteration_seconds.value / self.row["seconds"] - 1)


def data() -> dict[str, Any]:
    """Everything that was published."""
    loaded: dict[str, Any] = yaml.safe_load((HERE / "published.yaml").read_text(encoding="utf-8"))
    return loaded


def spec_of(row: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """A row as a spec: training on all devices, or on half of them if the rollout has its own."""
    tp, cp, ep, pp = row["mesh"]
    training = row["devices"] // (2 if row["staleness"] else 1)
    dense = "moe" not in model
    host = {"name": "megatron", "model": "gpt", "framework": "nemo", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    full = row["model"] not in ("qwen30b", "qwen32b")
    return {
        "format": "megaplan.spec/1",
        "name": "published",
        "model": model,
        "mesh": {"pp": pp, "tp": tp, "cp": cp, "ep": ep, "dp_shard": training // (pp * tp * cp), "vocab_parallel": tp > 1},
        "schedule": {"kind": "1f1b", "num_microbatches": pp},
        "batch": {"micro_batch_size": 1, "seq_length": row["limit"]},
        "precision": {"params": "bf16", "grads": "bf16", "reduce": "bf16"},
        "optimizer": {"matrix": "adamw"},
        "host": host | {"precision_aware_optimizer": True} | ({"recompute_num_layers": 1} if full else {}) | ({} if dense else {"moe_dispatcher": "alltoall"}),
        "device": {"name": row["device"], **({"per_node": 4} if row["device"] == "gb200" else {})},
        "post_training": {
            "kind": "rl",
            "prompts": row["prompts"],
            "samples": row["samples"],
            "rollout": {
                "tp": row["gen"],
                "prompt": PROMPT,
                "response": {"mean": row["mean"], "max": row["limit"] - PROMPT},
                "memory_fraction": row["fraction"],
            },
            "policy": {"updates": row["updates"]},
            "reference": {},
            "offload": ["parameters", "gradients", "optimizer", "reference"],
            **({"placement": "split", "staleness": 1} if row["staleness"] else {}),
        },
    }


def iterations() -> list[Iteration]:
    """Every published iteration with its prediction, the worst first."""
    found = data()
    rows = [Iteration(row, megaplan.rl(spec_of(row, found["models"][row["model"]]))) for row in found["iterations"]]
    return sorted(rows, key=lambda each: -abs(each.error))
