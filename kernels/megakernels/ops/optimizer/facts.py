"""Facts of the optimizers' updates: elements of a program, and bytes of an element."""

UPDATE_BLOCK = 2048
"""Elements of a program."""
ADAMW_BLOCK = 1024
"""Elements of a program of AdamW, which reads four tensors."""


def nesterov_bytes(gradient: int, average: int, update: int) -> int:
    """Bytes of an element of `nesterov_`: gradient and momentum are read, momentum and update written."""
    return gradient + 2 * average + update


def decayed_add_bytes(weight: int, update: int) -> int:
    """Bytes of an element of `decayed_add_`: weight and update are read, the weight written."""
    return 2 * weight + update


def adamw_bytes(gradient: int, average: int, weight: int) -> int:
    """Bytes of an element of `adamw_`: the gradient is read, both averages and the weight are read and written."""
    return gradient + 4 * average + 2 * weight
