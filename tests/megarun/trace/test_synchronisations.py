"""The host reads of the device in a step one vector of loss, norm and routing sums, and nothing in forward and backward."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trace_checks import BF16

import megakernels
from megarun.engine.trainer import Trainer
from megarun.trace.rank import TracedTrainer, trace_rank

pytestmark = pytest.mark.runtime
READING = {"_local_scalar_dense", "nonzero", "masked_select", "unique2", "_unique2", "bincount", "equal", "is_nonzero"}
"""aten operations whose result the host waits for: a value, or a shape that depends on values."""
METHODS = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "bincount", "unique", "masked_select"}
DELTA = {"kind": "gated_delta", "num_value_heads": 2, "num_key_heads": 2, "key_dim": 8, "value_dim": 8, "conv_kernel": 4}
TRITON = {"host.kernels": "triton", "precision": BF16, "schedule.num_microbatches": 2}
PLANS: dict[str, dict[str, Any]] = {
    "A M E D R": {},
    "documents, losses of the router": {
        "data": {"packing": "documents"},
        "model.moe.balance_loss_coefficient": 0.1,
        "model.moe.z_loss_coefficient": 0.1,
    },
    "G C, recomputed": {
        "model.pattern": "GCD",
        "model.num_layers": 3,
        "model.linear_attention": DELTA,
        "model.short_convolution": {"conv_kernel": 3},
        "recompute": {"default": "selective"},
    },
    "prediction depth, n-grams, classes": {
        "model.features": {
            "mtp": {"depth": 1, "ffn_hidden_size": 40},
            "ngram": {"num_tables": 3, "num_rows": 40, "dim": 4},
            "structure": {"num_categories": 7, "bottleneck": 6},
        }
    },
    "eight bits": {"model.pattern": "AMD", "model.num_layers": 3, "precision": {**BF16, "recipe": {"name": "fp8_rowwise"}}},
    "adapters": {"lora": {"rank": 4, "alpha": 8}},
}


SLOW = ("A M E D R", "prediction depth, n-grams, classes", "adapters")


class Reading(TorchDispatchMode):
    """Names of the operations whose result the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        del types
        name = func._schema.name.partition("::")[2]
        target = (kwargs or {}).get("device")
        if name in READING or (name == "_to_copy" and target is not None and torch.device(target) != args[0].device):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PLANS])
def test_a_step_reads_one_vector(name: str, job_with: Any, monkeypatch: Any) -> None:
    """In two steps of a trace; a read of a tensor without values would also end the trace."""
    mode, reads, step = Reading(), [], Trainer.step

    def counted(trainer: Any, values: Tensor) -> list[float]:
        reads.append(tuple(values.shape))
        return [1e9] * len(values)

    def watched(trainer: Any, *args: Any) -> Any:
        with mode:
            return step(trainer, *args)

    monkeypatch.setattr(TracedTrainer, "read_all", counted)
    monkeypatch.setattr(Trainer, "step", watched)
    trace_rank(job_with({**TRITON, **PLANS[name]}), 0)
    assert len(reads) == 2
    assert mode.found == []


def reading_calls(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a module that call a method which waits for the device."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            yield node.lineno, node.func.attr


def test_no_operation_reads_the_device() -> None:
    """Operations are opaque to a trace; of their sources only plain torch's products of experts, and a CPU's labels, read a value."""
    root = Path(next(iter(megakernels.__path__)))
    found = {
        (str(path.relative_to(root)), name) for path in root.rglob("*.py") if path.name != "facts.py" for _, name in reading_calls(path)
    }
    plain = {("ops/moe/grouped.py", "tolist"), ("ops/moe/reference.py", "bincount")}
    assert found == plain | {("ops/cross_entropy/labels.py", "item")}
