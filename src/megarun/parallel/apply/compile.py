"""torch.compile on each block, after recompute and before FSDP2 (R-55): `megakernels` stay opaque, operations between them are fused.

Each block is compiled separately, so FSDP2 gathers around it as in eager mode. E blocks are not compiled: their row counts are read on the
host (R-58). The compiler decides what a compiled block saves for backward, so the ledger does not apply.
"""

from megaplan.schedules import SPLIT_BACKWARD
from megaplan.spec.models import Spec
from megarun.errors import refusal
from megarun.model.moe import ExpertBlock
from megarun.model.stage import Stage


def refuse_compile(spec: Spec) -> None:
    """Refuse plans whose blocks communicate, share a table or a norm, or multiply in eight bits, or whose backward is split.

    Raises:
        MegaplanError: MP625.
    """
    reasons = [f"mesh.{axis} = {getattr(spec.mesh, axis)}" for axis in ("tp", "cp") if getattr(spec.mesh, axis) > 1]
    if spec.model.features.relation_bias is not None:
        reasons.append("model.features.relation_bias")
    if spec.model.parallel_layers:
        reasons.append("model.parallel_layers")
    if spec.lora is not None:
        reasons.append(f"lora.rank = {spec.lora.rank}")
    if spec.schedule.kind in SPLIT_BACKWARD and spec.mesh.pp > 1:
        reasons.append(f"schedule.kind = {spec.schedule.kind}")
    if spec.host.activation_offload:
        reasons.append("host.activation_offload")
    if spec.precision.recipe is not None:
        reasons.append(f"precision.recipe.name = {spec.precision.recipe.name}")
    if reasons:
        raise refusal("MP625", f"--compile with {', '.join(reasons)}")


def is_compiled(stage: Stage) -> bool:
    """True if blocks of the stage are compiled."""
    return any(block._compiled_call_impl is not None for block in stage.layers.values())


def compile_stage(stage: Stage) -> None:
    """Compile every block of a stage except its E blocks, in place; parameter names do not change."""
    for block in stage.layers.values():
        if not isinstance(block, ExpertBlock):
            block.compile(dynamic=False)
