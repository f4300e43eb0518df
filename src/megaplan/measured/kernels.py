"""Kinds of kernels by the names of GPU kernels in a profile; names may be cut at 110 characters."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple


class KernelFamily(NamedTuple):
    """Kernels that a profile does not distinguish.

    Attributes:
        rule: An expression that their names match; the first family counts.
        group: Name in tables; several families may share one.
        kinds: Kinds of the cost model whose times they make up together.
        letter: Letter of the passes, if products differ by it; None for all. Kernels outside passes belong to it too.
    """

    rule: str
    group: str
    kinds: tuple[str, ...]
    letter: str | None = None


GEMM = r"(nvjet_|cutlass|sm\d+_xmma_gemm|void (cutlass|gemm)|ampere_.*gemm)"
COPIES, CASTS, ADDS = "DtoD copies", "copies with stride / cast to bf16", "adds bf16 (residual, dgrad sums)"
FAMILIES: tuple[KernelFamily, ...] = (
    KernelFamily(rf"^{GEMM}.*_qq[a-z]*_", "GEMM fp8", ("fp8.product",)),
    KernelFamily(rf"^{GEMM}.*_TN[NT]$", "GEMM fwd/recompute", ("product",), "F"),
    KernelFamily(rf"^{GEMM}.*_NN[NT]$", "GEMM dgrad, Muon's products", ("product", "muon.product"), "I"),
    KernelFamily(rf"^{GEMM}.*_NT[NT]$", "GEMM wgrad", ("product",), "W"),
    KernelFamily(r"^mamba3_", "Mamba-3 scan", ("mamba3",)),
    KernelFamily(r"^ssd_", "SSD scan", ("ssd",)),
    KernelFamily(r"^m2rnn_forward", "m2rnn fwd", ("m2rnn.forward",)),
    KernelFamily(r"^m2rnn_(backward|recompute|walk|gradient)", "m2rnn bwd", ("m2rnn.backward",)),
    KernelFamily(r"^index_", "indexed attention", ("index",)),
    KernelFamily(r"^attention_forward", "attn fwd (Triton)", ("attention.forward", "latent_attention.forward")),
    KernelFamily(r"^cudnn_.*sdpa", "attn fwd (cuDNN)", ("attention.forward", "latent_attention.forward")),
    KernelFamily(r"^attention_key", "attn bwd dk,dv", ("attention.key", "latent_attention.key")),
    KernelFamily(r"^attention_query", "attn bwd dq", ("attention.query", "latent_attention.query")),
    KernelFamily(r"^attention_(score|delta)", "attn bwd scores", ("attention.score", "latent_attention.score", "wide_attention.score")),
    KernelFamily(r"^attention_product", "attn bwd products", ("attention.product", "latent_attention.product", "wide_attention.product")),
    KernelFamily(r"^outer_", "MoE wgrad (outer)", ("experts.outer", "gated_experts.outer")),
    KernelFamily(r"^down_", "MoE down", ("experts.down", "gated_experts.down")),
    KernelFamily(r"^pull_", "MoE pull (dgrad)", ("experts.pull", "gated_experts.pull")),
    KernelFamily(r"^up_", "MoE up", ("experts.up", "gated_experts.up")),
    KernelFamily(r"^fp8_(maxima|round|row|scale|turn)", "fp8 quantise", ("fp8.round",)),
    KernelFamily(r"^symmetric_(product|bands)", "Muon symmetric", ("muon.symmetric",)),
    KernelFamily(r"^conv_forward", "causal conv", ("convolution.forward",)),
    KernelFamily(r"^conv_backward", "causal conv", ("convolution.backward",)),
    KernelFamily(r"^rms_norm_forward", "norms", ("norm.forward",)),
    KernelFamily(r"^rms_norm_backward", "norms", ("norm.backward", "gated_norm.backward")),
    KernelFamily(r"^activation_", "activation", ("activation",)),
    KernelFamily(r"^rope_", "rope/mla_kv", ("rope",)),
    KernelFamily(r"^(mla_kv|k_rope)_", "rope/mla_kv", ("mla_kv",)),
    KernelFamily(r"^statistics_kernel", "LCE rows", ("loss.forward",)),
    KernelFamily(r"^gradient_kernel", "LCE rows", ("loss.backward",)),
    KernelFamily(r"^(sum_slots|spread)_", "MoE combine", ("experts.sum",)),
    KernelFamily(r"chunk_cat_cuda_kernel", "FSDP chunk_cat", ("chunk_cat",)),
    KernelFamily(r"CatArrayBatchedCopy", "cat", ("join",)),
    KernelFamily(r"^adamw_kernel|multi_tensor_apply_kernel<.*FusedOpti", "AdamW", ("adamw",)),
    KernelFamily(r"^(nesterov|decayed_add)_kernel", "Muon's momentum and update", ("muon.scale",)),
    KernelFamily(r"multi_tensor_apply_kernel", "clip (norm, scale), casts of groups", ("clip", "group cast")),
    KernelFamily(r"bfloat16_copy_kernel_cuda|gpu_kernel_impl_nocast<at::native::bfloat16_copy_kerne", "FSDP cast fp32->bf16", ("cast",)),
    KernelFamily(r"elementwise_kernel<128.*direct_copy_kernel", CASTS, ("strided copy",)),
    KernelFamily(r"direct_copy_kernel", CASTS, ("muon.uncast",)),
    KernelFamily(
        r"(vectorized|unrolled)_elementwise_kernel<.*CUDAFunctor_add<float>",
        "adds fp32 (momentum, update, grad accumulation)",
        ("add.fp32",),
    ),
    KernelFamily(r"CUDAFunctor_add<c10::BFloat16>", ADDS, ("add",)),
    KernelFamily(r"vectorized_elementwise_kernel<.*AUnaryFunctor<float, float, float", "muls fp32 (momentum, decay)", ("muon.scale",)),
    KernelFamily(r"gpu_kernel_impl_nocast<at::native::BinaryFunctor<c10::", "Muon normalise", ("muon.divide",)),
    KernelFamily(r"reduce_kernel<512, 1.*NormTwoOps<c10::", "other", ("muon.norm",)),
    KernelFamily(r"^Memcpy DtoD", COPIES, ("copy", "shard copy")),
)


class Time(NamedTuple):
    """Launches and milliseconds of a family in a profiled step."""

    launches: int
    milliseconds: float


@cache
def family_of(kernel: str) -> KernelFamily | None:
    """The family of a kernel; None for one that no kind counts."""
    return next((family for family in FAMILIES if re.search(family.rule, kernel)), None)


def by_family(kernels: Iterable[tuple[str, int, float]]) -> dict[KernelFamily | None, Time]:
    """Launches and milliseconds of each family of a profiled step; kernels of no family are under None.

    Args:
        kernels: Name, launches and milliseconds of each kernel.
    """
    found: dict[KernelFamily | None, Time] = {}
    for name, launches, milliseconds in kernels:
        family, before = family_of(name), found.get(family_of(name), Time(0, 0.0))
        found[family] = Time(before.launches + launches, before.milliseconds + milliseconds)
    return found


def seen_by_step(gpu: Mapping[str, Any]) -> dict[KernelFamily | None, Time]:
    """Milliseconds by which each family of a profiled step on one rank makes the step longer.

    Kernels overlap only with copies in FSDP2's streams: all-gathers and reduce-scatters on a mesh of one rank. The time by which all
    kernels exceed the device's busy time is therefore taken off the copies.

    Args:
        gpu: `by_kernel` as for `by_family`, `busy_ms` in which at least one kernel ran, and `sum_ms` of all kernels, by default equal.
    """
    found, busy = by_family(gpu["by_kernel"]), gpu["busy_ms"]
    overlap = max(0.0, gpu.get("sum_ms", busy) - busy)
    for family, time in found.items():
        if family is not None and family.group == COPIES:
            found[family] = time._replace(milliseconds=max(0.0, time.milliseconds - overlap))
    return found
