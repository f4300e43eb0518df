"""Names of the parts of a training step, and the part that a GPU kernel belongs to, by its name.

A measured profile and the step-time model are compared part by part: both use these names. The rules were written against the profiles of
`benchmarks/results/h200-2026-11-26.json`, whose kernel names are cut at 110 characters, so a rule reads no further than that.
"""

import re

from megaplan.measured.kernels import FAMILIES, GEMM, family_of

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "GEMM fwd/recompute", "GEMM dgrad, Muon's products", "GEMM wgrad"
OTHER, OTHER_PRODUCTS = "other", "GEMM of other kernels"

OPERATIONS: dict[str, str] = {
    "aten::baddbmm": "Muon GEMM (baddbmm)",
    "aten::_scaled_mm": "GEMM fp8",
    "aten::_scaled_grouped_mm": "GEMM fp8",
}
"""Parts of matrix products by the operation that launched them, where a profile says which."""

RULES: tuple[tuple[str, str], ...] = (
    (rf"^{GEMM}.*_bx_", "Muon GEMM (baddbmm)"),
    (r"^cudnn_.*sdpa.*(bprop|bwd)", "attn bwd (cuDNN)"),
    (r"flash_bwd|FlashAttnBwd", "attn bwd (flash)"),
    (r"flash_fwd|FlashAttnFwd", "attn fwd (flash)"),
    (r"^selective_", "selective scan"),
    (r"^delta_", "gated delta scan"),
    (r"^fp8_(group|hidden|pull|down_bias)", "MoE fp8 rounding"),
    (r"^fp8_", "fp8 quantise"),
    (r"^gated_conv_", "gated conv"),
    (r"^conv_", "causal conv"),
    (r"^(head_gated_|gated_)?(rms_)?norm_", "norms"),
    (r"^(gated_add|gate_gradients|ngram_rows)", "side embedding"),
    (r"^nccl", "collectives"),
    (r"^triton_(poi|red|per|tem|for|spl)_", "compiled blocks"),
    (r"^Memcpy (HtoD|DtoH)", "h2d/d2h"),
    (r"^Memset", "memset"),
)
"""Parts that no family of the step-time model has; these expressions are tried in order, before the families."""

GROUPS: tuple[str, ...] = tuple(
    dict.fromkeys([*(family.group for family in FAMILIES), *(part for _, part in RULES), OTHER_PRODUCTS, OTHER])
)


def group_of(kernel_name: str, operation: str | None = None) -> str:
    """The part of a step that a kernel belongs to.

    Args:
        kernel_name: Kernel name of a profile; its first 110 characters are enough.
        operation: Operation that launched the kernel, such as `aten::baddbmm`, where it is known.

    Returns:
        One of `GROUPS`.
    """
    is_product = re.match(GEMM, kernel_name)
    if is_product and operation in OPERATIONS:
        return OPERATIONS[operation]
    for rule, part in RULES:
        if re.search(rule, kernel_name):
            return part
    family = family_of(kernel_name)
    if family is not None:
        return family.group
    return OTHER_PRODUCTS if is_product else OTHER


def grouped(kernels: list[tuple[str, int, float]]) -> dict[str, tuple[int, float]]:
    """Launches and milliseconds of each part, longest first.

    Args:
        kernels: Name, launches and milliseconds of each kernel.
    """
    found: dict[str, tuple[int, float]] = {}
    for name, launches, milliseconds in kernels:
        part = group_of(name)
        before = found.get(part, (0, 0.0))
        found[part] = (before[0] + launches, before[1] + milliseconds)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


PRODUCT_GROUPS = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, OTHER_PRODUCTS, "GEMM fp8", "LCE rows")
PARTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("matrix products", PRODUCT_GROUPS, r"aten\.(mm|addmm|bmm|_scaled_mm)$|linear_cross_entropy|fp8_(linears|input|weight)"),
    ("fp8 rounding", ("fp8 quantise", "MoE fp8 rounding"), r"fp8_quantize"),
    ("Mamba-3 scan", ("Mamba-3 scan",), r"mamba3"),
    ("SSD scan", ("SSD scan",), r"\.ssd"),
    ("other scans", ("selective scan", "gated delta scan"), r"selective_scan|gated_delta"),
    ("m2rnn", ("m2rnn fwd", "m2rnn bwd"), r"m2rnn"),
    ("attention", (*(group for group in GROUPS if group.startswith("attn")), "indexed attention"), r"attention"),
    ("MoE", tuple(group for group in GROUPS if group.startswith("MoE ") and "fp8" not in group), r"routed_experts|dispatch_plan|\.route"),
    ("Muon's products", ("Muon symmetric", "Muon GEMM (baddbmm)"), r"baddbmm|symmetric_(product|bands)"),
    ("convolutions", ("causal conv", "gated conv"), r"conv1d|gated_conv"),
    ("norms", ("norms",), r"(rms|gated)_norm(_backward)?$"),
    ("activations, rope", ("activation", "rope/mla_kv"), r"swiglu|relu2|gelu|rope|mla_kv"),
)
"""Coarser parts, measured by their groups and counted by the operations whose names match: fused libraries cut steps at other places."""
REST = "copies, sums, optimizer and the rest"


def part_of_group(group: str) -> str:
    """The coarser part of a group of `GROUPS`."""
    return next((part for part, groups, _ in PARTS if group in groups), REST)


def part_of_operation(name: str) -> str:
    """The coarser part of an operation as `benchmarks/roofline.py` names it, such as `megakernels.ssd_backward`."""
    return next((part for part, _, rule in PARTS if re.search(rule, name)), REST)
