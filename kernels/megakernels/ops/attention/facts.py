"""Facts of attention, causal by default: heads of width D for queries and keys, Dv for values, an optional window, shared key heads.

Source: FlashAttention-2, arXiv:2307.08691, section 3.1 (two products forward, five backward).
"""

from typing import NamedTuple

from megakernels.facts import SUMS_BYTES, KernelScratch, KindWork, Pass, Passes, Work, ceil_div
from megakernels.ops.attention.flash4 import facts as flash4
from megakernels.ops.attention.stored.facts import StoredTiles, stored_tiles
from megakernels.ops.attention.tiles.facts import KEY_WIDTH, key_parts

ATTENTION_LARGEST_WIDTH = {2: 256, 4: 64}
"""Largest head of keys or values, by bytes of an element; an fp32 product holds each operand as two TF32 numbers."""
BENT_WIDTH = 192
"""Largest head of capped scores with relations: both at once need more registers than wider heads leave."""
STORED_WIDTH = 128
"""Widest head whose weights are made twice where scores can be stored; a measured choice."""
START_SAMPLES = 128
"""Document starts that a step of the search for a position reads at once."""
PLAIN_SCORES, PLAIN_QUERIES = 1 << 24, 64
"""Largest number of scores, over all sequences and heads, and of queries of a block of plain torch; longer ones compute more in vain."""
NUMBER = 2 * SUMS_BYTES
"""Bytes of an fp32 number that is read and written."""
UPCAST = 6
"""Bytes of a 16-bit element that is read, and written in fp32."""
CUDNN_WIDTH = 128
"""Widest head of cuDNN's forward."""
CUDNN_EQUAL_WIDTH = 256
"""Widest head of cuDNN's forward on Hopper, of queries and values of one width."""
FLASH_WIDTH = 256
"""Widest head of torch's flash kernel."""


class QueryTiles(NamedTuple):
    """Blocks of a sequence's queries, each with the keys visible to any of them.

    Attributes:
        blocks: Number of blocks.
        keys: Keys of all blocks.
        pairs: Queries of each block times its keys.
    """

    blocks: int
    keys: int
    pairs: int


class PlainLoop(NamedTuple):
    """The loop of plain torch over blocks of queries, on one rank.

    Attributes:
        blocks: Turns.
        pairs: Queries times keys of all blocks and sequences, of one head; masked ones included.
        keys: Keys of all blocks and sequences, of one head.
        copies_keys: True if products copy key and query operands: several sequences and several key heads.
        shares: True if query heads share a key head.
        upcast: Bytes that a 16-bit element takes to be made fp32; 0 for fp32.
        hides_bytes: Bytes of flags of the keys that a query may not see, by their order, its window and documents.
        hides_launches: Kernels that make these flags, of a block.
    """

    blocks: int
    pairs: int
    keys: int
    copies_keys: bool
    shares: bool
    upcast: int
    hides_bytes: int
    hides_launches: int


class AttentionSizes(NamedTuple):
    """Sizes of a call on one rank.

    Attributes:
        batch: Sequences.
        queries: Positions of the queries of a sequence on this rank.
        keys: Positions of the keys: the whole sequence.
        heads: Heads of queries.
        groups: Heads of keys and values.
        width: Width of a head of queries and keys.
        value_width: Width of a head of values.
        itemsize: Bytes of an element.
        window: Positions that a query sees; None for all up to its own.
        capped: True if scores are capped.
        relations: True if each head adds a bias by the class of the key.
        sinks: True if each head has a sink.
        packed: True if rows hold several documents.
        latent: True for multi-head latent attention, whose kernels have their own measured constants.
        most_keys: Keys that a query attends to, of its visible ones; None for all.
        index_heads: Heads of the indexer that runs in the same operation; 0 without one.
        masked: True if the kernels read a mask of the keys that each query chose, or queries in pieces.
        library: True if FlashAttention-4 runs supported calls (`host.libraries`).
        causal: True if a query sees no key after its own; else torch runs it, over all keys of the sequence.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    groups: int
    width: int
    value_width: int
    itemsize: int
    window: int | None = None
    capped: bool = False
    relations: bool = False
    sinks: bool = False
    packed: bool = False
    latent: bool = False
    most_keys: int | None = None
    index_heads: int = 0
    masked: bool = False
    library: bool = False
    causal: bool = True

    @property
    def refusal(self) -> str | None:
        """Reason that FlashAttention-4 does not take this call; None if it does."""
        return flash4.refusal(
            self.width,
            self.value_width,
            self.itemsize,
            shared=self.heads > self.groups,
            whole=self.queries == self.keys > 1,
            packed=self.packed,
            relations=self.relations,
            masked=self.masked or self.most_keys is not None or not self.causal,
        )

    @property
    def in_library(self) -> bool:
        """True if FlashAttention-4 runs both passes."""
        return self.library and self.refusal is None

    @property
    def stored(self) -> StoredTiles | None:
        """Tiles that the backward stores: of wide heads and capped scores, which leave too few registers for sums over them.

        None if it computes weights twice: narrower heads, fp32, relations, queries in pieces, chosen keys, long and short sequences.
        """
        narrow = not (self.capped or max(self.width, self.value_width) > STORED_WIDTH)
        other = self.itemsize == SUMS_BYTES or self.queries != self.keys or self.relations or self.masked or self.most_keys is not None
        if narrow or other or self.in_library or not (self.accepted and self.batch and self.queries and self.groups):
            return None
        return stored_tiles(self.batch, self.queries, self.heads, self.groups, self.itemsize, self.window)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored tiles of all sequences and heads, of weights or of score gradients; 0 if none are stored."""
        return self.batch * self.heads * self.stored.slots * self.stored.side**2 * self.itemsize if self.stored else 0

    @property
    def accepted(self) -> bool:
        """True if the Triton kernels take these widths."""
        narrowest, widest = sorted((self.width, self.value_width))
        return self.causal and narrowest > 0 and widest <= largest_width(self.itemsize, bent=self.capped and self.relations)

    @property
    def is_wide(self) -> bool:
        """True if the gradients of keys and of values have a launch each."""
        return max(self.width, self.value_width) > KEY_WIDTH[self.itemsize]

    def visible(self, most_keys: int | None = None) -> int:
        """Pairs of a query of this rank and a key that it sees, of one head and all sequences; at most `most_keys` of a query."""
        window = min(most_keys or self.keys, self.window or self.keys)
        return self.batch * self.queries * pairs_before(self.keys, window) // self.keys

    def work(self) -> Work:
        """Ideal work of softmax(q kᵀ) v over the visible pairs only.

        Forward: q kᵀ and p v, 2·D + 2·Dv FLOPs per pair and head. Backward: dv, dp (Dv each), dq, dk (D each), and q kᵀ again, since the
        T × T scores are not kept. It has no parameters, and no weight gradient.

        Source: FlashAttention-2, arXiv:2307.08691, section 3.1.
        """
        seen = pairs_before(self.keys, min(self.most_keys or self.keys, self.window or self.keys)) if self.causal else self.keys**2
        pairs = seen * self.heads
        forward = ceil_div(2 * pairs * (self.width + self.value_width), self.keys)
        scores = ceil_div(2 * pairs * self.width, self.keys)
        query, out = self.heads * self.width, self.heads * self.value_width
        key_value = self.groups * (self.width + self.value_width)
        return Work(
            forward,
            2 * forward + scores,
            0,
            scores,
            moved_forward=(query + key_value + out) * self.itemsize + SUMS_BYTES * self.heads,
            moved_input=(2 * query + 2 * key_value + 2 * out) * self.itemsize + SUMS_BYTES * self.heads,
        )

    def products(self) -> int:
        """Widths of the backward's products of a pair.

        Stored scores and their gradients are computed once, also by the library. Else the query kernel makes the scores, their gradients
        and the gradient of q. A launch of the key kernel makes the scores; those of k and of relations make their gradients too.
        """
        if self.stored or self.in_library:
            return 3 * self.width + 2 * self.value_width
        found = 2 * self.width + self.value_width
        for part in key_parts(self.width, self.value_width, self.itemsize, relations=self.relations):
            found += self.width + (self.value_width + self.width) * part["KEYS"] + self.value_width * (part["VALUES"] + part["ADDED"])
        return found

    def kernels(self, work: Work, tokens: int) -> Passes | None:
        """A vendor's kernel forward; backward scores and their products, or a kernel for queries and one or two for keys and values.

        Stored weights are written and read once, stored score gradients written once and read twice. The library sets its fp32 sums to
        zero, adds to them and rounds them.

        With relations one more makes the gradients of scores for their sums, and one these sums for each relation.
        """
        if not self.accepted:
            return None
        pairs = work.forward * tokens // (self.width + self.value_width)  # twice the pairs
        moved = work.moved_input * tokens * (217 if self.is_wide else 152) // 100
        launches = 2 + self.is_wide + 2 * self.relations
        if self.stored:
            moved = (work.moved_input + work.moved_forward) * tokens + 5 * self.stored_bytes
            launches = 1 + 4 * ceil_div(self.batch, self.stored.sequences) * ceil_div(self.groups, self.stored.groups)
        if self.relations:
            moved += work.moved_forward * tokens + 4 * tokens * self.heads * SUMS_BYTES
        if self.in_library:
            moved, launches = work.moved_input * tokens + 3 * self.library_bytes, flash4.backward_launches(shared=self.heads > self.groups)
        forward = Pass(work.moved_forward * tokens, work.forward * tokens, 1)
        backward = Pass(moved, pairs * self.products(), launches)
        return forward._replace(kinds=self.kinds(forward, backward=False)), backward._replace(kinds=self.kinds(backward, backward=True))

    @property
    def library_bytes(self) -> int:
        """Bytes inside the library's backward."""
        return flash4.backward_bytes(self.batch, self.queries, self.heads, self.groups, self.width, self.value_width)

    def kinds(self, done: Pass, *, backward: bool) -> tuple[KindWork, ...]:
        """Kinds of the kernels of a pass: backward scores and products of stored ones, or for queries, and for keys and values."""
        if self.in_library:
            return (KindWork("flash4.backward" if backward else "flash4.forward", done.num_bytes, done.flops, done.launches),)
        prefix = "wide_attention" if self.is_wide else "latent_attention" if self.latent else "attention"
        if not backward:
            return (KindWork(f"{prefix}.forward", done.num_bytes, done.flops, done.launches),)
        width, value = self.width, self.value_width
        if self.stored:
            moved, flops = (done.num_bytes - self.stored_bytes) // 2, done.flops * (width + value) // (3 * width + 2 * value)
            launches = done.launches
            score = KindWork(f"{prefix}.score", moved, flops, launches // 4 + 1)
            return score, KindWork(f"{prefix}.product", done.num_bytes - moved, done.flops - flops, launches - launches // 4 - 1)
        query, half = done.flops * (2 * width + value) // (4 * width + 3 * value), done.num_bytes // 2
        key = KindWork(f"{prefix}.key", done.num_bytes - half, done.flops - query, done.launches - 1)
        return KindWork(f"{prefix}.query", half, query, 1), key

    @property
    def plain_rows(self) -> int:
        """Queries of a block of plain torch."""
        return min(PLAIN_QUERIES, max(1, PLAIN_SCORES // (self.batch * max(self.heads, self.index_heads) * self.keys)))

    def loop(self) -> PlainLoop:
        """The loop of plain torch."""
        ranks = self.keys // self.queries
        tiles, windowed = query_tiles(self.keys, self.window, self.plain_rows), self.window is not None
        return PlainLoop(
            ceil_div(tiles.blocks, ranks),
            self.batch * tiles.pairs // ranks,
            self.batch * tiles.keys // ranks,
            self.batch > 1 and self.groups > 1,
            self.heads > self.groups,
            UPCAST if self.itemsize < SUMS_BYTES else 0,
            (2 + 4 * windowed + 4 * self.batch * self.packed) * tiles.pairs // ranks,
            3 + 3 * windowed + 2 * self.packed,
        )

    def plain(self, _work: Work, _tokens: int) -> Passes | None:
        """A loop over blocks of queries, each with the keys that any of them sees.

        A kernel of a block reads and writes scores of its queries and keys for all heads, or its keys of all heads; the rest moves rows of
        queries and keys once. Products count only with their FLOPs, not with the bytes that they read and write. torch copies operands
        whose batch dims do not have one stride. Forward: scores, their largest and their sum, weights, outputs; backward weights
        again, then gradients of values, scores, queries and keys. Keys' and values' gradients of a block are added to the sums over earlier
        blocks. None where torch's own kernel attends to all keys.
        """
        if not self.causal:
            return None
        loop, item = self.loop(), self.itemsize
        width, value, capped, added = self.width, self.value_width, self.capped, self.relations
        both, scores, copied = width + value, loop.pairs * self.heads, loop.copies_keys or loop.shares
        queries, keys = self.batch * self.queries * self.heads, loop.keys * self.groups
        rows, scaled = self.batch * self.keys * self.groups, loop.upcast + NUMBER

        moved = scores * (32 + 24 * capped + 8 * added) + loop.hides_bytes
        moved += queries * (width * (scaled + NUMBER * copied) + value * (NUMBER + SUMS_BYTES + item) + 44) + rows * both * loop.upcast
        moved += keys * both * NUMBER * loop.copies_keys
        launches = loop.blocks * (loop.hides_launches + 12 + 3 * capped + added + copied + 2 * loop.copies_keys)
        forward = Pass(moved, 2 * scores * both, launches + (4 if loop.upcast else 1), is_fp32=True)

        moved = scores * (44 + 60 * capped + 12 * added) + loop.hides_bytes
        moved += queries * (width * (scaled + NUMBER + SUMS_BYTES + item) + value * (2 * loop.upcast + 16) + NUMBER)
        moved += queries * (2 * both + width * capped) * NUMBER * copied + rows * both * (2 * loop.upcast + SUMS_BYTES)
        moved += keys * (12 * both + NUMBER * ((2 + capped) * width + value) * loop.copies_keys)
        of_block = loop.hides_launches + 14 + 8 * capped + 3 * added + (4 + capped) * copied + (3 + capped) * loop.copies_keys
        flops = 2 * scores * (3 * width + 2 * value + width * capped)
        return forward, Pass(moved, flops, loop.blocks * of_block + (12 if loop.upcast else 5), is_fp32=True)

    def inside(self, sink_bytes: int = 0, copies: tuple[int, int] = (0, 0)) -> KernelScratch:
        """Bytes that the kernels hold: δ, one number per query and head, stored scores, and with relations a number per key and head.

        With sinks one number per query and head forward, and two backward, where their gradient is made last. The library holds nothing
        forward, and more backward.

        Args:
            sink_bytes: Bytes of an element of the gradient of the sinks; 0 if there is none.
            copies: Bytes of copies of operands, forward and backward.
        """
        if self.in_library:
            return KernelScratch(copies[0], self.library_bytes + copies[1])
        sums = SUMS_BYTES * self.batch * self.heads * self.queries
        forward, backward = copies[0], sums + SUMS_BYTES * self.batch * self.heads * self.keys * self.relations + copies[1]
        backward += self.stored.num_bytes if self.stored else 0
        return (
            KernelScratch(max(forward, sums), max(backward - sink_bytes * self.heads, 2 * sums))
            if self.sinks
            else KernelScratch(forward, backward)
        )


def largest_width(itemsize: int, *, bent: bool) -> int:
    """Largest head of keys or values; `bent`: scores are capped and have relations."""
    return min(ATTENTION_LARGEST_WIDTH[itemsize], BENT_WIDTH) if bent else ATTENTION_LARGEST_WIDTH[itemsize]


def pairs_before(position: int, window: int | None) -> int:
    """(query, key) pairs of the queries before a position of one sequence and head: query i sees min(i + 1, window) keys.

    Source: counting; T(T+1)/2 without a window.
    """
    seen = position if window is None else min(window, position)
    return seen * (seen + 1) // 2 + (position - seen) * seen


def query_tiles(seq_length: int, window: int | None, rows: int) -> QueryTiles:
    """Blocks of `rows` queries, the last with the remainder: from the first key in the window of its first query to its last query.

    With one row they are the visible pairs.
    """
    count, seen = ceil_div(seq_length, rows), seq_length if window is None else min(window, seq_length)
    last = seq_length - (count - 1) * rows
    hidden = min(count, ceil_div(seen - 1, rows))  # blocks whose window begins before the sequence
    begins = rows * (hidden + count - 1) * (count - hidden) // 2 - (seen - 1) * (count - hidden)
    keys = rows * (count - 1) * count // 2 + seq_length - begins
    of_last = seq_length - max(0, seq_length - last - seen + 1)
    return QueryTiles(count, keys, rows * keys - (rows - last) * of_last)
