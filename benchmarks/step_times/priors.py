"""Priors of the constants that are fitted to steps: value, spread of its logarithm, unit and source."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megaplan.cost.step.frameworks import frameworks
from megaplan.devices import device_names, load_device


class Prior(NamedTuple):
    """Prior of a constant; `most` is an upper bound, for shares."""

    value: float
    spread: float
    unit: str
    source: str
    most: float = float("inf")


PINS = Path(__file__).with_name("pinned.json")
GENERATIONS = ("ampere", "hopper", "blackwell", "cdna")
LOAD = "share of the data sheet's peak that large products reach under training load"
_GEMM = {
    "a100-40gb": {"bf16": 0.76},
    "a100-80gb": {"bf16": 0.76},
    "h100-sxm": {"bf16": 0.74, "fp8": 0.68, "mxfp8": 0.60},
    "h100-sxm-500w": {"bf16": 0.63, "fp8": 0.57, "mxfp8": 0.50},
    "h100-nvl": {"bf16": 0.63, "fp8": 0.57, "mxfp8": 0.50},
    "h100-pcie": {"bf16": 0.60, "fp8": 0.55, "mxfp8": 0.48},
    "h200": {"bf16": 0.76, "fp8": 0.70, "mxfp8": 0.60},
    "b200": {"bf16": 0.53, "fp8": 0.57, "mxfp8": 0.55, "nvfp4": 0.45},
    "b300": {"bf16": 0.54, "fp8": 0.60, "mxfp8": 0.58, "nvfp4": 0.36},
    "gb200": {"bf16": 0.53, "fp8": 0.54, "mxfp8": 0.53, "nvfp4": 0.45},
    "gb300": {"bf16": 0.57, "fp8": 0.65, "mxfp8": 0.63, "nvfp4": 0.42},
    "mi300x": {"bf16": 0.45, "fp8": 0.40, "mxfp8": 0.40},
    "mi355x": {"bf16": 0.50, "fp8": 0.50, "mxfp8": 0.50, "nvfp4": 0.40},
}
TUNED = "chosen so that the step times of the recipes that are not held out agree (docs/reference/maxtext.md); no row of the fit has a TPU"
_TPUS = {
    "tpu-v5p": {"bf16": 0.78, "fp8": 0.78, "int8": 0.70},
    "tpu-v6e": {"bf16": 0.67, "fp8": 0.67, "int8": 0.60},
    "tpu-v7": {"bf16": 0.68, "fp8": 0.67, "int8": 0.60},
}
"""Shares of each device's peak that its large products reach under XLA."""
_TPU = {"attention.tpu.forward": 0.58, "attention.tpu.backward": 0.48, "scan.tpu": 0.026, "grouped.tpu": 0.90}
_FORMS = "MooreThreads/SimuMax@4dcaae51, configs/system: the form fitted to its operation tables"
_SCRIPTS = "published step times; no single measurement"
_ATTENTION = {"ampere": (0.86, 0.67), "hopper": (0.87, 0.74), "blackwell": (1.06, 0.80), "cdna": (0.80, 0.60)}
_SCAN = {"ampere": 0.07, "hopper": 0.044, "blackwell": 0.0176, "cdna": 0.026}
_MEMORY = {"llm-foundry": (1.75, 0.2), "torchtitan": (1.2, 0.2), "nanotron": (1.5, 0.2), "automodel": (1.3, 0.2)}
_LOCAL = "eight steps of arXiv:2205.05198, table 5, are within 4 %"
_OWN = {
    "memory.megatron-local": Prior(1.4, 0.2, "factor", f"bytes relative to ideal ones, as torchtitan's; {_LOCAL}"),
    "library.megatron-local": Prior(0.885, 0.07, "factor", f"products relative to Transformer Engine's, as llm-foundry's; {_LOCAL}"),
    "step.megatron-local": Prior(0.028, 0.5, "seconds", "fixed time of a step, as megatron-lm's, whose loop it is"),
}
"""Priors of a framework that no row has."""
_HOST = {"nanotron": 14e-6, "llm-foundry": 10e-6, "automodel": 10e-6}


@cache
def priors(*, pins: bool = True) -> dict[str, Prior]:
    """Prior of every constant by name; with `pins` the results of the first stage replace those that are written here."""
    found: dict[str, Prior] = {}
    for device in (name for name in device_names() if name in _GEMM):  # the others have the rate of a device of the same generation
        for dtype, share in _GEMM[device].items():
            found[f"gemm.{device}.{dtype}"] = Prior(share, 0.10 if dtype == "nvfp4" else 0.07, "share", LOAD, 0.95)
        if load_device(device).generation == "ampere":
            found |= {f"gemm.{device}.{dtype}": Prior(0.76, 0.07, "share", "emulated in bf16", 0.95) for dtype in ("fp8", "mxfp8", "nvfp4")}
        elif "nvfp4" not in _GEMM[device]:
            found[f"gemm.{device}.nvfp4"] = Prior(_GEMM[device]["mxfp8"], 0.1, "share", "emulated in fp8", 0.95)
        found[f"clock.{device}"] = Prior(1.0, 0.10, "factor", "ratio of clocks under load to those of the prior, equal for all dtypes")
    for name in GENERATIONS:
        for dtype in ("bf16", "fp8", "mxfp8", "nvfp4"):
            found[f"gemm.{name}.{dtype}"] = Prior(1.0, 0.15, "factor", "kernels of a generation, equal for all devices")
        for run, share in zip(("forward", "backward"), _ATTENTION[name], strict=True):
            found[f"attention.{name}.{run}"] = Prior(share, 0.08, "factor", f"relative to the product rate; {_FORMS}")
        found[f"scan.{name}"] = Prior(_SCAN[name], 0.4, "share", "share of the bf16 peak; " + _SCRIPTS)
        found[f"grouped.{name}"] = Prior(0.985, 0.02, "share", f"share of the dense rate, at most 1; {_FORMS}", 1.0)
    found |= _forms() | _links() | _frameworks() | _tpus()
    if pins and PINS.exists():
        for name, pin in json.loads(PINS.read_text(encoding="utf-8")).items():
            found[name] = found[name]._replace(value=pin["value"], spread=pin["spread"], source=pin["source"])
    return found


def _tpus() -> dict[str, Prior]:
    """Constants of TPUs, of which no row of the fit has any: the fit writes them as they are here."""
    found = {name: Prior(value, 0.1, "share", TUNED) for name, value in _TPU.items()}
    for device, shares in _TPUS.items():
        found |= {f"gemm.{device}.{dtype}": Prior(share, 0.1, "share", f"{LOAD}; {TUNED}", 0.95) for dtype, share in shares.items()}
        found[f"clock.{device}"] = Prior(1.0, 0.1, "factor", "ratio of clocks under load to those of the prior, equal for all dtypes")
    for dtype in ("bf16", "fp8", "int8"):
        found[f"gemm.tpu.{dtype}"] = Prior(1.0, 0.15, "factor", "kernels of a generation, equal for all devices")
    found["ici.link"] = Prior(0.9, 0.1, "share", "share of all links of a torus together; " + TUNED, 1.0)
    found["ici.exposed"] = Prior(0.5, 0.4, "factor", "sharded.exposed under XLA relative to FSDP2; " + TUNED)
    for name in ("cast.int8", "cast.rows.int8"):
        found[name] = Prior(1.4, 0.25, "factor", f"as {name.replace('int8', 'fp8')}, in int8; " + _SCRIPTS)
    return found


def _forms() -> dict[str, Prior]:
    return {
        "gemm.quality": Prior(0.5, 0.3, "exponent", _FORMS),
        "gemm.depth.bf16": Prior(70.0, 0.3, "columns", _FORMS),
        "gemm.depth.low": Prior(250.0, 0.4, "columns", _SCRIPTS),
        "grouped.rows": Prior(60.0, 0.3, "rows", _FORMS),
        "grouped.weights": Prior(0.6, 0.15, "share", f"share of the memory rate, at most 1; {_FORMS}", 1.0),
        "attention.spread.forward": Prior(2.0, 0.1, "factor", _FORMS),
        "attention.spread.backward": Prior(0.7, 0.1, "factor", _FORMS),
        "attention.fp8": Prior(1.6, 0.2, "factor", "rate of fp8 kernels relative to bf16; " + _SCRIPTS, 2.0),
        "attention.flash2.hopper": Prior(0.62, 0.15, "factor", "arXiv:2407.08608: FlashAttention-2 relative to 3 on H100"),
        "attention.flash1.forward": Prior(0.7, 0.3, "factor", "arXiv:2307.08691: FlashAttention relative to 2 on A100"),
        "attention.flash1.backward": Prior(0.6, 0.3, "factor", "arXiv:2307.08691: FlashAttention relative to 2 on A100"),
        "attention.sinks": Prior(0.77, 0.2, "factor", "rate of kernels with sinks relative to those without; " + _SCRIPTS),
        "memory.share": Prior(0.80, 0.05, "share", "share of the data sheet's bandwidth; streaming kernels", 0.95),
        "memory.te": Prior(1.15, 0.15, "factor", "bytes relative to ideal ones, Transformer Engine; " + _SCRIPTS),
        "memory.eager": Prior(1.6, 0.3, "factor", "elementwise operations without fusion; " + _SCRIPTS),
        "memory.sinks": Prior(1.5, 0.4, "factor", "biases of linears and clamped activations on Blackwell; " + _SCRIPTS),
        "permute.alltoall": Prior(0.7, 0.3, "factor", "bytes relative to those of dispatch, sorts and combine; " + _SCRIPTS),
        "permute.fused": Prior(0.35, 0.3, "factor", "dispatchers that permute during the transfer"),
        "permute.padded": Prior(1.15, 0.4, "factor", "unfused permutation into buffers of fixed capacity; " + _SCRIPTS),
        "cast.rows.fp8": Prior(2.0, 0.25, "factor", "rows of experts, otherwise as cast.fp8"),
        "cast.rows.mxfp8": Prior(1.5, 0.25, "factor", "rows of experts, otherwise as cast.mxfp8"),
        "cast.rows.nvfp4": Prior(1.5, 0.25, "factor", "rows of experts, otherwise as cast.nvfp4"),
        "cast.fp8": Prior(2.0, 0.25, "factor", "bytes relative to one read and one write, two layouts; " + _SCRIPTS),
        "cast.mxfp8": Prior(1.5, 0.25, "factor", "as cast.fp8, with block scales"),
        "cast.nvfp4": Prior(1.5, 0.25, "factor", "as cast.fp8, with two scales"),
        "launch.gap": Prior(1.5e-6, 0.2, "seconds", "time between two kernels; " + _SCRIPTS),
        "launch.gap.graphed": Prior(0.4, 0.3, "factor", "launch.gap inside a graph relative to outside; " + _SCRIPTS, 1.0),
        "host.sync": Prior(0.8, 0.3, "factor", "share of the shorter of device and host that adds if the host waits; " + _SCRIPTS, 1.0),
        "growth": Prior(0.004, 0.4, "factor", "per doubling of nodes; published weak scaling, 0 to 5.9 % over 8 to 128 times more devices"),
    }


def _links() -> dict[str, Prior]:
    nccl = "NCCL on nccl-tests, share of nominal: "
    return {
        "link.node": Prior(0.75, 0.12, "share", nccl + "all-gather of 512 MiB on eight H200 (ai-dynamo/aiconfigurator)", 1.0),
        "link.network": Prior(0.80, 0.12, "share", nccl + "NVIDIA/nccl-tests, issue 267", 1.0),
        "tensor.link": Prior(0.84, 0.10, "share", nccl + "a long ring's all-gather on H200 (ai-dynamo/aiconfigurator)", 1.0),
        "tensor.latency": Prior(
            *(30e-6, 0.2, "seconds"),
            "time of a collective without its bytes; NCCL's all-gather on two to eight H200 (ai-dynamo/aiconfigurator)",
        ),
        "tensor.exposed": Prior(0.35, 0.4, "share", "exposed share of overlapped tensor-parallel transfers; " + _SCRIPTS, 1.0),
        "exchange.link": Prior(0.6, 0.3, "share", nccl + "all-to-all of 512 MiB on eight H200 (ai-dynamo/aiconfigurator) is 0.72", 1.0),
        "exchange.network": Prior(0.75, 0.3, "share", nccl + "all-to-all over nodes", 1.0),
        "exchange.alltoall": Prior(120e-6, 0.4, "seconds", "counts, splits and waits of an exchange; " + _SCRIPTS),
        "exchange.fused": Prior(80e-6, 0.3, "seconds", "the same for DeepEP and HybridEP; " + _SCRIPTS),
        "exchange.exposed": Prior(0.3, 0.4, "share", "exposed share of overlapped exchanges; " + _SCRIPTS, 1.0),
        "exchange.exposed.graphed": Prior(0.7, 0.4, "factor", "exchange.exposed in a full-iteration graph; " + _SCRIPTS, 1.0),
        "context.exposed": Prior(0.5, 0.4, "share", "exposed share of a ring's transfers; " + _SCRIPTS, 1.0),
        "pipeline.exposed": Prior(0.5, 0.4, "share", "exposed share of transfers between stages; " + _SCRIPTS, 1.0),
        "data.latency": Prior(15e-6, 0.4, "seconds", "time of a ring's step; " + _SCRIPTS),
        "data.exposed": Prior(0.3, 0.3, "share", "exposed share of overlapped reductions and gathers; " + _SCRIPTS, 1.0),
        "data.unbucketed": Prior(2.0, 0.4, "factor", "one collective per tensor relative to buckets; " + _SCRIPTS),
        "sharded.network": Prior(0.7, 0.25, "share", "rate of gathers of sharded parameters on adapters; " + _SCRIPTS, 1.0),
        "sharded.exposed": Prior(0.12, 0.4, "share", "exposed share of gathers that overlap with layers; " + _SCRIPTS, 1.0),
    }


def _frameworks() -> dict[str, Prior]:
    found = {"library.flash1-era.hopper": Prior(0.87, 0.07, "factor", "products of 2023's library on H100 relative to today's")}
    for name, host in frameworks().items():
        found[f"memory.{name}"] = Prior(*_MEMORY.get(name, (1.0, 0.05)), "factor", "bytes relative to ideal ones; " + _SCRIPTS)
        found[f"host.{name}"] = Prior(_HOST.get(name, 7e-6), 0.35, "seconds", "time of the host per kernel outside graphs; " + _SCRIPTS)
        found[f"step.{name}"] = Prior(0.03 if name == "nanotron" else 0.012, 0.5, "seconds", "fixed time of a step; " + _SCRIPTS)
        if host.library:
            found[f"library.{name}"] = Prior(1.0, 0.07, "factor", "products relative to Transformer Engine's; " + _SCRIPTS)
    for name, host in frameworks().items():
        for release in host.releases:
            found[f"moe.{name}.{release}"] = Prior(1.0, 0.12, "factor", "MoE layers of a release relative to the others; " + _SCRIPTS)
    return found | _OWN
