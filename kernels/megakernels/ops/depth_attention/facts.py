"""Facts of attention over depth: scratch of the plain-torch operation."""

FP32_BYTES = 4


def scratch_bytes(rows: int, hidden: int, itemsize: int, count: int, *, backward: bool) -> int:
    """Bytes in addition to operands, results and saved tensors: a sum in fp32, and in backward numbers of each token and value.

    Args:
        rows: Tokens.
        hidden: Width h of a value.
        itemsize: Bytes of a value's element.
        count: Values.
        backward: True for the backward operation.
    """
    wide = rows * hidden * FP32_BYTES
    if not backward:
        return (wide if itemsize < FP32_BYTES else 0) + rows * count * FP32_BYTES
    return wide + 4 * rows * count * FP32_BYTES
