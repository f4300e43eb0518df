"""What this runtime can build: everything else of a plan is refused before the first process group exists."""

from __future__ import annotations

from dataclasses import replace

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.spec.models import Spec
from megaplan.spec.not_built_yet import unbuilt


def refuse_unbuilt(spec: Spec) -> None:
    """Refuse a spec that megaplan can price and megarun cannot build, or would not run as the plan says.

    Raises:
        MegaplanError: MP790 for what is not built; MP602 and MP603 for dtypes that torch would not keep.
    """
    found = [replace(item, severity=Severity.ERROR) for item in unbuilt(spec)] + dtype_problems(spec)
    if found:
        raise MegaplanError(found)


def dtype_problems(spec: Spec) -> list[Diagnostic]:
    """Where torch would sum gradients, or keep moments, in another dtype than `precision` says.

    FSDP2 casts a reduced gradient to the resident parameter's dtype and accumulates there; under a pipeline it first sums whole gradients
    of the microbatches in the reduction's dtype.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `to_accumulated_grad_if_needed`.
    """
    precision = spec.precision
    wrong = []
    if precision.grads != precision.master:
        wrong.append(("MP602", "grads", f"precision.grads = {precision.grads}, precision.master = {precision.master}"))
    if spec.mesh.pp > 1 and spec.schedule.num_microbatches > 1 and precision.reduce != precision.master:
        wrong.append(
            ("MP602", "reduce", f"precision.reduce = {precision.reduce}, precision.master = {precision.master}, mesh.pp = {spec.mesh.pp}")
        )
    if precision.moments != precision.master:
        wrong.append(("MP603", "moments", f"precision.moments = {precision.moments}, precision.master = {precision.master}"))
    fix = f"megaplan split SPEC --set precision.{{}}={precision.master} -o PLAN"
    return [diagnostic(code, detail, Location(key=f"precision.{role}"), (fix.format(role),)) for code, role, detail in wrong]
