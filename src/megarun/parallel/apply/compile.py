"""torch.compile on each block, after recompute and before FSDP2 (R-55): kernels of `megakernels` stay whole, what is between them fuses.

Each block compiles alone, so FSDP2 gathers around it as in eager code. An E block is left as it is: how many rows travel is read on the
host (R-58). What a compiled block keeps for backward is the compiler's choice, not the ledger's.
"""

from __future__ import annotations

from megaplan.schedules import SPLIT_BACKWARD
from megaplan.spec.models import Spec
from megarun.errors import refusal
from megarun.model.moe import ExpertBlock
from megarun.model.stage import Stage


def refuse_compile(spec: Spec) -> None:
    """Refuse plans whose blocks send messages in the middle, or whose backward is split.

    Raises:
        MegaplanError: MP625.
    """
    reasons = [f"mesh.{axis} = {getattr(spec.mesh, axis)}" for axis in ("tp", "cp") if getattr(spec.mesh, axis) > 1]
    if spec.schedule.kind in SPLIT_BACKWARD and spec.mesh.pp > 1:
        reasons.append(f"schedule.kind = {spec.schedule.kind}")
    if reasons:
        raise refusal("MP625", f"--compile with {', '.join(reasons)}")


def compile_stage(stage: Stage) -> None:
    """Compile every block of a stage but its E blocks, in place: names of parameters stay as they are."""
    for block in stage.layers.values():
        if not isinstance(block, ExpertBlock):
            block.compile(dynamic=False)
