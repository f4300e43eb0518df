"""One plan trained in this process: every phase's peaks as torch and the driver report them, and the estimate's."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from h200.blocks import blocks_at_peak
from matrix import Case, cases
from torch.distributed.tensor import DTensor

from megaplan.budget.build import build_budget
from megaplan.columns import Column, Phase
from megaplan.cost.model import model_costs
from megaplan.inventory.tensors import Init
from megaplan.plan.make import make_plan
from megaplan.spec.device import device_of
from megaplan.spec.load import load_spec
from megarun.data.batches import Batch
from megarun.engine.initialise import STD, fill
from megarun.engine.phases import PhasedTrainer
from megarun.engine.trainer import sharded_stages
from megarun.job.job import Job
from megarun.launch.process_group import choose_device, process_group, read_launch
from megarun.model.stage import Stage
from megarun.parallel.groups.mesh import RankMesh, build_mesh

ROOT = Path(__file__).resolve().parent.parent.parent
PLANS = ROOT / "benchmarks/h200/memory.yaml"
NUMBERS = ("allocated", "reserved", "device")
NUM_STEPS, NUM_STEPS_EXPLAINED = 3, 2
MAX_EVENTS = 2_000_000
SMALL = {
    "tiny-hybrid": [],
    "tiny-hybrid-kernels": ["host.kernels=triton"],
    "tiny-hybrid-selective": ["recompute.default=selective", "precision.grads=bf16", "precision.reduce=bf16"],
}
"""Plans of two million parameters, by their overrides: for a machine without a GPU."""


def find_case(name: str, plans: Path = PLANS) -> Case:
    """The plan called so, of a file of plans or small."""
    if name not in SMALL:
        return next(cases(frozenset([name]), plans))
    job = Job.from_plan(make_plan(load_spec(str(ROOT / "plans/tiny-hybrid.yaml"), overrides=SMALL[name]).spec))
    return Case(name, job, build_budget(job.spec, job.inventory, job.layout), False)


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

    def __init__(self, cuda: Any) -> None:
        self._cuda, self._phase = cuda, str(Phase.INIT)
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
                "device": total - free,
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


def measure(case: Case, *, explain: bool = False, num_steps: int = NUM_STEPS, compiled: bool = False) -> dict[str, Any]:
    """Train for a few steps, with compiled blocks or without; with `explain`, two, and the blocks alive at the highest moment."""
    launch = read_launch()
    device = choose_device(launch)
    cuda = torch.cuda if device.type == "cuda" else None
    spec, losses, seconds = case.job.spec, [], []
    peaks, blocks = Peaks(cuda), None
    if explain and cuda is not None:
        cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_EVENTS)
    with process_group(launch, device):
        mesh = build_mesh(spec.mesh, device)
        trainer = MeasuredTrainer(case.job, mesh, peaks, sharded_stages(case.job, mesh, compiled=compiled))
        generator = torch.Generator().manual_seed(0)
        shape = (spec.batch.micro_batch_size * spec.schedule.num_microbatches, spec.batch.seq_length + 1)
        for step in range(NUM_STEPS_EXPLAINED if explain else num_steps):
            start = time.perf_counter()
            trainer.start_step()
            rows = torch.randint(spec.model.vocab_size, shape, generator=generator)
            batch = Batch(*(part.contiguous().to(device) for part in (rows[:, :-1], rows[:, 1:])))
            losses.append(trainer.step(step, batch).loss)
            del batch
            seconds.append(time.perf_counter() - start)
        peaks.enter("end")
        if explain and cuda is not None:
            events = [event for trace in cuda.memory._snapshot()["device_traces"] for event in trace]
            if len(events) >= MAX_EVENTS:
                raise RuntimeError(f"more than {MAX_EVENTS:,} events; the first are lost, and with them what is alive")
            blocks = blocks_at_peak(events)
    return {"phases": peaks.by_phase, "losses": losses, "seconds": seconds, "blocks": blocks, "machine": machine(cuda)}


def trained(name: str, plans: Path, *, num_steps: int, compiled: bool) -> dict[str, Any]:
    """What `measure` finds of a plan of `plans`, beside its size, its model FLOPs and the estimate."""
    case = find_case(name, plans)
    spec, budget = case.job.spec, case.budget
    about = {
        "parameters": budget.worst.parameters,
        "step_tokens": case.job.global_batch_tokens,
        "flops_per_token": model_costs(spec, case.job.inventory).model_flops,
        "peak_flops": device_of(spec.device).peak_flops[spec.precision.params].value,
        "estimate": estimate_of(case),
    }
    return about | measure(case, num_steps=num_steps, compiled=compiled)


def machine(cuda: Any) -> dict[str, Any]:
    """What the numbers hold for, as far as this process can see it."""
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


def clean_environment() -> dict[str, str]:
    """This process's variables without those that would change torch's allocator, its GEMM workspaces or the job's ranks."""
    changing = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUBLAS_WORKSPACE_CONFIG"}
    changing |= {"CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "RANK", "WORLD_SIZE", "LOCAL_RANK"}
    return {name: value for name, value in os.environ.items() if name not in changing}


def _larger(before: int | None, now: int | None) -> int | None:
    return now if before is None or (now is not None and now > before) else before
