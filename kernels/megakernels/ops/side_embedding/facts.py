"""Facts of n-gram hashes and of gated additions of side embeddings."""

ADD_TILE = 2048
"""Elements of a tile of the gated addition."""
NUM_SUMS = 512
"""Largest number of programs that sum: it does not depend on the device, so the result does not either."""
HASH_TILE = 1024
"""Hashes of a tile of tokens, all tables together."""
