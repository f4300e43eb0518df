"""The fitted constants of a step: every rate is a product of named constants, by device, dtype, framework, release or kernel class."""

from collections.abc import Mapping

from megaplan.cost.step.constants import rated_as
from megaplan.cost.step.frameworks import Framework, framework, known_release
from megaplan.cost.step.launch import experts_again
from megaplan.cost.step.workload import Machine, Software, TimedStep
from megaplan.devices import TPU
from megaplan.spec.models import GroupedQueryAttention

Factors = tuple[str, ...]
"""Names of the constants whose product is a rate; a rate without names is 1."""


def names_of(work: TimedStep) -> dict[str, Factors]:
    """The factors of each rate, by rate."""
    software, host = work.software, framework(work.software.name)
    found = _kernels(work, host) | _transfers(work, host)
    graphed = "full" in software.graphs
    found["gap"] = _product("launch.gap", "launch.gap.graphed" if graphed else None)
    is_moe = work.spec.model.moe is not None
    release = _release(work, is_moe=is_moe)
    found["moe"] = _product(f"moe.{release}" if release else None)
    found["host"] = _product(f"host.{software.name}")
    waits = is_moe and software.dispatcher == "alltoall" and not graphed and not software.token_drop and host.kernels == "te"
    if waits:  # NCCL's kernels wait for one another; with overlap, a wait in a forward also delays the backward that runs at the same time
        found["sync"] = _product("host.sync")
        if software.exchange_overlap or experts_again(work.recomputed) == 1.0:
            found["sync.backward"] = _product("host.sync")
    found["fixed"] = _product(f"step.{software.name}")
    found["growth"] = _product("growth")
    return found


def _release(work: TimedStep, *, is_moe: bool) -> str | None:
    release = known_release(work.software.name, work.software.release) if is_moe else None
    return f"{work.software.name}.{release}" if release else None


def product_names(machine: Machine, dtype: str) -> tuple[str, str, str]:
    """Names of the factors of the rate that large products reach: the device's share of its peak, its clock, the generation's kernels."""
    device = rated_as(machine.name, machine.generation)
    return f"gemm.{device}.{dtype}", f"clock.{device}", f"gemm.{machine.generation}.{dtype}"


def _kernels(work: TimedStep, host: Framework) -> dict[str, Factors]:
    software, machine = work.software, work.machine
    generation = machine.generation
    library = f"library.{software.name}" if host.library else None
    tuned = "library.flash1-era.hopper" if software.name == "llm-foundry" and generation == "hopper" else None
    dtypes = {"bf16", software.dtype, software.linear_dtype or software.dtype}
    found = {f"product.{dtype}": _product(*product_names(machine, dtype), library, tuned) for dtype in dtypes}
    found |= {f"depth.{dtype}": _product("gemm.depth.bf16" if dtype == "bf16" else "gemm.depth.low") for dtype in dtypes}
    found["quality"] = _product("gemm.quality")
    found |= _attention(work, host)
    unfused = "memory.sinks" if _has_sinks(work) and generation == "blackwell" else None
    found["memory"] = _product("memory.share")
    own = f"memory.{software.name}"
    found["plain"] = _product("memory.te" if host.kernels == "te" else None, own, None if software.compiled else "memory.eager", unfused)
    found["accumulate"] = found["scanned"] = found["scores"] = found["copied"] = ()
    plain = "permute.padded" if software.token_drop else "permute.alltoall"
    found["permute"] = _product(plain if software.dispatcher == "alltoall" else "permute.fused")
    for dtype in dtypes - {"bf16"}:
        found |= {f"cast.{dtype}": _product(f"cast.{dtype}"), f"cast.rows.{dtype}": _product(f"cast.rows.{dtype}")}
    found["grouped"] = _product(f"grouped.{generation}")
    found["rows"], found["weights"] = _product("grouped.rows"), _product("grouped.weights")
    found["scan"] = _product(f"scan.{generation}")
    return found


def _has_sinks(work: TimedStep) -> bool:
    return isinstance(work.spec.model.attention, GroupedQueryAttention) and work.spec.model.attention.sinks


def _attention(work: TimedStep, host: Framework) -> dict[str, Factors]:
    machine, found = work.machine, {}
    generation = machine.generation
    product = product_names(machine, "bf16")
    flash = host.attention if work.software.flash is None else f"flash{work.software.flash}"
    low, sinks = "attention.fp8" if work.software.fp8_attention else None, "attention.sinks" if _has_sinks(work) else None
    for number, run in enumerate(("forward", "backward")):
        kernel = f"attention.{flash}.{run}" if flash == "flash1" else None
        kernel = "attention.flash2.hopper" if flash == "flash2" and generation != "ampere" else kernel
        found[f"attention.{number}"] = _product(f"attention.{generation}.{run}", *product, kernel, low, sinks)
        found[f"spread.{number}"] = _product(f"attention.spread.{run}")
    return found


def _transfers(work: TimedStep, host: Framework) -> dict[str, Factors]:
    software, mesh, domain = work.software, work.mesh, work.machine.domain
    fused, torus = software.dispatcher != "alltoall", work.machine.generation == TPU
    near = "ici.link" if torus else "link.node"
    overlaps = host.data_overlap if software.data_overlap is None else software.data_overlap
    return {
        "tensor": _product("link.network" if mesh.tp > domain else near if torus else "tensor.link"),
        "tensor.latency": _product("tensor.latency"),
        "tensor.exposed": _product("tensor.exposed" if software.tp_overlap else None),
        "exchange": _product("exchange.network" if exchange_leaves(work) else near if torus else "exchange.link"),
        "exchange.latency": _product("exchange.fused" if fused else "exchange.alltoall"),
        "exchange.exposed": _product(*_exchange_exposed(software)),
        "context": _product("link.network" if mesh.tp * mesh.cp > domain else near),
        "context.latency": _product("tensor.latency"),
        "context.exposed": _product("context.exposed"),
        "pipeline": _product("link.network" if mesh.world > domain else near),
        "pipeline.latency": _product("tensor.latency"),
        "pipeline.exposed": _product("pipeline.exposed"),
        "node": _product(near),
        "network": _product("link.network"),
        "data.latency": _product("data.latency"),
        "data.slow": _product("data.unbucketed" if host.accumulate_bytes else None),
        "data.exposed": _product("data.exposed" if overlaps else None),
        "sharded.network": _product("sharded.network"),
        "sharded.exposed": _product("sharded.exposed", "ici.exposed" if torus else None),
    }


def _exchange_exposed(software: Software) -> tuple[str, ...]:
    """Names of the exposed share; overlap hides more if an iteration is one graph and weight gradients are delayed."""
    if not software.exchange_overlap:
        return ()
    return ("exchange.exposed", "exchange.exposed.graphed") if "full" in software.graphs else ("exchange.exposed",)


def exchange_leaves(work: TimedStep) -> bool:
    """True if the experts' group crosses domains."""
    return work.mesh.ep * work.mesh.etp > work.machine.domain


def _product(*names: str | None) -> Factors:
    return tuple(name for name in names if name is not None)


def rates_of(names: Mapping[str, Factors], values: Mapping[str, float]) -> dict[str, float]:
    """Value of each rate: the product of its constants."""
    found = {}
    for rate, factors in names.items():
        value = 1.0
        for name in factors:
            value *= values[name]
        found[rate] = value
    return found
