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

    Under a pipeline FSDP2 sums whole gradients of the microbatches in the reduction's dtype.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `to_accumulated_grad_if_needed`.
    """
    precision = spec.precision
    wrong = []
    if spec.mesh.pp > 1 and precision.reduce != precision.grads:
        detail = f"precision.reduce = {precision.reduce}, precision.grads = {precision.grads}, mesh.pp = {spec.mesh.pp}"
        wrong.append(("MP602", "reduce", precision.grads, detail))
    if precision.moments != precision.master:
        detail = f"precision.moments = {precision.moments}, precision.master = {precision.master}"
        wrong.append(("MP603", "moments", precision.master, detail))
    return [
        diagnostic(code, detail, Location(key=f"precision.{role}"), (f"megaplan split SPEC --set precision.{role}={dtype} -o PLAN",))
        for code, role, dtype, detail in wrong
    ]
