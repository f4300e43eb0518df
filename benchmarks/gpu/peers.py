"""Operations of public libraries that compute what one of ours does; measured on the same inputs where the library is installed.

Each takes the inputs of a `KernelCase` by name. A loss is a sum over rows, labels are the case's own. A library that refuses the device or
the Triton version refuses by itself: its row has the message.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from gpu.case import KernelCase
from gpu.kernel_cases import EPS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu, softplus

LIGER, FLA, MAMBA, PLAIN = "liger_kernel", "fla", "mamba_ssm", "plain torch"
Peer = Callable[..., Tensor]


def peers(case: KernelCase) -> Iterator[tuple[str, Peer]]:
    """Libraries that have the case's operation and are installed, each with its operation; a label begins with the library's name.

    `PLAIN`, the operation's own plain-torch formulas, is not among them.
    """
    for (library, operation), make in PEERS.items():
        if case.name.split()[0] == operation and importlib.util.find_spec(library.split()[0]) is not None:
            call = make(case)
            if call is not None:
                yield library, call


def _loaded(module: str, name: str) -> Any:
    """Looked up at the first call: a library may fail to import, and its row then says so."""
    return getattr(import_module(module), name)


def _liger_rms_norm(_: KernelCase) -> Peer:
    return lambda x, weight: _loaded("liger_kernel.ops.rms_norm", "LigerRMSNormFunction").apply(x, weight, EPS)


def _liger_swiglu(_: KernelCase) -> Peer:
    return lambda gate, up: _loaded("liger_kernel.ops.swiglu", "LigerSiLUMulFunction").apply(gate, up)


def _labels(case: KernelCase, x: Tensor) -> Tensor:
    if case.labels is None:
        raise ValueError(f"{case.name} has no labels")
    return case.labels(x)


def _liger_cross_entropy(case: KernelCase) -> Peer:
    def call(logits: Tensor) -> Tensor:
        loss = _loaded("liger_kernel.transformers.functional", "liger_cross_entropy")
        # the library writes the gradient over its input
        found: Tensor = loss(logits.flatten(0, 1).clone(), _labels(case, logits), reduction="sum")
        return found

    return call


def _liger_linear_cross_entropy(case: KernelCase) -> Peer:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        loss = _loaded("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
        found: Tensor = loss(x.flatten(0, 1), weight, _labels(case, x), reduction="sum")
        return found

    return call


def _fla_linear_cross_entropy(case: KernelCase) -> Peer:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        loss = _loaded("fla.modules.fused_linear_cross_entropy", "fused_linear_cross_entropy_loss")
        found: Tensor = loss(x.flatten(0, 1), _labels(case, x), weight, reduction="sum")
        return found

    return call


def _torch_attention(backend: str) -> Callable[[KernelCase], Peer | None]:
    """Torch's own with one of its libraries, which take whole rows without a window or a cap."""

    def make(case: KernelCase) -> Peer | None:
        if case.window is not None or case.documents or case.capped:
            return None
        width = case.shapes["q"][-1]
        if backend == "FLASH_ATTENTION" and case.shapes["v"][-1] != width:
            return None  # it takes one width

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                heads = (each.transpose(1, 2) for each in (q, k, v))
                out = scaled_dot_product_attention(*heads, is_causal=True, scale=width**-0.5, enable_gqa=True)
            return out.transpose(1, 2)

        return call

    return make


def _fla_ssd(_: KernelCase) -> Peer:
    """Mamba-2 as linear attention whose keys and queries are B and C and whose log decay is −exp(A_log) Δ, one per head."""

    def call(x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
        step = softplus(dt.float() + dt_bias.float())
        heads_per_group = x.shape[2] // B.shape[2]
        keys, queries = (each.repeat_interleave(heads_per_group, 2) for each in (B, C))
        values, decay = (x * step.unsqueeze(-1)).to(x.dtype), -A_log.float().exp() * step
        y: Tensor = _loaded("fla.ops.simple_gla", "chunk_simple_gla")(queries, keys, values, decay, scale=1.0)[0]
        return y + (D.unsqueeze(-1) * x).to(y.dtype)

    return call


def _compiled_parts_absent() -> None:
    """mamba-ssm imports its compiled scan of Mamba-1, which none of these operations reads, with the package."""
    if importlib.util.find_spec("selective_scan_cuda") is None:
        sys.modules.setdefault("selective_scan_cuda", ModuleType("selective_scan_cuda"))


def _mamba_ssd(case: KernelCase) -> Peer:
    def call(x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
        _compiled_parts_absent()
        scan, decay = _loaded("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"), -A_log.float().exp()
        y: Tensor = scan(x, dt, decay, B, C, case.tile, D=D, dt_bias=dt_bias.float(), dt_softplus=True)
        return y

    return call


def _mamba_mamba3(case: KernelCase) -> Peer | None:
    """The scan of rank 1; its kernels for larger ranks are not Triton. Operands are prepared as by `mamba_ssm/modules/mamba3.py`."""
    if case.shapes["B"][2] > 1:
        return None

    def call(**given: Tensor) -> Tensor:
        _compiled_parts_absent()
        heads, step = given["x"].shape[2], softplus(given["dt"].float() + given["dt_bias"].float())
        y: Tensor = _loaded("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined", "mamba3_siso_combined")(
            Q=given["C"][:, :, 0],
            K=given["B"][:, :, 0],
            V=given["x"],
            ADT=(-softplus(given["A"].float()).clamp(min=1e-4) * step).mT.contiguous(),
            DT=step.mT.contiguous(),
            Trap=given["trapezoid"].mT.contiguous(),
            Q_bias=given["C_bias"][:, 0],
            K_bias=given["B_bias"][:, 0],
            Angles=given["angles"].unsqueeze(2).expand(-1, -1, heads, -1).contiguous(),
            chunk_size=case.tile,
        )
        return (y + given["D"].unsqueeze(-1) * given["x"]) * silu(given["z"])

    return call


def _fla_delta(_: KernelCase) -> Peer:
    """Chunked kernels of the gated delta net, or of Kimi delta attention, with decays and write strengths made outside."""

    def call(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        rate = -A_log.float().exp()
        logs = (rate if decay.dim() == 3 else rate.unsqueeze(-1)) * softplus(decay.float() + dt_bias.float())
        module, name = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule") if decay.dim() == 3 else ("fla.ops.kda", "chunk_kda")
        if decay.dim() == 3 and q.shape[2] != v.shape[2]:
            q, k = (each.repeat_interleave(v.shape[2] // q.shape[2], 2) for each in (q, k))
        y: Tensor = _loaded(module, name)(q, k, v, logs, beta.sigmoid(), use_qk_l2norm_in_kernel=True)[0]
        return y

    return call


PEERS: dict[tuple[str, str], Callable[[KernelCase], Peer | None]] = {
    ("torch flash", "attention"): _torch_attention("FLASH_ATTENTION"),
    ("torch cudnn", "attention"): _torch_attention("CUDNN_ATTENTION"),
    (LIGER, "rms_norm"): _liger_rms_norm,
    (LIGER, "swiglu"): _liger_swiglu,
    (LIGER, "cross_entropy"): _liger_cross_entropy,
    (LIGER, "linear_cross_entropy"): _liger_linear_cross_entropy,
    (FLA, "linear_cross_entropy"): _fla_linear_cross_entropy,
    (FLA, "ssd"): _fla_ssd,
    (FLA, "gated_delta"): _fla_delta,
    (MAMBA, "ssd"): _mamba_ssd,
    (MAMBA, "mamba3"): _mamba_mamba3,
}
