"""The torch dtype of each of megaplan's element types."""

import torch

from megaplan.dtypes import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP8: torch.float8_e4m3fn,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
}
