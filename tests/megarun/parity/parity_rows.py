"""Made-up data of the parity cells: rows, document starts and structure codes that are functions of step and seed."""

import numpy as np


class CountingRows:
    """Sequences that count upwards from a random start: a function of (step, seed), easy to learn."""

    identity, bytes_per_token = (), 1.0

    def __init__(self, vocab_size: int, micro_batch_size: int = 1, reversed_parts: int = 0) -> None:
        """`reversed_parts`: as many parts of a batch come with their last microbatch first; 0: none."""
        self.vocab_size, self.micro_batch_size, self.reversed_parts = vocab_size, micro_batch_size, reversed_parts

    def rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        starts = np.random.default_rng((seed, step)).integers(0, self.vocab_size, size=(num_rows, 1))
        starts = self._ordered(starts)
        return (starts + np.arange(seq_length + 1)) % self.vocab_size

    def starts(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        """A document begins at every fourth token or so, and some are one token long."""
        columns = np.arange(seq_length + 1, dtype=np.int32)
        first = np.random.default_rng((seed, step, 1)).random((num_rows, seq_length + 1)) < 0.25
        return np.maximum.accumulate(np.where(self._ordered(first), columns, 0), axis=1, dtype=np.int32)

    def structure_rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        return (self.rows(step, seed, num_rows, seq_length) * 5 % 7).astype(np.uint8)

    def platform_rows(self, step: int, seed: int, num_rows: int, seq_length: int) -> np.ndarray:
        return (self.starts(step, seed, num_rows, seq_length) * 3 % 5).astype(np.uint8)

    def _ordered(self, rows: np.ndarray) -> np.ndarray:
        if not self.reversed_parts:
            return rows
        return rows.reshape(self.reversed_parts, -1, self.micro_batch_size, rows.shape[1])[:, ::-1].reshape(rows.shape)
