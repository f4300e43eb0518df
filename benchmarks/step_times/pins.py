"""First stage of the fit: grouped products, permutation and exchange from operations and layers that were measured alone.

Clocks differ between such measurements and training, so a load factor per source multiplies the work. The result is the prior of the
constants in `PINNED` (`pinned.json`); their spread includes the spread of that factor.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from megaplan.cost.step.blocks import ledger_of
from megaplan.cost.step.ledger import BACKWARD, FORWARD, GroupedProduct, Ledger
from megaplan.cost.step.names import names_of, rates_of
from megaplan.cost.step.predict import WAITS, bandwidths, block_terms
from megaplan.cost.step.transfers import copies
from megaplan.cost.step.workload import BatchShape, Machine, MeshShape, Software, StageShape, TimedStep
from megaplan.devices import load_device
from megaplan.inventory.build import build_inventory
from megaplan.spec.models import Spec
from step_times.priors import PINS, Prior, priors

Array = NDArray[np.float64]
PINNED = (
    *("grouped.hopper", "grouped.blackwell", "grouped.rows", "grouped.weights", "permute.alltoall", "permute.fused"),
    *("exchange.link", "exchange.alltoall", "exchange.fused", "cast.rows.mxfp8"),
)
"""Constants that these measurements determine; the dense rates and the memory rate keep their priors."""
LOADS = {
    "layer bf16": Prior(0.85, 0.15, "factor", "work of a layer that runs alone relative to training"),
    "layer fp8": Prior(0.9, 0.15, "factor", "work of a layer that runs alone relative to training"),
    "group_matmul": Prior(1.0, 0.05, "factor", "B200's table was measured under load"),
    "deepep": Prior(1.0, 1e-3, "factor", "transfers do not depend on clocks"),
    "alltoall": Prior(1.0, 1e-3, "factor", "transfers do not depend on clocks"),
}
SIGMA, OF_A_SOURCE = 0.1, 24.0
"""Spread of a measurement's logarithm, and the largest number of independent measurements that a source counts as."""
TRANSFER = {"exchange.link": 0.15}
"""Spread between an operation measured alone and in training, if not 0.05: exchanges were measured in one domain of eight."""
DEEPEP_SMS, MIN_TOKENS, MIN_BYTES = "24", 4096, 1 << 28


class Measured(NamedTuple):
    """One pass of work with its seconds; `load` is its source."""

    seconds: float
    load: str
    ledger: Ledger
    run: int
    names: Mapping[str, tuple[str, ...]]
    machine: Machine
    links: Mapping[str, float]


def pinned(folder: Path) -> dict[str, dict[str, Any]]:
    """The constants of `PINNED` after the first stage.

    Args:
        folder: Holds `time/moe_layer_h100_12.json`, `time/op_efficiency_simumax.json` and `h200_ops/`.
    """
    found = [*_layers(folder / "time"), *_grouped(folder / "time"), *_deepep(folder / "h200_ops"), *_alltoall(folder / "h200_ops")]
    known = priors(pins=False)
    names = (*PINNED, *(f"load {name}" for name in LOADS))
    prior = [known[name] for name in PINNED] + list(LOADS.values())
    base, spread = np.log([each.value for each in prior]), np.array([each.spread for each in prior])
    upper = np.log([min(each.most, 1e9) for each in prior]) - base
    count = Counter(each.load for each in found)
    weight = np.array([min(1.0, OF_A_SOURCE / count[each.load]) ** 0.5 for each in found])
    values = {name: each.value for name, each in known.items()}

    def residuals(shifts: Array) -> Array:
        now = values | dict(zip(names, np.exp(base + shifts), strict=True))
        off = np.array([np.log(_seconds(each, now) / each.seconds) for each in found])
        return np.concatenate([off / SIGMA * weight, shifts / spread])

    done = least_squares(residuals, np.minimum(0.0, upper - 1e-6), bounds=(-3.0, np.maximum(upper, 1e-6)), x_scale=spread, loss="soft_l1")
    spreads = np.sqrt(np.diag(np.linalg.inv(done.jac.T @ done.jac)) + np.array([TRANSFER.get(name, 0.05) for name in names]) ** 2)
    used = dict(zip(names, zip(np.exp(base + done.x), np.minimum(spreads, spread), strict=True), strict=True))
    off = np.exp(residuals(done.x)[: len(found)] * SIGMA / weight) - 1
    for source in LOADS:
        here = np.abs(off[[each.load == source for each in found]])
        factor = used[f"load {source}"][0]
        print(f"{source}: {len(here)} measurements, median {100 * np.median(here):.1f} %, load factor {factor:.2f}")
    source = f"{len(found)} operations and layers measured alone (`pins.py`), under a load factor"
    return {name: {"value": float(f"{used[name][0]:.4g}"), "spread": round(float(used[name][1]), 3), "source": source} for name in PINNED}


def write(folder: Path) -> None:
    """Write `pinned.json`."""
    PINS.write_text(json.dumps(pinned(folder), indent=2) + "\n", encoding="utf-8")
    priors.cache_clear()


def _seconds(each: Measured, values: Mapping[str, float]) -> float:
    rates = rates_of(each.names, values)
    terms = block_terms(each.ledger, each.machine, rates, each.links)[each.run]
    waits = sum(terms.get(term, 0.0) for term in WAITS)
    work = sum(seconds for term, seconds in terms.items() if term not in (*WAITS, "kernels", "launched"))
    return work * values[f"load {each.load}"] + waits + terms["kernels"] * rates["gap"]


def _work(device: str, dtype: str, moe: dict[str, int], hidden: int, mesh: MeshShape, tokens: int, dispatcher: str) -> TimedStep:
    """A step of a model with one block of gated experts; `moe` is its section."""
    model = {"pattern": "E", "num_layers": 1, "hidden_size": hidden, "vocab_size": 1, "moe": moe}
    batch = {"micro_batch_size": 1, "seq_length": tokens}
    spec = Spec.model_validate({"format": "megaplan.spec/1", "name": "layer", "model": model, "batch": batch})
    software, machine = Software("megatron-lm", dtype=dtype, dispatcher=dispatcher), Machine.of(load_device(device))
    stages = (StageShape(1.0, {"E": 1.0}),)
    return TimedStep(spec, build_inventory(spec), mesh, BatchShape(1, tokens, 1), software, machine, stages)


def _moe(experts: int, top_k: int, width: int, shared: int = 0) -> dict[str, int]:
    return {"num_experts": experts, "top_k": top_k, "ffn_hidden_size": width, "shared_ffn_hidden_size": shared}


def _layers(folder: Path) -> Iterator[Measured]:
    """One MoE layer on eight H100, forward and backward (NVIDIA/Megatron-LM, moe_perf)."""
    for row in json.loads((folder / "moe_layer_h100_12.json").read_text(encoding="utf-8")):
        dtype = "bf16" if row["precision"] == "bf16" else "mxfp8"  # one scale per block of 128
        shape = _moe(row["experts"], row["topk"], row["moe_ffn"], row["shared"] or 0)
        mesh = MeshShape(8, tp=row["tp"], ep=row["ep"], dp=8 // row["tp"])
        work = _work("h100-sxm", dtype, shape, row["hidden"], mesh, row["seq"] * row["mbs"], row["dispatcher"])
        about = (ledger_of(work, "E"), names_of(work), work.machine, bandwidths(work))
        for run, key in ((FORWARD, "forward_ms"), (BACKWARD, "backward_ms")):
            yield Measured(row[key] / 1e3, f"layer {row['precision'][:4].strip()}", about[0], run, *about[1:])


def _grouped(folder: Path) -> Iterator[Measured]:
    """Grouped products in bf16 on a B200 (MooreThreads/SimuMax)."""
    for row in json.loads((folder / "op_efficiency_simumax.json").read_text(encoding="utf-8")):
        if (row["system"], row["op"]) != ("b200", "group_matmul"):
            continue
        shape = dict(re.findall(r"(\w+)=(\w+)", row["shape"]))
        groups, rows, columns, depth = (int(shape[key]) for key in ("ng", "M", "N", "K"))
        flops, weights, inner = 2.0 * groups * rows * columns * depth, 2.0, float(depth)
        if shape["stage"] == "bwd_grad_act":
            inner = float(columns)
        elif shape["stage"] == "bwd_grad_w":
            weights, inner = 8.0, float(rows)
        ledger = Ledger()
        moved = 2.0 * groups * rows * (columns + depth)
        ledger.grouped.append(GroupedProduct(FORWARD, "bf16", flops, weights * groups * columns * depth, moved, rows, inner, 1.0))
        work = _work("b200", "bf16", _moe(groups, 1, columns), depth, MeshShape(1), rows * groups, "alltoall")
        seconds = flops / (row["peak_tflops"] * 1e12 * row["efficiency"])
        yield Measured(seconds, "group_matmul", ledger, FORWARD, names_of(work), work.machine, bandwidths(work))


def _deepep(folder: Path) -> Iterator[Measured]:
    """DeepEP's combine on eight H200, in bf16 (ai-dynamo/aiconfigurator)."""
    for row in _csv(folder / "deepep_normal.csv"):
        tokens, hidden, top_k = int(row["num_token"]), int(row["hidden_size"]), int(row["num_topk"])
        if tokens < MIN_TOKENS or row["combine_sms"] != DEEPEP_SMS:
            continue
        moved = tokens * hidden * 2.0 * copies(8.0, top_k, distinct=True) * 7 / 8
        yield _exchange(float(row["combine_transmit_us"]) / 1e6, "deepep", moved, 0.0)


def _alltoall(folder: Path) -> Iterator[Measured]:
    """NCCL's all-to-all on eight H200 (ai-dynamo/aiconfigurator)."""
    for row in _csv(folder / "nccl.csv"):
        size = int(row["message_size"]) * int(row["bytes_per_elem"])
        if row["op_name"] == "alltoall" and row["num_gpus"] == "8" and size >= MIN_BYTES:
            yield _exchange(float(row["latency"]) / 1e3, "alltoall", size * 7 / 8, 0.0)


def _exchange(seconds: float, source: str, moved: float, calls: float) -> Measured:
    """A transfer inside a domain of H200; the latency of an exchange is not part of it."""
    ledger = Ledger()
    ledger.transfer(FORWARD, "exchange", moved, calls)
    work = _work("h200", "bf16", _moe(8, 1, 1), 1, MeshShape(8, ep=8, dp=8), 1, source)
    return Measured(seconds, source, ledger, FORWARD, names_of(work), work.machine, bandwidths(work))


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
