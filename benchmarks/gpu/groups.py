"""Names of the parts of a training step, and the part that a GPU kernel belongs to, by its name.

A measured profile and the step-time model are compared part by part: both use these names. The rules were written against the profiles of
`benchmarks/results/h200-2026-11-26.json`, whose kernel names are cut at 110 characters, so a rule reads no further than that.
"""

from __future__ import annotations

import re

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "GEMM fwd/recompute", "GEMM dgrad", "GEMM wgrad"
OTHER = "other"

OPERATIONS: dict[str, str] = {
    "aten::baddbmm": "Muon GEMM (baddbmm)",
    "aten::_scaled_mm": "GEMM fp8",
    "aten::_scaled_grouped_mm": "GEMM fp8",
}
"""Parts of matrix products by the operation that launched them, where a profile says which."""

RULES: tuple[tuple[str, str], ...] = (
    (r"^mamba3_", "Mamba-3 scan"),
    (r"^ssd_", "SSD scan"),
    (r"^selective_", "selective scan"),
    (r"^delta_", "gated delta scan"),
    (r"^m2rnn_forward", "m2rnn fwd"),
    (r"^m2rnn_backward", "m2rnn bwd"),
    (r"^index_", "indexed attention"),
    (r"^attention_forward", "attn fwd (Triton)"),
    (r"^attention_key", "attn bwd dk,dv"),
    (r"^attention_query", "attn bwd dq"),
    (r"^cudnn_.*sdpa.*(bprop|bwd)", "attn bwd (cuDNN)"),
    (r"^cudnn_.*sdpa", "attn fwd (cuDNN)"),
    (r"flash_bwd|FlashAttnBwd", "attn bwd (flash)"),
    (r"flash_fwd|FlashAttnFwd", "attn fwd (flash)"),
    (r"^outer_", "MoE wgrad (outer)"),
    (r"^down_", "MoE down"),
    (r"^pull_", "MoE pull (dgrad)"),
    (r"^up_", "MoE up"),
    (r"^sum_slots", "MoE combine"),
    (r"^fp8_(group|hidden|pull|down_bias)", "MoE fp8 rounding"),
    (r"^fp8_", "fp8 quantise"),
    (r"^symmetric_product", "Muon symmetric"),
    (r"^gated_conv_", "gated conv"),
    (r"^conv_", "causal conv"),
    (r"^(head_gated_|gated_)?(rms_)?norm_", "norms"),
    (r"^activation_", "activation"),
    (r"^(rope|mla_kv|k_rope)_", "rope/mla_kv"),
    (r"^(statistics|gradient)_kernel", "LCE rows"),
    (r"^(gated_add|gate_gradients|ngram_rows)", "side embedding"),
    (r"^nccl", "collectives"),
    (r"^triton_(poi|red|per|tem|for|spl)_", "compiled blocks"),
    (r"chunk_cat_cuda_kernel", "FSDP chunk_cat"),
    (r"CatArrayBatchedCopy", "cat"),
    (r"multi_tensor_apply_kernel<.*FusedOpti", "AdamW"),
    (r"multi_tensor_apply_kernel", "clip (norm, scale)"),
    (r"bfloat16_copy_kernel_cuda|gpu_kernel_impl_nocast<at::native::bfloat16_copy_kerne", "FSDP cast fp32->bf16"),
    (r"direct_copy_kernel", "copies with stride / cast to bf16"),
    (r"(vectorized|unrolled)_elementwise_kernel<.*CUDAFunctor_add<float>", "adds fp32 (momentum, update, grad accumulation)"),
    (r"CUDAFunctor_add<c10::BFloat16>", "adds bf16 (residual, dgrad sums)"),
    (r"vectorized_elementwise_kernel<.*AUnaryFunctor<float, float, float", "muls fp32 (momentum, decay)"),
    (r"gpu_kernel_impl_nocast<at::native::BinaryFunctor<c10::", "Muon normalise"),
    (r"^Memcpy DtoD", "DtoD copies"),
    (r"^Memcpy (HtoD|DtoH)", "h2d/d2h"),
    (r"^Memset", "memset"),
)
"""The first expression that a kernel's name matches says its part."""

PRODUCTS: tuple[tuple[str, str], ...] = (
    (r"_qq[a-z]*_", "GEMM fp8"),
    (r"_bx_", "Muon GEMM (baddbmm)"),
    (r"_TN[NT]$", FORWARD),
    (r"_NN[NT]$", INPUT_GRADIENT),
    (r"_NT[NT]$", WEIGHT_GRADIENT),
)
"""cuBLAS says in a name's last letters which operands are transposed: x Wᵀ, g W and gᵀ x differ there. `_bx_`, products that add to a
matrix, are Muon's alone in a step without another `baddbmm`; a profile with operations does not need that rule."""

GROUPS: tuple[str, ...] = tuple(dict.fromkeys([part for _, part in (*PRODUCTS, *RULES)] + ["GEMM of other kernels", OTHER]))


def group_of(kernel_name: str, operation: str | None = None) -> str:
    """The part of a step that a kernel belongs to.

    Args:
        kernel_name: As a profile has it; its first 110 characters are enough.
        operation: What launched it, such as `aten::baddbmm`, where that is known.

    Returns:
        One of `GROUPS`.
    """
    if re.match(r"nvjet_|cutlass|sm\d+_xmma_gemm|void (cutlass|gemm)|ampere_.*gemm", kernel_name):
        if operation in OPERATIONS:
            return OPERATIONS[operation]
        found = (part for rule, part in PRODUCTS if re.search(rule, kernel_name))
        return next(found, "GEMM of other kernels")
    return next((part for rule, part in RULES if re.search(rule, kernel_name)), OTHER)


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


PRODUCT_GROUPS = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, "GEMM of other kernels", "GEMM fp8", "LCE rows")
PARTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("matrix products", PRODUCT_GROUPS, r"aten\.(mm|addmm|bmm|_scaled_mm)$|linear_cross_entropy|fp8_(linears|input|weight)"),
    ("fp8 rounding", ("fp8 quantise", "MoE fp8 rounding"), r"fp8_quantize"),
    ("Mamba-3 scan", ("Mamba-3 scan",), r"mamba3"),
    ("SSD scan", ("SSD scan",), r"\.ssd"),
    ("other scans", ("selective scan", "gated delta scan"), r"selective_scan|gated_delta"),
    ("m2rnn", ("m2rnn fwd", "m2rnn bwd"), r"m2rnn"),
    ("attention", (*(group for group in GROUPS if group.startswith("attn")), "indexed attention"), r"attention"),
    ("MoE", tuple(group for group in GROUPS if group.startswith("MoE ") and "fp8" not in group), r"routed_experts|dispatch_plan|\.route"),
    ("Muon's products", ("Muon symmetric", "Muon GEMM (baddbmm)"), r"baddbmm|symmetric_product"),
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
