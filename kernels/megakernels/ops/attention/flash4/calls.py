"""Attention by FlashAttention-4, an optional package: the calls, and when they run. Saved are the same tensors as by own kernels."""

from typing import Any

import torch
from torch import Tensor

from megakernels.libraries import FLASH4, HOPPER, loaded
from megakernels.ops.attention.inputs import Attention
from megakernels.ops.attention.reference import made_like
from megakernels.ops.attention.sizes import sizes_of
from megakernels.ops.attention.vendor import is_aligned


def runs(given: Attention) -> bool:
    """True if the package makes both passes of this call: the process uses it, its table has the call, and it is there on this device."""
    return sizes_of(given).in_library and 0 not in given.q.shape and _is_able(given.q.device)


def _is_able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER and loaded(FLASH4).module is not None


def forward(given: Attention) -> tuple[Tensor, Tensor]:
    """Follows the contract of `choice.forward`: the log-sum-exp is of the sinks too."""
    out, lse = made_like(given)
    functions: Any = loaded(FLASH4).module
    functions._flash_attn_fwd(
        *given[:3], **_settings(given), softcap=given.cap, learnable_sink=given.sinks, return_lse=True, out=out, lse=lse
    )
    return out, lse


def backward(grad_out: Tensor, given: Attention, out: Tensor, lse: Tensor, *, of_sinks: bool) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, and of the sinks if `of_sinks`; the last, of relations, is None. Bitwise reproducible."""
    grad_out = grad_out.to(given.q.dtype)
    found = {
        name: torch.empty(each.shape, dtype=each.dtype, device=each.device)
        for name, each in zip(("dq", "dk", "dv"), given[:3], strict=True)
    }
    functions: Any = loaded(FLASH4).module
    sinks = given.sinks if of_sinks else None
    made = functions._flash_attn_bwd(
        *given[:3], out.contiguous(), grad_out if is_aligned(grad_out) else grad_out.contiguous(), lse.contiguous(),
        **_settings(given), softcap=given.cap or 0.0, learnable_sink=sinks, deterministic=True, **found,
    )  # fmt: skip
    return *made[:3], made[3] if sinks is not None else None, None


def _settings(given: Attention) -> dict[str, Any]:
    """Arguments that both passes have."""
    window = (None, None) if given.window is None else (given.window - 1, 0)
    return {"softmax_scale": given.scale, "causal": True, "window_size_left": window[0], "window_size_right": window[1]}
