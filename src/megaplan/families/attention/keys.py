"""Sections of keys that grouped-query attention shares among layers, chooses, or compresses."""

from megaplan.scalars import NaturalInt, PositiveInt, Section, StrictBool


class Compressor(Section):
    """Keys of grouped-query attention that are made of several positions each, which a gate sums; a layer attends to them, too.

    Attributes:
        layers: A layers with it: 0-based global indices, rising.
        rate: Positions for each of these keys.
        overlaps: True if each also covers the preceding `rate` positions.
        top_k: Number of them that an indexer chooses; null for all.
        index_heads: Heads of the indexer.
        index_dim: Width of one of them.
    """

    layers: tuple[NaturalInt, ...]
    rate: PositiveInt
    overlaps: StrictBool = False
    top_k: PositiveInt | None = None
    index_heads: NaturalInt = 0
    index_dim: NaturalInt = 0

    @property
    def halves(self) -> int:
        """Products of the input for one key, each as wide as the key."""
        return 2 if self.overlaps else 1


class BlockIndexer(Section):
    """An indexer of grouped-query attention that chooses blocks of keys, with norms over its heads; the choice has no gradient.

    Attributes:
        num_heads: Heads of the indexer; each chooses for its share of the query heads.
        head_dim: Width of one of them, and of its key.
        block_size: Keys of a block; its score is the largest of its keys'.
        top_blocks: Blocks that a token attends to.
        layers: Layers that have the indexer: 0-based global indices of A layers, rising.
    """

    num_heads: PositiveInt
    head_dim: PositiveInt
    block_size: PositiveInt
    top_blocks: PositiveInt
    layers: tuple[NaturalInt, ...]


class SharedKeys(Section):
    """Layers that read the keys and values of an earlier layer and have no projections for them.

    Attributes:
        source: The A layer whose keys and values they read: its 0-based global index.
        layers: A layers after it with the same heads and window: 0-based global indices, rising.
    """

    source: NaturalInt
    layers: tuple[NaturalInt, ...]
