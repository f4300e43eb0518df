"""One plan trained in this process: every phase's peaks as torch and the driver report them, the estimate's, and each step's seconds."""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from accuracy.matrix import Case, cases
from gpu.blocks import blocks_at_peak
from gpu.checks import Emit, said
from gpu.profiles import profiled
from torch.distributed.tensor import DTensor

from megaplan.budget.peaks import build_budget
from megaplan.columns import Column, Phase
from megaplan.cost.model import model_costs
from megaplan.inventory.tensors import Init
from megaplan.plan.make import make_plan
from megaplan.spec.host import device_of
from megaplan.spec.load import load_spec
from megaplan.spec.models import Spec
from megarun.data.batches import Batches
from megarun.engine.initialise import STD, fill
from megarun.engine.phases import PhasedTrainer
from megarun.engine.trainer import sharded_stages
from megarun.job.job import Job
from megarun.launch.process_group import choose_device, process_group, read_launch
from megarun.model.stage import Stage
from megarun.parallel.groups.mesh import RankMesh, build_mesh
from megarun.training.loop import start_kernels

ROOT = Path(__file__).resolve().parent.parent.parent
MEMORY = ROOT / "benchmarks/gpu/memory.yaml"
SPECS = ROOT / "benchmarks/gpu/specs"
NUMBERS = ("allocated", "reserved", "device")
MAX_EVENTS = 2_000_000
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
CHANGING = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""Variables that change GEMM workspaces, memory or ranks: a measured run has none of them, whatever the shell has."""
SHORT = ("host.kernels=reference", "batch={micro_batch_size: 1, seq_length: 32}", "schedule.num_microbatches=1", "model.pattern=AMER")
SHORT += ("model.num_layers=4", "model.mlp=null")
SMALL = {
    "tiny-hybrid": [],
    "tiny-hybrid-selective": ["recompute.default=selective", "precision.grads=bf16", "precision.reduce=bf16"],
    "tiny-ngram": ["model.features={ngram: {num_tables: 4, num_rows: 97, dim: 8}, structure: {num_categories: 5, bottleneck: 8}}"],
}
"""Plans of two million parameters, by their overrides: for a machine without a GPU."""


@dataclass(frozen=True, slots=True)
class How:
    """Settings of one measured training run.

    Attributes:
        num_steps: Steps, the first of which compiles kernels and makes the optimizer's state.
        most_seconds: No further step begins after so long, the first step not counted.
        compiled: Blocks by torch.compile.
        expandable: True if torch's allocator has expandable segments.
        overrides: Overrides of the spec.
        alone: True if no other process uses the device, so that the driver's number counts this one.
        profile: True if one more step is profiled.
        explain: True if the blocks alive at the peak are kept.
    """

    num_steps: int = 3
    most_seconds: float = 60.0
    compiled: bool = False
    expandable: bool = False
    overrides: tuple[str, ...] = ()
    alone: bool = True
    profile: bool = False
    explain: bool = False


class RandomRows:
    """Tokens, classes and platforms drawn by step and seed: a data source for every plan that `Batches` serves."""

    def __init__(self, spec: Spec) -> None:
        self._vocab_size, features = spec.model.vocab_size, spec.model.features
        counts = [features.structure.num_categories] if features.structure is not None else []
        counts += [features.relation_bias.num_relations] if features.relation_bias is not None else []
        self._categories = min(counts, default=1)
        self._platforms = features.platform.num_categories if features.platform is not None else 1

    def rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """int64 [num_rows, seq_length + 1]."""
        return self._drawn(step, seed, num_rows, seq_length, self._vocab_size, np.int64)

    def starts(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:  # noqa: ARG002
        """One document a row: int32 [num_rows, seq_length + 1]."""
        return np.zeros((num_rows, seq_length + 1), np.int32)

    def structure_rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """uint8 [num_rows, seq_length + 1]."""
        return self._drawn(step, seed + 1, num_rows, seq_length, self._categories, np.uint8)

    def platform_rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """uint8 [num_rows, seq_length + 1]."""
        return self._drawn(step, seed + 2, num_rows, seq_length, self._platforms, np.uint8)

    def _drawn(self, step: int, seed: int, num_rows: int, seq_length: int, values: int, dtype: Any) -> np.ndarray:
        return np.random.default_rng((seed, step)).integers(0, values, (num_rows, seq_length + 1)).astype(dtype)


def find_case(name: str, overrides: tuple[str, ...] = ()) -> Case:
    """A plan by its name: of `specs/`, of memory.yaml, or a small one."""
    if name in SMALL:
        spec = load_spec(str(ROOT / "plans/tiny-hybrid.yaml"), overrides=[*SHORT, *SMALL[name], *overrides]).spec
    elif (SPECS / f"{name}.yaml").exists():
        spec = load_spec(str(SPECS / f"{name}.yaml"), overrides=list(overrides)).spec
    else:
        return next(cases(frozenset({name}), MEMORY, overrides))
    job = Job.from_plan(make_plan(spec))
    return Case(name, job, build_budget(job.spec, job.inventory, job.layout), False)


def asked(how: How) -> tuple[str, ...]:
    """Overrides of the spec, the allocator among them: the estimate is of the one that runs."""
    return (*how.overrides, f"host.expandable_segments={str(how.expandable).lower()}")


def estimate_of(case: Case) -> dict[str, dict[str, int]]:
    """The estimate's three numbers by phase.

    torch gives nothing back to the driver, so what is reserved in a phase is the largest of the phases until then; the last two alternate.
    """
    rank, reserve = case.budget.worst, case.budget.device.reserve_bytes
    largest, found = 0, {}
    for phase in Phase:
        largest = max(largest, rank.phases[phase], rank.phases[Phase.OPTIMIZER] if phase is Phase.FORWARD_BACKWARD else 0)
        allocated = rank.phases[phase] - rank.cells[phase][Column.OVERHEAD]
        found[str(phase)] = {"allocated": allocated, "reserved": largest, "device": largest + reserve}
    return found


class Peaks:
    """Peaks by phase, None where there is no GPU to ask; `requested` is what was allocated before the allocator rounded."""

    def __init__(self, cuda: Any, *, alone: bool = True) -> None:
        self._cuda, self._alone, self._phase = cuda, alone, str(Phase.INIT)
        self.by_phase: dict[str, dict[str, int | None]] = {}

    def enter(self, phase: str) -> None:
        """End the running phase and begin the next; one that is entered again keeps its larger peaks."""
        found: dict[str, int | None] = dict.fromkeys((*NUMBERS, "requested"))
        cuda = self._cuda
        if cuda is not None:
            cuda.synchronize()
            free, total = cuda.mem_get_info()
            found = {
                "allocated": cuda.max_memory_allocated(),
                "reserved": cuda.max_memory_reserved(),
                "device": total - free if self._alone else None,
                "requested": cuda.memory_stats()["requested_bytes.all.peak"],
            }
            cuda.reset_peak_memory_stats()
        before = self.by_phase.get(self._phase, {})
        self.by_phase[self._phase] = {key: _larger(before.get(key), value) for key, value in found.items()}
        self._phase = phase


class MeasuredTrainer(PhasedTrainer):
    """The trainer itself, with peaks kept by phase and matrices filled on the device: the host would take half a minute a plan."""

    def __init__(self, job: Job, mesh: RankMesh, peaks: Peaks, stages: tuple[Stage, ...]) -> None:
        self._peaks = peaks
        super().__init__(job, mesh, stages)

    @torch.no_grad()
    def fill(self, job: Job) -> None:
        """Random matrices; vectors by their own rule, for decays and steps must be sensible. Allocates nothing on the device."""
        tensors = dict(job.inventory.tensors())
        for stage in self.stages:
            for name, parameter in stage.named_parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                if tensors[name].init in (Init.NORMAL, Init.NORMAL_OUT):
                    local.normal_(0, STD)
                else:
                    local.copy_(fill(tensors[name], name, job.spec.training.seed, len(job.inventory.layers)))

    def enter_phase(self, phase: Phase) -> None:
        """Peaks are kept phase by phase."""
        self._peaks.enter(str(phase))


def set_allocator(how: How) -> None:
    """Set the allocator as `how` says, whatever the shell has; before CUDA starts."""
    setting = f"expandable_segments:{how.expandable}"
    os.environ |= dict.fromkeys(ALLOCATOR, setting)
    if torch.cuda.is_available():
        torch._C._accelerator_setAllocatorSettings(setting)  # torch may have read the variables when it was imported


def train_plan(name: str, how: How, emit: Emit) -> None:
    """Train a few steps and emit what is found; with `how.profile`, then a profile of one more step."""
    began = time.perf_counter()
    for variable in (*CHANGING, *LAUNCHED):
        os.environ.pop(variable, None)
    case = find_case(name, asked(how))
    kernels, launch = start_kernels(case.job, None), read_launch()  # forks, before CUDA starts
    set_allocator(how)
    device = choose_device(launch)
    if kernels is not None:
        kernels.begin(device, launch.rank)
    cuda = torch.cuda if device.type == "cuda" else None
    spec, losses, seconds, ahead = case.job.spec, [], [], {}
    peaks = Peaks(cuda, alone=how.alone)
    if how.explain and cuda is not None:
        cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_EVENTS)
    with process_group(launch, device):
        mesh = build_mesh(spec.mesh, device)
        trainer = MeasuredTrainer(case.job, mesh, peaks, sharded_stages(case.job, mesh, compiled=how.compiled))
        batches, setup = Batches(RandomRows(spec), spec, mesh), time.perf_counter() - began
        if kernels is not None and kernels.is_wanted:
            ahead = kernels.finish(launch.store, launch.rank, lambda: False, lambda *_: None)._asdict()
            ahead["waited"] = round(time.perf_counter() - began - setup, 1)

        def one_step(step: int) -> None:
            start = time.perf_counter()
            trainer.start_step()
            losses.append(trainer.step(step, batches.at(step)).loss)
            seconds.append(time.perf_counter() - start)

        with compiled_kernels() as late:  # kernels that were not compiled ahead
            one_step(0)
        for step in range(1, how.num_steps):
            if sum(seconds[1:]) > how.most_seconds:
                break
            one_step(step)
        peaks.enter("end")
        about = {"run": name, "compiled": how.compiled, "expandable_segments": expandable_now(cuda, how), "overrides": list(how.overrides)}
        found = {**about, "setup_s": round(setup, 1), **sizes_of(case), "phases": peaks.by_phase, "estimate": estimate_of(case)}
        found |= {
            "losses": list(losses),
            "seconds": list(seconds),
            "machine": machine(cuda),
            "kernels": ahead,
            "compiled_late": late,
        } | rates(found, seconds)
        if how.explain and cuda is not None:
            found["blocks"] = blocks_now(cuda)
        emit(found)
        if how.profile:
            try:
                emit({**about, "gpu": profiled(lambda: one_step(len(losses)), on_gpu=cuda is not None)})
            except RuntimeError as failure:  # the run's numbers are valid
                emit({**about, "failure": f"profile: {said(failure)}"})


@contextmanager
def compiled_kernels() -> Iterator[list[str]]:
    """Context that lists the kernels which Triton compiles in it, and does not find in its cache."""
    found: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_about: Any) -> None:
        if not cache_hit:
            found.append(str(getattr(src, "name", src)))

    before, triton.knobs.compilation.listener = triton.knobs.compilation.listener, note
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = before


def sizes_of(case: Case) -> dict[str, int]:
    """Parameters, tokens of a step, model FLOPs and the device's peak."""
    spec = case.job.spec
    return {
        "parameters": case.budget.worst.parameters,
        "tokens": case.job.global_batch_tokens,
        "flops_per_token": model_costs(spec, case.job.inventory).model_flops,
        "peak_flops": device_of(spec.device).peak_flops[spec.precision.params].value,
    }


def rates(found: dict[str, Any], seconds: list[float]) -> dict[str, Any]:
    """Median step without the first, tokens/s, TFLOP/s; MFU against the data sheet only where a GPU was measured."""
    step = statistics.median(seconds[1:] or seconds)
    flops = found["tokens"] / step * found["flops_per_token"]
    on_gpu = all(phase["allocated"] is not None for phase in found["phases"].values())
    mfu = flops / found["peak_flops"] if on_gpu else None
    return {"step_s": step, "tok_s": found["tokens"] / step, "tflops": flops / 1e12, "mfu": mfu}


def expandable_now(cuda: Any, how: How) -> bool:
    """The setting that torch's allocator reports; on a CPU the one that was asked for."""
    if cuda is None:
        return how.expandable
    return bool(cuda.memory._snapshot().get("allocator_settings", {}).get("expandable_segments", how.expandable))


def blocks_now(cuda: Any) -> list[tuple[int, str, int]]:
    """Blocks alive at the peak of the recorded history."""
    events = [event for trace in cuda.memory._snapshot()["device_traces"] for event in trace]
    if len(events) >= MAX_EVENTS:
        raise RuntimeError(f"more than {MAX_EVENTS:,} events; the first are lost, and with them what is alive")
    return blocks_at_peak(events)


def machine(cuda: Any) -> dict[str, Any]:
    """Device and versions that the numbers hold for, as far as this process can see them."""
    found: dict[str, Any] = {"torch": torch.__version__, "device": "cpu"}
    if cuda is not None:
        import triton  # noqa: PLC0415  (not there without a GPU)

        found = {
            **found,
            "device": cuda.get_device_name(),
            "capacity_bytes": cuda.mem_get_info()[1],
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(part) for part in cuda.nccl.version()),
            "triton": triton.__version__,
        }
    return found


def _larger(before: int | None, now: int | None) -> int | None:
    return now if before is None or (now is not None and now > before) else before
