"""Element types and their sizes."""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    """An element type by its short name, as specs and plans spell it."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT64 = "int64"
    INT32 = "int32"

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return _BYTES[self]


_BYTES = {DType.FP32: 4, DType.BF16: 2, DType.FP16: 2, DType.FP8: 1, DType.INT64: 8, DType.INT32: 4}
