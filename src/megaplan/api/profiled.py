"""Profiled steps of megarun as a device's measured constants: results of runs, and the specs that they trained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaplan.api.load import load
from megaplan.diagnostics import refuse
from megaplan.spec.read import read_text

if TYPE_CHECKING:
    from megaplan.layout.profile import TrainedPlan

FACTS = ("device", "torch", "triton", "python", "date", "commit", "mode", "copy_gb_s")
FORM = (
    'RESULTS with {"device": …, "runs": [{"run": NAME, "step_s": …, '
    '"gpu": {"busy_ms": …, "sum_ms": …, "by_kernel": [[NAME, LAUNCHES, MS], …]}}]}'
)


def measured_constants(folder: str, results: str, held_out: Sequence[str] = (), changed: str | None = None) -> dict[str, Any]:
    """The document of measured constants.

    Args:
        folder: Folder in which `NAME.yaml` is the spec that the run `NAME` trained, with the run's `overrides` if it has any.
        results: JSON of the runs, or a line for each run and lines that hold the other facts.
        held_out: Results whose runs are in no constant: the errors of their modelled steps count for the interval.
        changed: Kernels that changed after these runs, with their times before and after: the constants are those of today's kernels.

    Raises:
        MegaplanError: MP487: the results lack facts or a profiled run, or the spec of a run has another host or device. Also the errors of
            `megaplan.load`.
    """
    from megaplan.layout.changed import changed_kernels  # noqa: PLC0415
    from megaplan.layout.profile import constants  # noqa: PLC0415

    found = _results(results)
    runs = [run for run in found["runs"] if _is_timed(run)]
    if not any(run.get("gpu") for run in runs):
        raise refuse("MP487", f"{results} has no profiled run", FORM)
    if missing := [fact for fact in FACTS if fact not in found]:
        raise refuse("MP487", f"{results} does not state {', '.join(missing)}", FORM)
    tasks = {run["run"]: _task(Path(folder), run) for run in runs}
    devices = sorted({task.spec.device.name for task in tasks.values()})
    if len(devices) > 1:
        raise refuse("MP487", f"the specs of {folder} are of {' and '.join(devices)}", "one file for each device")
    later = [] if changed is None else changed_kernels(changed)
    return constants(found | {"runs": runs}, tasks, [step for path in held_out for step in _steps(folder, path)], later)


def _steps(folder: str, path: str) -> Iterator[tuple[str, float, TrainedPlan]]:
    """Label, seconds and trained plan of each timed run of results that are held out."""
    found = _results(path)
    for run in found["runs"]:
        if _is_timed(run):
            yield f"{run['run']} {found.get('date', path)}", run["step_s"], _task(Path(folder), run)


def _results(path: str) -> dict[str, Any]:
    """One document, or lines: a line with `run` is a run, any other states facts."""
    text = read_text(path)
    try:
        documents: list[Any] = [json.loads(text)]
    except (ValueError, RecursionError):
        try:
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise refuse("MP487", f"{path} is neither JSON nor JSON lines, one for each run: {error}", FORM) from None
    if not all(isinstance(each, dict) for each in documents):
        raise refuse("MP487", f"{path} has a line that is not an object", FORM)
    found: dict[str, Any] = {"runs": []}
    for each in documents:
        if "run" in each:
            found["runs"].append(each)
        else:
            found |= each | {"runs": [*found["runs"], *each.get("runs", [])]}
    return found | {"runs": [run | {"spec": run["run"], "run": label_of(run)} if _is_timed(run) else run for run in found["runs"]]}


def label_of(run: Mapping[str, Any]) -> str:
    """The name of a run: its spec's, and the overrides with which it was trained."""
    return " ".join([run["run"], *run.get("overrides", ())])


def _is_timed(run: Any) -> bool:
    return isinstance(run, dict) and isinstance(run.get("run"), str) and isinstance(run.get("step_s"), (int, float)) and run["step_s"] > 0


def _task(folder: Path, run: Mapping[str, Any]) -> TrainedPlan:
    from megaplan.layout.profile import TrainedPlan  # noqa: PLC0415

    job = load(str(folder / f"{run['spec']}.yaml"), *run.get("overrides", ()))
    host = job.spec.host
    if not host.uses_triton:
        raise refuse("MP487", f"run {run['run']} is of host {host.kind.name} with kernels {host.kernels}", "host.kernels: triton")
    return TrainedPlan(job.spec, job.inventory, job.spans)
