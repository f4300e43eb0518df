"""What attention takes in plain torch: a loop over blocks of queries, each with the keys that any of them sees.

A kernel of a block reads and writes scores of its queries and keys for all heads (S), or its keys of all heads (K); the rest moves rows of
queries and keys once. Products are told by their FLOPs alone, so that what they read and write is not counted here. torch copies operands
whose batch dims are not one stride apart: keys and queries where there are several sequences, and queries that share a key head.

An indexer runs in one operation with the attention to what it chooses; what it takes beside that attention is its own.

Source: `reference.py` of `megakernels.ops.attention`, `chosen_attention` and `indexed_attention`, kernel by kernel. A test holds bytes,
FLOPs and launches to what `benchmarks/roofline.py` counts there.
"""

from __future__ import annotations

from typing import NamedTuple

from megaplan.blocks.work import Op, Workload
from megaplan.cost.extra import Extra
from megaplan.families.attention.scratch import COLUMN_BLOCK, head_widths
from megaplan.families.attention.work import query_tiles
from megaplan.spec.models import GroupedQueryAttention, LatentAttention, Spec

FP32, NUMBER = 4, 8
"""Bytes of an element, and of one that is read and written."""
MAX_SCORES = 1 << 24
MAX_QUERIES = 64
"""A block of queries has so many rows at most, and so many scores over all sequences and heads."""
UPCAST = 6
"""Bytes of an element of 16 bits that is read, and written in fp32."""


class _Loop(NamedTuple):
    """One rank's loop over its queries.

    Attributes:
        heads: Of queries, on this rank.
        groups: Heads of keys and values.
        width: Of a key.
        value: Width of a value.
        blocks: Turns.
        pairs: Queries times keys of all blocks and sequences, of one head; those that a query may not see included.
        keys: Keys of all blocks and sequences, of one head.
        queries: Of all sequences.
        whole_keys: Keys of all sequences, once.
        copies_keys: Whether products copy their operands of keys, and with them those of queries.
        shares: Whether query heads share a key head.
        upcast: Bytes that a 16-bit element takes to be made fp32; none for fp32.
        item: Bytes of an element of activations.
        hides_bytes: Of flags of the keys that a query may not see, by their order, its window and documents.
        hides_launches: Kernels that make them, of a block.
    """

    heads: int
    groups: int
    width: int
    value: int
    blocks: int
    pairs: int
    keys: int
    queries: int
    whole_keys: int
    copies_keys: bool
    shares: bool
    upcast: int
    item: int
    hides_bytes: int
    hides_launches: int

    @property
    def scores(self) -> int:
        """S."""
        return self.pairs * self.heads


def _loop(spec: Spec, load: Workload, op: Op) -> _Loop:
    attention, batch = spec.model.attention, spec.batch
    assert attention is not None
    heads = widest = attention.num_heads // load.tp
    groups = max(1, attention.num_kv_heads // load.tp) if isinstance(attention, GroupedQueryAttention) else heads
    if isinstance(attention, LatentAttention) and attention.indexer is not None and op.name == "indexer":
        widest = max(heads, attention.indexer.num_heads)
    sequences, cp = batch.micro_batch_size, spec.mesh.cp
    rows = min(MAX_QUERIES, max(1, MAX_SCORES // (sequences * widest * load.seq_length)))
    tiles = query_tiles(load.seq_length, op.window, rows)
    width, value = head_widths(attention)
    windowed, packed = op.window is not None, spec.data.packing == "documents"
    return _Loop(
        heads,
        groups,
        width,
        value,
        -(-tiles.blocks // cp),
        sequences * tiles.pairs // cp,
        sequences * tiles.keys // cp,
        load.num_tokens,
        sequences * load.seq_length,
        sequences > 1 and groups > 1,
        heads > groups,
        UPCAST if load.itemsize < FP32 else 0,
        load.itemsize,
        (2 + 4 * windowed + 4 * sequences * packed) * tiles.pairs // cp,
        3 + 3 * windowed + 2 * packed,
    )


def attention_passes(spec: Spec, load: Workload, op: Op) -> tuple[Extra, Extra]:
    """Scores, their largest and their sum, weights, outputs; backward weights again, then gradients of values, scores, queries and keys.

    Keys' and values' gradients of a block are added to those of all blocks before it.
    """
    loop, model = _loop(spec, load, op), spec.model
    both, capped = loop.width + loop.value, isinstance(model.attention, GroupedQueryAttention) and model.attention.score_cap is not None
    added = model.features.relation_bias is not None
    copied = loop.copies_keys or loop.shares
    queries, keys = loop.queries * loop.heads, loop.keys * loop.groups
    rows, scaled = loop.whole_keys * loop.groups, loop.upcast + NUMBER

    moved = loop.scores * (32 + 24 * capped + 8 * added) + loop.hides_bytes
    moved += queries * (loop.width * (scaled + NUMBER * copied) + loop.value * (NUMBER + FP32 + loop.item) + 44) + rows * both * loop.upcast
    moved += keys * both * NUMBER * loop.copies_keys
    launches = loop.blocks * (loop.hides_launches + 12 + 3 * capped + added + copied + 2 * loop.copies_keys)
    forward = Extra(moved, launches + (4 if loop.upcast else 1), 2 * loop.scores * both, True)

    moved = loop.scores * (44 + 60 * capped + 12 * added) + loop.hides_bytes
    moved += queries * (loop.width * (scaled + NUMBER + FP32 + loop.item) + loop.value * (2 * loop.upcast + 16) + NUMBER)
    moved += queries * (2 * both + loop.width * capped) * NUMBER * copied + rows * both * (2 * loop.upcast + FP32)
    moved += keys * (12 * both + NUMBER * ((2 + capped) * loop.width + loop.value) * loop.copies_keys)
    launches = loop.blocks * (loop.hides_launches + 14 + 8 * capped + 3 * added + (4 + capped) * copied + (3 + capped) * loop.copies_keys)
    flops = 2 * loop.scores * (3 * loop.width + 2 * loop.value + loop.width * capped)
    return forward, Extra(moved, launches + (12 if loop.upcast else 5), flops, True)


def masked_passes(spec: Spec, load: Workload, op: Op) -> tuple[Extra, Extra]:
    """Bits of a choice as flags, in place of the order of positions: words spread over all columns, of which a block takes its keys."""
    loop = _loop(spec, load, op)
    columns = -(-load.seq_length // COLUMN_BLOCK) * COLUMN_BLOCK
    both = Extra(FP32 * loop.queries * columns + 9 * loop.pairs - loop.hides_bytes, loop.blocks * (3 - loop.hides_launches), 0, True)
    return both, both


def indexer_passes(spec: Spec, load: Workload, op: Op) -> tuple[Extra, Extra]:
    """Index scores (J, of all index heads) and what is chosen by their sum (P, of one head); backward these again, and the loss of both.

    The attention it runs with makes S anew where that without a choice works in place.
    """
    loop, attention = _loop(spec, load, op), spec.model.attention
    assert isinstance(attention, LatentAttention)
    assert attention.indexer is not None
    index, rotated = attention.indexer, attention.qk_rope_head_dim
    heads, width, copied = index.num_heads, index.head_dim, spec.batch.micro_batch_size > 1
    scores, queries, turned = loop.pairs * heads, loop.queries * heads * width, 28 * rotated
    keys, expanded = loop.keys * width * FP32, loop.keys * width * FP32 * (heads + 1) * copied
    of_queries = queries * (loop.upcast + NUMBER) + loop.queries * heads * turned
    of_keys = loop.whole_keys * (width * (loop.upcast + 56) + turned)

    moved = 4 * loop.scores + 20 * scores + 75 * loop.pairs + 12 * loop.queries * min(index.top_k, load.seq_length)
    moved += of_queries + of_keys + NUMBER * queries * copied + expanded
    forward = Extra(moved, loop.blocks * (19 + 2 * copied) + 31, 2 * scores * width, True)

    moved = 70 * loop.scores + (50 + 16 * copied) * scores + 148 * loop.pairs
    moved += 8 * loop.keys * loop.groups * loop.width + keys * (heads + 4) + 2 * expanded + 2 * NUMBER * queries * copied
    moved += 2 * (of_queries + 2 * of_keys) + NUMBER * queries
    return forward, Extra(moved, loop.blocks * (46 + 6 * copied) + 78, 6 * scores * width, True)


PASSES = {"attention": attention_passes, "masked": masked_passes, "indexer": indexer_passes}
"""By the op's name."""
