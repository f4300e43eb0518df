"""Kernels of a block: the gaps between them on the device, and their launches by the host."""

from typing import Any

from megaplan.cost.step.frameworks import framework
from megaplan.cost.step.ledger import Ledger
from megaplan.cost.step.workload import Recomputed, Software, TimedStep

KERNELS = {"A": 22.0, "A.mla": 34.0, "D": 10.0, "router": 30.0, "experts": 30.0, "M": 22.0, "head": 20.0}
"""Kernels of the forward of one block, counted in published profiles of Megatron-Core with Transformer Engine."""
GRAPHS = {"A": "attn", "D": "mlp", "M": "mamba"}
"""Graph modules by letter; the router and the experts of an E block are separate modules."""
ADAPTER_KERNELS = (4.0, 8.0)
"""Kernels of an adapter: two products, the scale and the sum; in backward the gradients of both products, of scale and of sum."""
EXPERT_KERNELS = {"bf16": (2.0, 4.0), "fp8": (8.0, 10.0), "mxfp8": (6.0, 10.0)}
"""Kernels of forward and of backward per local expert: cuBLAS multiplies expert by expert (NVIDIA/TransformerEngine@d0067d0d,
`nvte_multi_tensor_gemm`), and separate casts of an operand are maximum, scale and cast, or in mxfp8 the cast and orders of scales."""
BIAS_KERNELS = (2.0, 5.0)
"""Kernels per local expert that add the last linear's bias, weighted by the router: see `grouped.BIAS_BYTES`."""
GROUPED_CASTS = "26.04"
"""First release of Megatron-Bridge in which one kernel casts the rows of all experts to mxfp8."""


def casts_each(software: Software) -> bool:
    """True if separate kernels cast the operands of each expert: with one scale per tensor, and for mxfp8 in older releases."""
    return software.dtype == "fp8" or (software.dtype == "mxfp8" and (software.release or GROUPED_CASTS) < GROUPED_CASTS)


FUSED_EXPERTS = "26.06"
"""First release of Megatron-Bridge whose mxfp8 recipes with full-iteration graphs run experts by Transformer Engine's operation fuser."""


def experts_fused(software: Software) -> bool:
    """True if grouped products apply the activation and write cast rows: mxfp8 with one graph per iteration."""
    newer = software.name == "megatron-bridge" and (software.release or "") >= FUSED_EXPERTS
    return newer and software.dtype == "mxfp8" and "full" in software.graphs


def expert_by_expert(software: Software) -> bool:
    """True if Transformer Engine launches the products of a bank of experts one by one."""
    return framework(software.name).kernels == "te" and not experts_fused(software)


def expert_kernels(work: TimedStep, local_experts: int) -> tuple[float, float]:
    """Kernels of forward and backward that a rank launches for its experts one by one."""
    if not expert_by_expert(work.software):
        return 0.0, 0.0
    moe, (forward, backward) = work.spec.model.moe, EXPERT_KERNELS[work.software.dtype if casts_each(work.software) else "bf16"]
    biased = moe is not None and moe.bias
    return local_experts * (forward + biased * BIAS_KERNELS[0]), local_experts * (backward + biased * BIAS_KERNELS[1])


def experts_again(recomputed: Recomputed) -> float:
    """Share of the E blocks that backward runs again, dispatch included."""
    return 1.0 if "moe" in recomputed.modules else recomputed.full


BACKWARD_KERNELS = {"A": 1.6, "D": 1.6, "E": 1.5, "M": 1.36, "head": 1.0}
"""Ratio of the kernels of backward to those of forward."""
AGAIN = 0.6
"""Increase of the kernels of backward, as a share, if the block is recomputed."""
HOST_JOIN = 6.0
"""Exponent of the smooth maximum of device and host time."""


def joined_seconds(device: Any, host: Any) -> Any:
    """Seconds of a pass whose kernels the host launches while they run: (D^6 + H^6)^(1/6)."""
    return (device**HOST_JOIN + host**HOST_JOIN) ** (1 / HOST_JOIN)


def launch(ledger: Ledger, work: TimedStep, kernels_of: str, local_experts: int, num_adapters: int) -> None:
    """Add the kernels of a block.

    Args:
        ledger: Ledger of the block.
        work: The step.
        kernels_of: Key of `KERNELS`, or E; its first character is the block's letter.
        local_experts: Experts of the rank.
        num_adapters: Adapters of the block.
    """
    letter, graphs = kernels_of[0], work.software.graphs
    if letter == "E":
        again, own = experts_again(work.recomputed), expert_kernels(work, local_experts)
        for name, (first, last), modules in (("router", (0.0, 0.0), {"full", "moe", "moe_router"}), ("experts", own, {"full", "moe"})):
            forward, backward = KERNELS[name] + first, KERNELS[name] * BACKWARD_KERNELS[letter] + last
            ledger.launch(forward, backward + again * forward, graphed=bool(modules & graphs))
        return
    kernels, again = KERNELS[kernels_of], 1.0 if letter == "M" else 1 + AGAIN * work.recomputed.full
    forward, backward = (num_adapters * each for each in ADAPTER_KERNELS)
    graphed = bool({"full", GRAPHS[letter]} & graphs)
    ledger.launch(kernels + forward, kernels * BACKWARD_KERNELS[letter] * again + backward, graphed=graphed)
