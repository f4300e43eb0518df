"""Element types and their sizes."""

from enum import StrEnum


class DType(StrEnum):
    """An element type by its short name, as specs and plans spell it.

    Attributes:
        bytes: Bytes of one element.
    """

    bytes: int

    FP32 = "fp32", 4
    BF16 = "bf16", 2
    FP16 = "fp16", 2
    FP8 = "fp8", 1
    INT64 = "int64", 8
    INT32 = "int32", 4

    def __new__(cls, name: str, size: int) -> "DType":
        """A member: its value is the name."""
        member = str.__new__(cls, name)
        member._value_, member.bytes = name, size
        return member

    @property
    def of_products(self) -> "DType":
        """Dtype of the result of a product with weights of this dtype, activation or gradient: fp8 is for weights only, and gives bf16."""
        return DType.BF16 if self is DType.FP8 else self
