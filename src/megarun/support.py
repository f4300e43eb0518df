"""What this runtime can build: everything else of a plan is refused before the first process group exists."""

from __future__ import annotations

from dataclasses import replace

from megaplan.spec.rules import unbuilt

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.spec.models import Spec


def refuse_unbuilt(spec: Spec) -> None:
    """Refuse a spec that megaplan can price and megarun cannot build, or would not run as the plan says.

    Raises:
        MegaplanError: MP790 for each kind, feature, axis or policy that is not built; MP602 and MP603 for dtypes that torch would not keep.
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
    precision, found = spec.precision, []
    if precision.grads != precision.master:
        detail = f"precision.grads = {precision.grads}, precision.master = {precision.master}"
        hint = f"--set precision.grads={precision.master}"
        found.append(diagnostic("MP602", detail, Location(key="precision.grads"), (hint,)))
    if spec.mesh.pp > 1 and spec.schedule.num_microbatches > 1 and precision.reduce != precision.grads:
        detail = f"mesh.pp = {spec.mesh.pp}, precision.reduce = {precision.reduce}, precision.grads = {precision.grads}"
        hint = f"--set precision.reduce={precision.grads}"
        found.append(diagnostic("MP602", detail, Location(key="precision.reduce"), (hint,)))
    if precision.moments != precision.master:
        detail = f"precision.moments = {precision.moments}, precision.master = {precision.master}"
        hint = f"--set precision.moments={precision.master}"
        found.append(diagnostic("MP603", detail, Location(key="precision.moments"), (hint,)))
    return found
