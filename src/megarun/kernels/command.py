"""Implementation of `megarun compile`: from a plan file to a folder of compiled kernels and an exit status."""

import importlib.util
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from megaplan.budget.peaks import build_budget
from megaplan.devices import Device, load_device
from megaplan.spec.host import device_of
from megaplan.terminal import output
from megaplan.units import format_bytes
from megarun.errors import refusal
from megarun.job.job import Job
from megarun.job.run import read_job
from megarun.job.support import refuse_unbuilt
from megarun.kernels.target import CAPABILITIES, Target
from megarun.metrics.display import progress_line

FORMAT = "megarun.compile/1"
SOME_FAILED = 1


def compile_plan(plan: str, *, device: str | None, cache: Path | None, jobs: int | None, as_json: bool) -> int:
    """Compile a plan's kernels, and print the result.

    Returns:
        0 if every kernel is in the cache, else 1.

    Raises:
        MegaplanError: The plan cannot be read or built, or launches no kernels that can be compiled here.
    """
    job, _ = read_job(plan, None)
    refuse_unbuilt(job.spec)
    named = load_device(device) if device is not None else device_of(job.spec.device)
    target = compiled_for(job, named)
    from megarun.kernels.cache import cache_folder, settle, size_of, use_cache  # noqa: PLC0415  (need triton)
    from megarun.kernels.compiler import CompileError, compile_kernels, default_processes  # noqa: PLC0415

    warnings.simplefilter("ignore")  # warnings of torch and triton about their own internals
    try:
        if cache is not None:
            use_cache(cache)
        settle(cache_folder())
    except OSError as error:
        raise refusal("MP669", f"--cache {cache}: {error}", "--cache") from None
    num_processes, began = jobs or default_processes(), time.perf_counter()
    budget = build_budget(job.spec, job.inventory, job.layout)
    found = []
    try:
        with progress_line("kernels compiled") as show:
            for known, each in compile_kernels(job, [group.ranks[0] for group in budget.ranks], target, num_processes):
                found.append(each)
                show(len(found), known)
    except CompileError as error:
        raise refusal("MP669", str(error)) from None
    seconds = time.perf_counter() - began
    failed = [each for each in found if each.error]
    compiled = [each for each in found if not each.cached and not each.error]
    num_cached = len(found) - len(compiled) - len(failed)
    folder = cache_folder()
    document: dict[str, Any] = {
        "format": FORMAT,
        "plan": job.spec.name,
        "device": named.name,
        "target": target.name,
        "triton": _triton_version(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "cache": str(folder),
        "cache_bytes": size_of(folder)[1],
        "processes": num_processes,
        "seconds": round(seconds, 3),
        "kernels": [
            {"name": each.name, "seconds": round(each.seconds, 3), "cached": each.cached, "error": each.error or None}
            for each in sorted(found, key=lambda each: -each.seconds)
        ],
    }
    if as_json:
        output.write_json(document)
    else:
        longest = max(compiled, key=lambda each: each.seconds, default=None)
        lines = [
            f"{job.spec.name}: {len(found)} kernels for {target.name} with triton {document['triton']} of Python {document['python']}",
            f"{len(compiled)} compiled in {seconds:.1f} s by {num_processes} processes, {num_cached} in the cache",
            *([f"longest: {longest.name}, {longest.seconds:.1f} s"] if longest is not None else []),
            *(f"did not compile: {each.name}: {each.error}" for each in failed),
            f"cache: {folder}, {format_bytes(document['cache_bytes'])}; a job finds it with TRITON_CACHE_DIR={folder}",
        ]
        output.write("".join(f"{line}\n" for line in lines))
    return SOME_FAILED if failed else 0


def compiled_for(job: Job, device: Device) -> Target:
    """The target that the kernels of a job are compiled for.

    Raises:
        MegaplanError: MP669 if it launches none, or none that can be compiled here.
    """
    if not job.spec.host.uses_triton:
        kernels = job.spec.host.kernels
        raise refusal(
            "MP669",
            f"host.kernels = {kernels}: the plan runs plain torch",
            "host.kernels",
            ("megaplan split SPEC --set host.kernels=triton -o PLAN",),
        )
    if importlib.util.find_spec("triton") is None:
        raise refusal("MP669", "triton is not installed", hints=("pip install triton",))
    if device.generation not in CAPABILITIES:
        raise refusal("MP669", f"device = {device.name}, generation {device.generation}: not of NVIDIA", "device.name", ("--device h200",))
    return Target.planned(device)


def look_up(job: Job, target: Target) -> tuple[int, int]:
    """Number of a job's kernels in the cache, and of all its kernels.

    Raises:
        MegaplanError: MP669 if its step cannot be run on fake tensors here.
    """
    from megarun.kernels.compiler import CompileError, compile_kernels, default_processes  # noqa: PLC0415  (need triton)

    budget = build_budget(job.spec, job.inventory, job.layout)
    try:
        done = [each for _, each in compile_kernels(job, [g.ranks[0] for g in budget.ranks], target, default_processes(), only_look=True)]
    except CompileError as error:
        raise refusal("MP669", str(error)) from None
    return sum(each.cached for each in done), len(done)


def _triton_version() -> str:
    import triton  # noqa: PLC0415

    version: str = triton.__version__
    return version
