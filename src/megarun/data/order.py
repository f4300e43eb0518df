"""The order in which windows are read: a keyed bijection of 0 … n − 1, computed at any position without a table.

A balanced Feistel network permutes the smallest even-bit domain that holds n numbers; walking along its cycle until the number is below n
makes it a permutation of exactly n. No state is kept, so position 10^9 costs as much as position 0.

Source: M. Luby and C. Rackoff, How to construct pseudorandom permutations (1988), for the network; J. Black and P. Rogaway, Ciphers with
arbitrary finite domains (2002), for the walk; G. Steele, D. Lea and C. Flood, Fast splittable pseudorandom number generators (2014), for
the round function's mixing constants.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 8  # four rounds are the theoretical minimum against chosen inputs; small domains need more to mix


def shuffled(positions: NDArray[np.int64], length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The value of the permutation of this seed and epoch at each position.

    Args:
        positions: int64 [k], each in 0 … length − 1.
        length: Number of permuted values.
        seed: Any integer.
        epoch: 0-based; every epoch has a different order.

    Returns:
        int64 [k], each in 0 … length − 1; all positions together give every number once.
    """
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(f"megarun.rows/1 {seed} {epoch}".encode(), digest_size=8 * NUM_ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    found = _network(positions.astype(np.uint64), half_bits, keys)
    while (outside := found >= length).any():  # the domain is at most 4 · length, so each iteration resolves at least a quarter
        found[outside] = _network(found[outside], half_bits, keys)
    return found.astype(np.int64)


def _network(numbers: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    width, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = numbers >> width, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << width) | right


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
