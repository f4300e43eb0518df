"""The jobs of a run, in order: what is cheap and decides most comes first, what only adds detail last."""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import yaml
from gpu.case import KernelCase
from gpu.checks import Emit, check_case
from gpu.demo import compare_with_cpu
from gpu.facts import find_facts
from gpu.kernel_cases import cases
from gpu.measure import MEMORY, SMALL, How, find_case, train_plan
from gpu.peers import PLAIN, peers
from gpu.suite import check_files, run_file
from gpu.times import time_own, time_peer
from gpu.tune import MOST_CANDIDATES, compile_candidates, time_candidates
from gpu.worker import Job

KINDS = ("facts", "checks", "times", "train", "memory", "tune")
SPECS = ("nam56r", "llama-16l", "hybrid-1b", "mamba2-1b", "llama-16l-fp8", "nemotron-16l", "hybrid-2b")
"""Trained whole, in this order; files of `specs/`."""
VARIANTS: dict[str, How] = {
    "eager": How(num_steps=8, most_seconds=10, expandable=True, profile=True),
    "graphs": How(num_steps=8, most_seconds=10, expandable=True, profile=True, overrides=("host.cuda_graphs=microbatch",)),
    "step-graphs": How(num_steps=8, most_seconds=10, expandable=True, profile=True, overrides=("host.cuda_graphs=step",)),
    "compiled": How(num_steps=8, most_seconds=10, expandable=True, compiled=True, profile=True),
    "default-allocator": How(num_steps=3, most_seconds=5),
    "4-microbatches": How(num_steps=4, most_seconds=12, expandable=True, overrides=("schedule.num_microbatches=4",)),
}
"""Ways to train each of them; a feature that changes the step adds its own."""
ONLY_OF = {"4-microbatches": ("nam56r",)}
"""Variants that not every spec is trained in."""
TUNED = ("attention", "m2rnn", "mamba3", "ssd")
"""Operations whose kernels have candidates."""
SECONDS = {"facts": 30.0, "check": 90.0, "demo": 100.0, "file": 120.0, "own": 20.0, "library": 12.0, "peer": 4.0}
SECONDS |= {"train": 75.0, "compiled": 150.0, "memory": 60.0, "candidate": 120.0, "tune": 60.0}
LEAST = {
    "facts": 5.0,
    "check": 15.0,
    "demo": 40.0,
    "file": 20.0,
    "own": 6.0,
    "library": 4.0,
    "peer": 4.0,
    "train": 25.0,
    "compiled": 60.0,
    "memory": 20.0,
    "candidate": 20.0,
    "tune": 10.0,
}
"""Seconds after which a job is stopped, and below which it is not started."""
DRY_SECONDS, DRY_LEAST = 240.0, 1.0
"""Limits of a run on a CPU, whose kernels are interpreted."""
DRY_DEMO = {"num_steps": 2, "token_bytes": 200_000}
MEMORY_GIB = 1.3
"""The factor by which a plan may exceed its estimate: the largest measured ratio of reserved to allocated bytes."""


def jobs(device: str, *, seconds: dict[str, float] | None = None) -> list[Job]:
    """Every job; on a CPU the same ones at small sizes."""
    small = not device.startswith("cuda")
    limits = {**SECONDS, **(seconds or {})}
    found = [*_first(device, small), *_own_times(device, small), *_trained(small, "eager"), *_peer_times(device, small)]
    found += [*_memory(small, expandable=True), *_memory(small, expandable=False)]
    for variant in VARIANTS:
        found += _trained(small, variant) if variant != "eager" else ()
    found += [*_files(device), *_plain_times(device, small), *_tuned(device, small)]
    if small:
        return [Job(job.kind, job.name, job.run, DRY_SECONDS, DRY_LEAST, job.lane, job.gib) for job, _ in found]
    return [Job(job.kind, job.name, job.run, limits[key], LEAST[key], job.lane, job.gib) for job, key in found]


Sized = tuple[Job, str]
"""A job, and the name of its limits."""


def _job(kind: str, name: str, run: object, key: str, lane: str = "alone", gib: float = 1.0) -> Sized:
    return Job(kind, name, run, 0, 0, lane, gib), key  # type: ignore[arg-type]


def _first(device: str, small: bool) -> Iterator[Sized]:
    yield _job("facts", "device", partial(_facts, device=device, small=small), "facts")
    for case in cases(small=small):
        yield _job("checks", f"case {case.name}", partial(_check, case, device=device, small=small), "check", "checks", gib=10)
    yield _job("checks", "demo", partial(compare_with_cpu, **(DRY_DEMO if small else {})), "demo", "checks", gib=2)


def _facts(emit: Emit, *, device: str, small: bool) -> None:
    find_facts(emit, device, small=small)


def _check(case: KernelCase, emit: Emit, *, device: str, small: bool) -> None:
    check_case(case, emit, device, small=small)


def _own_times(device: str, small: bool) -> Iterator[Sized]:
    for case in sorted(cases(small=small), key=_work):
        yield _job("times", case.name, partial(time_own, case, device=device), "own")


def _work(case: KernelCase) -> float:
    """Seconds that the ideal bytes and FLOPs of a call take at round rates, by which cheap operations come first."""
    work = case.work
    moved, done = work.moved_forward + work.moved_input + work.moved_weight, work.forward + work.input_grad + work.weight_grad
    return case.num_tokens * max(moved / 4e12, done / 8e14)


def _peer_times(device: str, small: bool) -> Iterator[Sized]:
    """Torch's own libraries first: the others compile."""
    found = [(library, case) for case in cases(small=small) for library, _ in peers(case)]
    for library, case in sorted(found, key=lambda each: not each[0].startswith("torch")):
        limit = "library" if library.startswith("torch") else "peer"
        yield _job("times", f"{case.name} by {library}", partial(_peer, case, library=library, device=device), limit)


def _peer(case: KernelCase, emit: Emit, *, library: str, device: str) -> None:
    time_peer(case, library, dict(peers(case))[library], emit, device)


def _plain_times(device: str, small: bool) -> Iterator[Sized]:
    for case in cases(small=small):
        yield _job("times", f"{case.name} by {PLAIN}", partial(_plain, case, device=device), "peer")


def _plain(case: KernelCase, emit: Emit, *, device: str) -> None:
    time_peer(case, PLAIN, case.call, emit, device)


def _trained(small: bool, variant: str) -> Iterator[Sized]:
    how = VARIANTS[variant]
    if small:
        how = How(num_steps=2, compiled=how.compiled, expandable=how.expandable, profile=how.profile, overrides=how.overrides)
    for name in SMALL if small else ONLY_OF.get(variant, SPECS):
        yield _job("train", f"{name} {variant}", partial(train_plan, name, how), "compiled" if how.compiled else "train")


def _memory(small: bool, *, expandable: bool) -> Iterator[Sized]:
    """Two at a time where both fit: their bytes are their own allocator's, but the driver's number counts both, and is left out."""
    how = How(expandable=expandable, alone=False)
    names = list(SMALL) if small else [entry["name"] for entry in yaml.safe_load(MEMORY.read_text(encoding="utf-8"))["plans"]]
    for name in names:
        label = f"{name} {'expandable' if expandable else 'default'}"
        yield _job("memory", label, partial(train_plan, name, how), "memory", "memory", gib=1.0 if small else _gib(name))


@cache
def _gib(name: str) -> float:
    return MEMORY_GIB * find_case(name).budget.worst.allocated_bytes / 2**30 + 1.5


def _tuned(device: str, small: bool) -> Iterator[Sized]:
    """Candidates of all cases are compiled in parallel before any is timed."""
    found = [case for case in cases(small=small) if case.name.startswith(TUNED)]
    for position in range(MOST_CANDIDATES):
        for case in found:
            label = f"candidate {position} of {case.name}"
            yield _job("tune", label, partial(_candidate, case, position=position, device=device), "candidate", "checks", gib=10)
    for case in found:
        yield _job("tune", case.name, partial(_timed, case, device=device), "tune")


def _candidate(case: KernelCase, emit: Emit, *, position: int, device: str) -> None:
    compile_candidates(case, position, emit, device)


def _timed(case: KernelCase, emit: Emit, *, device: str) -> None:
    time_candidates(case, emit, device)


def _files(device: str) -> Iterator[Sized]:
    for path in check_files(small=not device.startswith("cuda")):
        yield _job("checks", f"file {path.stem}", partial(_file, path, device=device), "file", "checks", gib=6)


def _file(path: Path, emit: Emit, *, device: str) -> None:
    run_file(path, emit, device)
