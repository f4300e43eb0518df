"""Requirements of a plan on this machine: its processes, its device, its kernels in the cache."""

from collections.abc import Iterator
from typing import Any

from megaplan.budget.peaks import build_budget
from megaplan.budget.values import Budget
from megaplan.devices import load_device
from megaplan.errors import MegaplanError
from megaplan.spec.host import device_of
from megaplan.spec.not_built_yet import megarun_refuses
from megaplan.spec.pools import parts_of
from megaplan.spec.step_graphs import RECORDED, why_eager
from megaplan.terminal.versions import installed
from megaplan.units import format_bytes
from megarun.doctor.findings import Finding, ok, problem, warning
from megarun.doctor.machine import host_amounts
from megarun.job.job import Job
from megarun.job.run import read_job
from megarun.kernels.command import compiled_for, look_up
from megarun.kernels.libraries import library_notes
from megarun.kernels.target import CAPABILITIES, Target

PLAN = "plan"


def plan_findings(plan: str) -> Iterator[Finding]:
    """Findings about a plan's requirements that this machine meets or lacks.

    Raises:
        MegaplanError: The plan cannot be read.
    """
    job, _ = read_job(plan, None)
    refused = megarun_refuses(job.spec)
    if refused:
        yield problem(PLAN, job.spec.name, f"megarun does not build it: {refused[0].detail}", "megarun train says all reasons")
        return
    budget = build_budget(job.spec, job.inventory, job.layout)
    yield from _devices(job, budget)
    yield from _host_memory(job, budget)
    yield _graphs(job)
    yield from _libraries(job)
    yield _kernels(job, plan)


def _devices(job: Job, budget: Budget) -> Iterator[Finding]:
    spec = job.spec
    needs = budget.worst.peak_bytes
    devices = [part.spec.device.name for part in parts_of(spec)]
    text = f"{spec.mesh.world_size} ranks, {spec.device.per_node} a machine; largest rank {format_bytes(needs)} on {' or '.join(devices)}"
    values: dict[str, Any] = {"world_size": spec.mesh.world_size, "peak_bytes": needs, "device": spec.device.name}
    found = _visible()
    if not found:
        yield ok(PLAN, spec.name, text, **values)
        return
    count, free, capability = found
    here = min(spec.mesh.world_size, spec.device.per_node)
    wanted = [CAPABILITIES.get(load_device(name).generation) for name in devices]
    if count < here:
        yield problem(
            PLAN, spec.name, f"{text}; this machine has {count} GPUs", f"split for {count} ranks, or train on another machine", **values
        )
    elif free < needs:
        yield problem(
            PLAN,
            spec.name,
            f"{text}; {format_bytes(free)} are free here",
            "end other programs on the GPU, or split for less memory",
            **values,
        )
    elif capability not in wanted:
        yield warning(
            PLAN,
            spec.name,
            f"{text}; this GPU is sm_{capability[0]}{capability[1]}",
            "the plan's memory and time are for another device",
            **values,
        )
    else:
        yield ok(PLAN, spec.name, text, **values)


def _host_memory(job: Job, budget: Budget) -> Iterator[Finding]:
    """A finding on the optimizer state that the ranks of a machine have in its memory, if any."""
    ranks = min(job.spec.mesh.world_size, job.spec.device.per_node)
    needs, free = ranks * max(rank.host.total for rank in budget.ranks), host_amounts().get("MemAvailable")
    if not needs:
        return
    text, values = f"{format_bytes(needs)} of optimizer state a machine", {"needed_bytes": needs}
    if free is not None and free < needs:
        advice = "set a smaller host.optimizer_offload, or split for more machines"
        yield problem(PLAN, "host memory", f"{text}; {format_bytes(free)} are available here", advice, **values)
    else:
        yield ok(PLAN, "host memory", text, **values)


def _graphs(job: Job) -> Finding:
    """A finding on whether steps are replayed as CUDA graphs, and why not."""
    reason = why_eager(job.spec)
    text = f"none; {reason}" if reason is not None else f"{RECORDED[job.spec.host.graphs]} are replayed after the first steps"
    return ok(PLAN, "CUDA graphs", text, replayed=reason is None)


def _libraries(job: Job) -> Iterator[Finding]:
    """Findings on the optional packages that the plan names; without a GPU the plan's device counts."""
    visible = _visible()
    capability = visible[2] if visible else CAPABILITIES.get(load_device(job.spec.device.name).generation, (0, 0))
    for note in library_notes(job.spec, job.inventory, capability):
        if note.name not in job.spec.host.libraries:
            continue
        if note.differs:
            yield warning(PLAN, note.name, note.text, 'pip install "megaplan[run,gpu]", or remove host.libraries')
        else:
            yield ok(PLAN, note.name, note.text)


def _visible() -> tuple[int, int, tuple[int, int]] | None:
    """Number of GPUs of this machine, smallest free bytes, capability of the first; None without any."""
    if installed("torch") is None:
        return None
    import torch  # noqa: PLC0415  (it may not be there)

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    return count, min(torch.cuda.mem_get_info(index)[0] for index in range(count)), torch.cuda.get_device_capability(0)


def _kernels(job: Job, plan: str) -> Finding:
    """A finding on whether the kernels of the plan's device, or of the one that is here, are in the cache."""
    name = "compiled kernels"
    if not job.spec.host.uses_triton:
        return ok(PLAN, name, "the plan runs plain torch", found=0, cached=0)
    try:
        planned = compiled_for(job, device_of(job.spec.device))
        cached, found = look_up(job, Target.present(0) if _visible() else planned)
    except MegaplanError as error:
        return warning(PLAN, name, error.diagnostics[0].detail, "the first step compiles each kernel when it is first launched")
    if cached < found:
        text = f"{found - cached} of {found} are not in the cache"
        return warning(
            PLAN,
            name,
            text,
            f"`megarun train` compiles them before the first step; `megarun compile {plan}` does it now",
            found=found,
            cached=cached,
        )
    return ok(PLAN, name, f"all {found} are in the cache", found=found, cached=cached)
