"""Statistics of a token file; a model whose loss is below the unigram entropy has learned more than frequencies."""

import math
from dataclasses import dataclass

import numpy as np

from megarun.data.token_file import TokenFile

CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of one token file.

    Attributes:
        longest_document_tokens: Tokens of the longest document, including its end.
        median_document_tokens: Median tokens per document, the lower of two middle values.
        shortest_document_tokens: Tokens of the shortest document, including its end.
        vocabulary_used: Number of distinct ids in the file.
        unigram_entropy_nats: −Σ p ln p over the ids' frequencies p: the loss of the best predictor that ignores context.
    """

    longest_document_tokens: int
    median_document_tokens: int
    shortest_document_tokens: int
    vocabulary_used: int
    unigram_entropy_nats: float

    @property
    def unigram_entropy_bits(self) -> float:
        """Unigram entropy in bits per token."""
        return self.unigram_entropy_nats / math.log(2)


def measure(source: TokenFile) -> Statistics:
    """Read every token once.

    Raises:
        MegaplanError: MP614 if an id is outside the vocabulary.
    """
    chunks = [source.tokens[start : start + CHUNK_TOKENS] for start in range(0, source.num_tokens, CHUNK_TOKENS)]
    largest = max(int(chunk.max()) for chunk in chunks)
    if largest >= source.vocab_size:
        raise source.damaged(f"token id {largest:,}, header.vocab_size = {source.vocab_size:,}")
    counts = np.zeros(largest + 1, dtype=np.int64)
    for chunk in chunks:
        counts += np.bincount(chunk, minlength=largest + 1)
    present = counts[counts > 0]
    lengths = np.sort(np.diff(source.document_offsets))
    frequencies = present / source.num_tokens
    return Statistics(
        longest_document_tokens=int(lengths[-1]),
        median_document_tokens=int(lengths[(len(lengths) - 1) // 2]),
        shortest_document_tokens=int(lengths[0]),
        vocabulary_used=len(present),
        unigram_entropy_nats=max(0.0, -math.fsum(frequencies * np.log(frequencies))),
    )
