"""mamba-ssm without its compiled extension, which belongs to Mamba-1."""

import sys
from types import ModuleType

sys.modules.setdefault("selective_scan_cuda", ModuleType("selective_scan_cuda"))
from mamba_ssm.ops.triton.mamba3.mamba3_mimo_rotary_step import apply_rotary_qk_inference_reference  # noqa: E402

__all__ = ["apply_rotary_qk_inference_reference"]
