"""`predict_step`: the time of one training step, by term."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from megaplan.columns import Basis
from megaplan.cost.step.attention import attention_seconds, drawn_seconds
from megaplan.cost.step.blocks import kinds_in, ledger_of
from megaplan.cost.step.compose import (
    PassTerms,
    StageTerms,
    Step,
    device_seconds,
    exchanged_seconds,
    overlapped_passes,
    stage_passes,
    step_seconds,
)
from megaplan.cost.step.constants import constants as constants_by_name
from megaplan.cost.step.constants import rated_as, values
from megaplan.cost.step.data import Once, once_of
from megaplan.cost.step.gemm import product_seconds
from megaplan.cost.step.grouped import grouped_seconds
from megaplan.cost.step.ledger import BACKWARD, FORWARD, Ledger
from megaplan.cost.step.memory import moved_seconds
from megaplan.cost.step.names import exchange_leaves, names_of, product_names, rates_of
from megaplan.cost.step.parameters import accumulate_bytes
from megaplan.cost.step.scan import scan_seconds
from megaplan.cost.step.transfers import transfer_seconds
from megaplan.cost.step.workload import BatchShape, Machine, MeshShape, Software, StageShape, TimedStep

ADAPTERS_OF_TENSOR_GROUP = 8
"""Network adapters that a tensor group across nodes uses together."""
Passes = tuple[dict[str, float], dict[str, float]]
"""Terms of forward and backward: seconds by name, and the numbers `kernels` and `launched`."""
WAITS = ("tensor", "exchange", "context", "pipeline")
GATHERS = "gathers"
"""The term of a microbatch's waits for gathers and reductions over data ranks."""
LEAST = 1e-12
"""Share of a step below which a difference of sums counts as a rounding error."""


class StepTime(NamedTuple):
    """Time of a step.

    Attributes:
        seconds: Seconds of the step.
        terms: Seconds by term, which sum to `seconds`: of the busiest stage's microbatches, and of the rest of the step.
        tokens_per_second_per_device: Tokens of the step over seconds and devices.
    """

    seconds: float
    terms: dict[str, float]
    tokens_per_second_per_device: float


class StepTimer:
    """Times steps of one model, software and machine on any mesh; the times of blocks are cached by their local shape."""

    def __init__(self, like: TimedStep, constants: Mapping[str, float] | None = None) -> None:
        """`like` is one of the steps; `constants` are values by name, None for those of the data file."""
        self._like = like
        self._values = values() if constants is None else constants
        self._rates: dict[tuple[bool, ...], dict[str, float]] = {}
        self._blocks: dict[tuple[object, ...], Passes] = {}

    def time(self, mesh: MeshShape, batch: BatchShape, stages: tuple[StageShape, ...]) -> StepTime:
        """Time of a step on a mesh."""
        work = replace(self._like, mesh=mesh, batch=batch, stages=stages)
        rates, parts = self.rates(work), self.parts(work)
        once, summed = once_of(work), [stage_terms(work, stage, parts) for stage in stages]
        step = step_seconds(summed, once, rates)
        tokens = work.step_tokens / mesh.world
        terms = _terms(work, parts, rates, _busiest(summed, once, rates), step)
        factor = work.machine.step_factor
        if factor == 1:
            return StepTime(step.total, terms, tokens / step.total)
        return StepTime(factor * step.total, {name: factor * term for name, term in terms.items()}, tokens / (factor * step.total))

    def rates(self, work: TimedStep) -> Mapping[str, float]:
        """Constants by name on the links that a step's groups use."""
        crossing = links_crossed(work)
        rates = self._rates.get(crossing)
        if rates is None:
            given = {f"product.{dtype}": share for dtype, share in work.machine.reached.items()}
            rates = rates_of(names_of(work), self._values) | given
            self._rates[crossing] = rates = {"sync": 0.0, "sync.backward": 0.0} | rates
        return rates

    def parts(self, work: TimedStep, kinds: Iterable[str] | None = None) -> dict[str, Passes]:
        """Terms of each kind of block of a step, or only of those in `kinds`."""
        mesh, batch, rates = work.mesh, work.batch, self.rates(work)
        shape = (batch.micro, batch.seq, mesh.cp, mesh.tp, links_crossed(work))
        return {kind: self._block(work, kind, shape, rates) for kind in kinds or kinds_of(work)}

    def _block(self, work: TimedStep, kind: str, shape: tuple[object, ...], rates: Mapping[str, float]) -> Passes:
        mesh = work.mesh
        key: tuple[object, ...] = (kind, shape)
        if kind[0] == "E":  # experts' time depends only on the number of tokens, not of sequences or context ranks
            key = (kind, work.tokens, mesh.tp, mesh.ep, mesh.etp, shape[-1])
        elif kind == "hop":
            key = (kind, shape, mesh.pp > 1, mesh.vpp)
        elif kind == "accumulate":
            key = (kind, shape, mesh.pp, mesh.ep, mesh.etp)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = block_terms(ledger_of(work, kind), work.machine, rates, bandwidths(work))
        return found


def predict_step(work: TimedStep, constants: Mapping[str, float] | None = None) -> StepTime:
    """Time of one step; for many steps of one model use a `StepTimer`.

    Args:
        work: The step.
        constants: Values by name; None for those of the data file.
    """
    return StepTimer(work, constants).time(work.mesh, work.batch, work.stages)


def reached_share(machine: Machine, dtype: str) -> tuple[float, float, bool]:
    """Share of its peak that a device's large products reach, the spread of its logarithm, and True if steps on it moved the share."""
    found = [constants_by_name()[name] for name in product_names(machine, dtype)]
    own = rated_as(machine.name, machine.generation) == machine.name
    return prod(each.value for each in found), max(each.spread for each in found), own and found[0].basis is Basis.FITTED


def links_crossed(work: TimedStep) -> tuple[bool, ...]:
    """True if the tensor group, the context group, the mesh and the experts' group cross domains: the only values of a mesh in rates."""
    mesh, domain = work.mesh, work.machine.domain
    return (mesh.tp > domain, mesh.tp * mesh.cp > domain, mesh.world > domain, exchange_leaves(work))


def kinds_of(work: TimedStep) -> tuple[str, ...]:
    """Kinds of block of the step, and its ends."""
    blocks = {kind for stage in work.stages for kind, count in stage.blocks.items() if count} | set(_depths(work))
    return (*sorted(blocks), "embedding", "head", *once_a_stage(work.software))


def once_a_stage(software: Software) -> tuple[str, ...]:
    """Kinds that every stage has once: the transfer to the next stage, and the accumulation of gradients if it is a separate operation."""
    return ("hop", "accumulate") if accumulate_bytes(software) else ("hop",)


def blocks_on(work: TimedStep, stage: StageShape) -> dict[str, float]:
    """Number of blocks of each kind on a stage; those of prediction depths are on the stage of the head."""
    found = {kind: float(count) for kind, count in stage.blocks.items() if count}
    for kind, count in _depths(work).items() if stage.head else ():
        found[kind] = found.get(kind, 0.0) + count
    found |= {"embedding": float(stage.embedding), "head": float(stage.head), "hop": 1.0}
    if accumulate_bytes(work.software):
        found["accumulate"] = 1.0
    return found


def _depths(work: TimedStep) -> dict[str, int]:
    """Blocks of all prediction depths by kind: the kind of the last layer of each letter."""
    mtp = work.spec.model.features.mtp
    if mtp is None:
        return {}
    last = {kind[0]: kind for kind in kinds_in(work.inventory).layers}
    return {last[letter]: mtp.depth for letter in mtp.letters}


def peak_of(machine: Machine, dtype: str) -> float:
    """Peak FLOPs per second of a dtype: mxfp8 and nvfp4 use fp8's and fp4's, and a missing dtype uses the next wider one's."""
    for name in {"mxfp8": ("fp8", "bf16"), "nvfp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16")}.get(dtype, (dtype,)):
        if name in machine.peaks:
            return machine.peaks[name]
    return machine.peaks["bf16"]


def bandwidths(work: TimedStep) -> dict[str, float]:
    """Nominal bytes per second of the link of each group of ranks."""
    machine, mesh = work.machine, work.mesh
    return {
        "tensor": machine.network * ADAPTERS_OF_TENSOR_GROUP if mesh.tp > machine.domain else machine.node,
        "exchange": machine.network if exchange_leaves(work) else machine.node,
        "context": machine.network if mesh.tp * mesh.cp > machine.domain else machine.node,
        "pipeline": machine.network if mesh.world > machine.domain else machine.node,
    }


def block_terms(ledger: Ledger, machine: Machine, rates: Mapping[str, float], links: Mapping[str, float]) -> Passes:
    """Seconds of a block's passes by term, and `kernels` and `launched` as counts."""
    found: Passes = ({}, {})
    memory = machine.memory * rates["memory"]

    def add(run: int, term: str, seconds: float) -> None:
        found[run][term] = found[run].get(term, 0.0) + seconds

    dtypes = [name.partition(".")[2] for name in rates if name.startswith("product.")]
    peak = {dtype: peak_of(machine, dtype) * rates[f"product.{dtype}"] for dtype in dtypes}
    for run, dtype, flops, moved, shape, depth, count in ledger.products:
        add(
            run, "gemm", count * product_seconds(flops, moved, shape, depth, peak[dtype], memory, rates["quality"], rates[f"depth.{dtype}"])
        )
    for run, dtype, flops, weight_bytes, row_bytes, rows, depth, count in ledger.grouped:
        shares = (rates["grouped"], rates["rows"], rates[f"depth.{dtype}"], rates["weights"])
        add(run, "grouped", count * grouped_seconds(flops, weight_bytes, row_bytes, rows, depth, peak[dtype], memory, *shares))
    for run, backward, flops, blocks, width, num_sms, count in ledger.attention:
        rate = machine.peaks["bf16"] * rates[f"attention.{backward}"]
        add(run, "attention", count * attention_seconds(flops, blocks, width, num_sms, rate, rates[f"spread.{backward}"]))
    for run, numbers, rate in ledger.drawn:
        add(run, "attention", drawn_seconds(numbers, machine.num_sms, rate))
    for run, kind, moved in ledger.moved:
        add(run, _MOVED.get(kind, "casts"), moved_seconds(moved, memory, rates[kind]))
    for run, flops, moved in ledger.scans:
        add(run, "scan", scan_seconds(flops, moved, machine.peaks["bf16"] * rates["scan"], memory))
    for run, group, moved, calls in ledger.transfers:
        link = links[group] * rates[group]
        add(run, group, transfer_seconds(moved, calls, link, rates[f"{group}.latency"], rates[f"{group}.exposed"]))
    for run in (FORWARD, BACKWARD):
        add(run, "kernels", ledger.kernels[run])
        add(run, "launched", ledger.launched[run])
    return found


_MOVED = {"plain": "memory", "accumulate": "memory", "scores": "attention", "copied": "memory", "scanned": "scan", "permute": "permutation"}


def stage_terms(work: TimedStep, stage: StageShape, parts: Mapping[str, Passes]) -> StageTerms:
    """Both passes of a stage: the sums over its blocks."""
    counts = blocks_on(work, stage)
    return StageTerms(stage.count, pass_terms(counts, parts, FORWARD), pass_terms(counts, parts, BACKWARD))


def pass_terms(counts: Mapping[str, float], parts: Mapping[str, Passes], run: int) -> PassTerms:
    """A pass of this many blocks of each kind."""
    sums = {"work": 0.0, "kernels": 0.0, "waits": 0.0, "launched": 0.0}
    for kind, count in counts.items():
        for term, seconds in parts[kind][run].items():
            sums["waits" if term in WAITS else term if term in sums else "work"] += count * seconds
    return PassTerms(**sums)


class _Busiest(NamedTuple):
    """Seconds of one microbatch on the busiest stage: on the device, joined with the host's launches, and with gathers that overlap."""

    stage: int
    device: float
    joined: float
    overlapped: float


def _busiest(stages: Sequence[StageTerms], once: Once, rates: Mapping[str, float]) -> _Busiest:
    exchanged, found = exchanged_seconds(once, rates), []
    for index, stage in enumerate(stages):
        passes = stage_passes(stage, rates)
        device = device_seconds(stage.forward, rates) + device_seconds(stage.backward, rates)
        found.append(_Busiest(index, device, sum(passes), sum(overlapped_passes(*passes, exchanged, once, rates))))
    return max(found, key=lambda stage: stage.overlapped)


def _terms(work: TimedStep, parts: Mapping[str, Passes], rates: Mapping[str, float], busiest: _Busiest, step: Step) -> dict[str, float]:
    """Seconds by term: of the busiest stage's microbatches, then of the rest of the step; they sum to the step."""
    count, sums = work.batch.num_microbatches, dict[str, float]()
    for kind, often in blocks_on(work, work.stages[busiest.stage]).items():
        for run in (FORWARD, BACKWARD):
            for term, seconds in parts[kind][run].items():
                sums[term] = sums.get(term, 0.0) + often * seconds * count
    sums["gaps"] = sums.pop("kernels", 0.0) * rates["gap"]
    sums.pop("launched", None)
    further = {
        "launches": count * (busiest.joined - busiest.device),
        GATHERS: count * (busiest.overlapped - busiest.joined),
        "bubble": step.stages - count * busiest.overlapped,
        "growth": step.total - step.stages - step.exposed - step.optimizer - step.fixed,
    }
    return {
        **{term: seconds if term in WAITS else seconds * rates["moe"] for term, seconds in sums.items()},
        **{term: seconds for term, seconds in further.items() if seconds > LEAST * step.total},
        **{"exposed data": step.exposed, "optimizer": step.optimizer, "fixed": step.fixed},
    }
