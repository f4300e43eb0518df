"""Plans whose steps megarun replays as CUDA graphs, per microbatch or as one, and why other plans' steps stay eager.

A graph consists of the device's operations during recording. A step that the host steers by values, or that waits for other ranks, has
another course each time.
"""

from collections.abc import Callable

from megaplan.spec.models import Spec

AXES = ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp")
RECORDED = {"microbatch": "forward and backward of a microbatch", "step": "forward and backward of a microbatch, and the update"}
"""The recorded work of each value of `host.cuda_graphs` that has graphs."""
NUMBERS = 3
"""Numbers of a step, in fp64, that its recorded update reads: the factor of gradients, AdamW's rate and Muon's."""
Reason = Callable[[Spec], str | None]
"""The setting because of which a plan's steps stay eager; None if it is not the reason."""


def _switched_off(spec: Spec) -> str | None:
    return None if spec.host.graphs in RECORDED else f"host.cuda_graphs = {spec.host.graphs}"


def _other_host(spec: Spec) -> str | None:
    return None if spec.host.kind.trained else f"host.name = {spec.host.kind.name}"


def _several_ranks(spec: Spec) -> str | None:
    mesh = spec.mesh
    if mesh.world_size == 1 and not mesh.is_pipelined:
        return None
    return ", ".join([f"mesh.{axis} = {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1])


def _plain_torch(spec: Spec) -> str | None:
    return None if spec.host.uses_triton else f"host.kernels = {spec.host.kernels}"


def _eight_bit_experts(spec: Spec) -> str | None:
    recipe, moe = spec.precision.recipe, spec.model.moe
    return f"precision.recipe.name = {recipe.name} with model.moe" if recipe is not None and moe is not None else None


def _null_experts(spec: Spec) -> str | None:
    moe = spec.model.moe
    return f"model.moe.null_experts = {moe.null_experts}" if moe is not None and moe.null_experts and moe.capacity is None else None


def _scaled_loss(spec: Spec) -> str | None:
    return "gradients in fp16" if spec.precision.scales_losses else None


WHY_EAGER: tuple[tuple[Reason, str], ...] = (
    (_other_host, "only megarun records them by microbatch"),
    (_switched_off, "they are switched off"),
    (_several_ranks, "collectives and sends between ranks are not recorded"),
    (_plain_torch, "products of experts read the rows of each on the host"),
    (_null_experts, "the host reads how many rows are left to experts"),
    (_scaled_loss, "the loss has another scale after an overflow"),
    (_eight_bit_experts, "weight gradients of experts in eight bits read the rows of each on the host"),
)
"""A setting, and why a plan with it is not replayed."""


def why_eager(spec: Spec) -> str | None:
    """The first setting because of which steps stay eager, with the reason; None if they are replayed."""
    for reason, text in WHY_EAGER:
        found = reason(spec)
        if found is not None:
            return f"{found}: {text}"
    return None


def replays_graphs(spec: Spec) -> bool:
    """True if megarun replays forward and backward of each microbatch of the plan as a CUDA graph."""
    return why_eager(spec) is None


def replays_update(spec: Spec) -> bool:
    """True if it replays the update, too, in the memory of the microbatches."""
    return spec.host.graphs == "step" and replays_graphs(spec)
