"""Reads a measured run of `benchmarks/results/`: its training runs, times of operations and checks."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megaplan.api.profiled import label_of
from megaplan.spec.load import load_spec, load_spec_text
from megaplan.spec.models import Spec

ROOT = Path(__file__).resolve().parents[3]
SPECS = ROOT / "benchmarks/gpu/specs"
MEMORY = ROOT / "benchmarks/gpu/memory.yaml"
FILES = tuple(sorted((ROOT / "benchmarks/results").glob("h200-????-??-??*.json")))
"""All results, the newest last; those of earlier runtimes each have the model of their time."""
FITTED = ROOT / "benchmarks/results/h200-2026-11-27b.json"
"""The results that the constants come from: the newest with all runs."""
OTHERS = tuple(path for path in FILES if path != FITTED)


class Phase(NamedTuple):
    """Peaks of one phase in bytes.

    Attributes:
        allocated: Blocks that torch's allocator handed out, its rounding to 512 B included.
        reserved: Memory that the allocator took from the device; never falls.
        device: Memory of the device that is in use, context included.
    """

    allocated: int
    reserved: int
    device: int


class TrainingRun(NamedTuple):
    """One measured training run.

    Attributes:
        name: The spec under `benchmarks/gpu/specs`, and the overrides with which it was trained.
        expandable_segments: The allocator's setting.
        step_seconds: Median of the steps after the first.
        first_step_seconds: The first step, compilation of kernels included.
        parameters: Unique parameters.
        mfu: Model FLOPs per second over the bf16 peak of the data sheet.
        phases: Peaks by phase.
        busy_ms: Time in which the GPU ran a kernel, in one profiled step; None where none was profiled.
        launches: Kernels and copies of that step.
        kernels: Name, launches and milliseconds of that step's kernels.
    """

    name: str
    expandable_segments: bool
    step_seconds: float
    first_step_seconds: float
    parameters: int
    mfu: float
    phases: dict[str, Phase]
    busy_ms: float | None
    launches: int | None
    kernels: tuple[tuple[str, int, float], ...]

    @property
    def spec(self) -> Path:
        """The spec that was trained."""
        return SPECS / f"{self.name.split()[0]}.yaml"

    @property
    def overrides(self) -> list[str]:
        """The overrides with which it was trained."""
        return self.name.split()[1:]

    @property
    def peak(self) -> Phase:
        """The largest of each kind over all phases."""
        return Phase(*(max(values) for values in zip(*self.phases.values(), strict=True)))


@cache
def document(path: Path = FITTED) -> dict[str, Any]:
    """A results file as it is."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def kept_model(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """Estimates and modelled times of the code that ran, of results whose runtime had other operations than today's; None for others."""
    found: dict[str, Any] | None = results.get("modelled")
    return found


def training_runs(path: Path = FITTED) -> tuple[TrainingRun, ...]:
    """The training runs of a results file."""
    return tuple(_training_run(row) for row in document(path)["runs"])


def spec_of(name: str, *overrides: str) -> Spec:
    """The spec that a run trained, of `specs/` or of `memory.yaml`."""
    if (SPECS / f"{name}.yaml").exists():
        return load_spec(str(SPECS / f"{name}.yaml"), overrides).spec
    written = yaml.safe_load(MEMORY.read_text())
    plan = next(entry for entry in written["plans"] if entry["name"] == name)
    return load_spec_text(
        written["base"], name=name, overrides=[*written["families"].get(plan.get("of"), ()), *plan.get("set", ()), *overrides]
    ).spec


def _training_run(row: dict[str, Any]) -> TrainingRun:
    gpu = row.get("gpu", {})
    return TrainingRun(
        label_of(row),
        row["expandable_segments"],
        row["step_s"],
        row["seconds"][0],
        row["parameters"],
        row["mfu"],
        {name: Phase(*(phase[kind] for kind in Phase._fields)) for name, phase in row["phases"].items()},
        gpu.get("busy_ms"),
        gpu.get("kernels"),
        tuple((name, count, ms) for name, count, ms in gpu.get("by_kernel", ())),
    )
