"""Triton kernels of side embeddings: the gated addition with its sum, and hashed rows of n-grams.

Sums over all elements are taken in two steps without atomics: a fixed number of programs, each over its tiles in order, then one program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megakernels._common.tiles import narrow, on_device_of, tanh
from megakernels.facts import block_of
from megakernels.ops.side_embedding.facts import ADD_TILE, HASH_TILE, NUM_SUMS
from megakernels.ops.side_embedding.reference import MODULUS, SPREAD

PRIME = tl.constexpr(MODULUS)
GOLDEN_HIGH, GOLDEN_LOW = tl.constexpr(SPREAD >> 32), tl.constexpr(SPREAD & 0xFFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def gated_add_kernel(x, side, gates, y, size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of x + gates[1] · tanh(gates[0]) · side."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = place < size
    factor = tl.load(gates + 1).to(tl.float32) * tanh(tl.load(gates).to(tl.float32))
    added = factor * tl.load(side + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + place, narrow(tl.load(x + place, mask=mask, other=0.0).to(tl.float32) + added, y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def gated_add_backward_kernel(  # type: ignore[no-untyped-def]
    grad_y, side, gates, grad_x, grad_side, sums, size, tiles_each,
    TILE: tl.constexpr, NEEDS_X: tl.constexpr, NEEDS_SIDE: tl.constexpr, NEEDS_GATES: tl.constexpr,
):  # fmt: skip
    """Tiles of the gradients of x and side, and this program's sum of grad_y · side."""
    factor = tl.load(gates + 1).to(tl.float32) * tanh(tl.load(gates).to(tl.float32))
    start = tl.program_id(0).to(tl.int64) * tiles_each * TILE
    total = tl.zeros([TILE], tl.float32)
    for tile in range(tiles_each):
        place = start + tile * TILE + tl.arange(0, TILE)
        mask = place < size
        grad = tl.load(grad_y + place, mask=mask, other=0.0).to(tl.float32)
        if NEEDS_X:
            tl.store(grad_x + place, narrow(grad, grad_x.dtype.element_ty), mask=mask)
        if NEEDS_SIDE:
            tl.store(grad_side + place, narrow(grad * factor, grad_side.dtype.element_ty), mask=mask)
        if NEEDS_GATES:
            total += grad * tl.load(side + place, mask=mask, other=0.0).to(tl.float32)
    if NEEDS_GATES:
        tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def gate_gradients_kernel(sums, gates, grad_gates, num_sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradients of both gates from the programs' sums."""
    place = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(sums + place, mask=place < num_sums, other=0.0).to(tl.float32), 0)
    gate = tanh(tl.load(gates).to(tl.float32))
    scale = tl.load(gates + 1).to(tl.float32)
    tl.store(grad_gates, narrow(total * scale * (1.0 - gate * gate), grad_gates.dtype.element_ty))
    tl.store(grad_gates + 1, narrow(total * gate, grad_gates.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def ngram_rows_kernel(  # type: ignore[no-untyped-def]
    words, words_before, rows, num_words, length, num_tables, num_rows, LEAD: tl.constexpr, TABLES: tl.constexpr, TILE: tl.constexpr
):
    """The rows of all tables for a tile of tokens; `words` [B · t], `words_before` [B, LEAD, t]."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < num_words
    table = tl.arange(0, TABLES)
    golden = (tl.full([TABLES], GOLDEN_HIGH, tl.uint64) << 32) + tl.full([TABLES], GOLDEN_LOW, tl.uint64)
    spread = (table.to(tl.uint64) + 1) * golden
    multiplier = 1 + (spread >> 33).to(tl.int64) % (PRIME - 1)
    order = 2 + table % LEAD
    found = tl.zeros([TILE, TABLES], tl.int64)
    for step in tl.static_range(LEAD + 1):
        lag = LEAD - step
        if lag > 0:
            word = tl.load(words_before + (at // length * LEAD + lag - 1) * length + at % length, mask=inside, other=0)
        else:
            word = tl.load(words + at, mask=inside, other=0)
        hashed = (found * multiplier[None, :] + word[:, None] + 1) % PRIME
        found = tl.where((order > lag)[None, :], hashed, found)
    table = table.to(tl.int64)
    whole, rest = num_rows // num_tables, num_rows % num_tables
    size = tl.where(table < num_tables, whole + tl.where(table < rest, 1, 0), 1)
    first = table * whole + tl.minimum(table, rest)
    mask = inside[:, None] & (table < num_tables)[None, :]
    tl.store(rows + at[:, None] * num_tables + table[None, :], found % size[None, :] + first[None, :], mask=mask)


def gated_add_forward(x: Tensor, side: Tensor, gates: Tensor) -> Tensor:
    """Follows the contract of the reference's, for fp32, bf16 and fp16."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        with on_device_of(x):
            gated_add_kernel[(triton.cdiv(x.numel(), ADD_TILE),)](
                x.contiguous(), side.contiguous(), gates.contiguous(), y, x.numel(), TILE=ADD_TILE, num_warps=4
            )
    return y


def gated_add_backward(grad_y: Tensor, side: Tensor, gates: Tensor, needs: list[bool]) -> tuple[Tensor | None, ...]:
    """Follows the contract of the reference's: the gradients of x, side and gates."""
    size, gates = grad_y.numel(), gates.contiguous()
    if not size:
        return tuple(torch.zeros_like(like) if need else None for like, need in zip((grad_y, side, gates), needs, strict=True))
    grad_rows = grad_y.contiguous()
    grad_x, grad_side, grad_gates = (
        torch.empty(like.shape, dtype=like.dtype, device=like.device) if need else None
        for like, need in zip((grad_y, side, gates), needs, strict=True)
    )
    tiles = triton.cdiv(size, ADD_TILE)
    tiles_each = triton.cdiv(tiles, NUM_SUMS)
    num_sums = triton.cdiv(tiles, tiles_each)
    sums = torch.empty(num_sums, dtype=torch.float32, device=grad_y.device)
    with on_device_of(grad_y):
        gated_add_backward_kernel[(num_sums,)](
            grad_rows, side.contiguous(), gates, grad_rows if grad_x is None else grad_x, grad_rows if grad_side is None else grad_side,
            sums, size, tiles_each,
            TILE=ADD_TILE, NEEDS_X=needs[0], NEEDS_SIDE=needs[1], NEEDS_GATES=needs[2], num_warps=4,
        )  # fmt: skip
        if grad_gates is not None:
            gate_gradients_kernel[(1,)](sums, gates, grad_gates, num_sums, BLOCK=block_of(num_sums), num_warps=4)
    return grad_x, grad_side, grad_gates


def ngram_rows(tokens: Tensor, before: Tensor, num_tables: int, num_rows: int) -> Tensor:
    """Follows the contract of the reference function."""
    rows = torch.empty((*tokens.shape, num_tables), dtype=torch.int64, device=tokens.device)
    options = hash_options(num_tables)
    if tokens.numel():
        with on_device_of(tokens):
            ngram_rows_kernel[(triton.cdiv(tokens.numel(), options["TILE"]),)](
                tokens.contiguous(), before.contiguous(), rows, tokens.numel(), tokens.shape[1], num_tables, num_rows,
                LEAD=before.shape[1], **options,
            )  # fmt: skip
    return rows


def hash_options(num_tables: int) -> dict[str, int]:
    """Tile and warps: eight hashes in each thread."""
    tables = block_of(num_tables)
    return {"TABLES": tables, "TILE": max(1, HASH_TILE // tables), "num_warps": 4}
