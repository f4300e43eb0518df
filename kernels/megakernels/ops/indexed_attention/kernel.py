"""Triton kernels of attention to indexed keys: the indexer, attention masked by its choice, and the indexer's gradients.

Queries are done a chunk at a time, of one piece each, whose index scores [B, rows, keys] are held in fp32:

- forward: scores, then each query's threshold, the log-sum-exp of chosen scores and a bit per chosen key; attention reads the bits.
- backward: scores again, by the same kernel, and bits from the saved thresholds; the attention of all heads per key, the gradient of the
  scores, and from it those of the index keys, queries and weights; then attention's backward.

Attention to keys that are not chosen is computed and masked. No program adds to another's result, and chunks are added in order, so results
are bitwise reproducible.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from megakernels._common.tiles import on_device_of, unit_stride
from megakernels.ops.attention.choice import kernel_backward, kernel_forward
from megakernels.ops.attention.inputs import Places
from megakernels.ops.attention.sinks import add_sinks
from megakernels.ops.indexed_attention.bits import choice_like
from megakernels.ops.indexed_attention.facts import (
    KEY_WARPS,
    chunk_rows,
    difference_constants,
    index_constants,
    key_programs,
    mass_constants,
    num_columns,
    num_words,
    rows_constants,
    select_constants,
)
from megakernels.ops.indexed_attention.kernel_gradients import (
    index_difference_kernel,
    index_key_kernel,
    index_mass_kernel,
    index_query_kernel,
)
from megakernels.ops.indexed_attention.kernel_index import (
    index_keys_backward_kernel,
    index_keys_kernel,
    index_score_kernel,
    index_select_kernel,
    index_turn_kernel,
)
from megakernels.ops.indexed_attention.reference import Indexed, made_like
from megakernels.ops.indexed_attention.sizes import QueryChunk, attended, chunks


def make_keys(index_k: Tensor, k_scale: Tensor, k_bias: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Follows the contract of `reference.make_keys`."""
    x, (cos, sin, *angles) = index_k.contiguous(), _table(cos, sin)
    keys = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    num_rows, numbers = x.shape[0] * x.shape[1], rows_constants(x.shape[2])
    if num_rows:
        with on_device_of(x):
            operands = x, k_scale.contiguous(), k_bias.contiguous(), cos, sin, keys
            index_keys_kernel[(triton.cdiv(num_rows, numbers["R"]),)](*operands, num_rows, x.shape[1], *angles, eps, **numbers)
    return keys


def make_keys_backward(
    grad_keys: Tensor, index_k: Tensor, k_scale: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Follows the contract of `reference.make_keys_backward`."""
    x, (cos, sin, *angles) = index_k.contiguous(), _table(cos, sin)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, numbers = x.shape[0] * x.shape[1], rows_constants(x.shape[2])
    programs = key_programs(num_rows)
    parts = torch.empty(2, programs, x.shape[2], dtype=torch.float32, device=x.device)
    if num_rows:
        with on_device_of(x):
            operands = grad_keys.contiguous(), x, k_scale.contiguous(), cos, sin, grad_x, parts
            index_keys_backward_kernel[(programs,)](*operands, num_rows, x.shape[1], *angles, eps, **numbers, num_warps=KEY_WARPS)
    return grad_x, parts[0].sum(0).to(k_scale.dtype), parts[1].sum(0).to(k_scale.dtype)


def forward(given: Indexed, places: Places) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Follows the contract of `reference.forward`, for fp32, bf16 and fp16, of queries in pieces; and the choice, int32 [B, T, words]."""
    if not given.q.numel():
        return *made_like(given.q, given.v), choice_like(given.q, given.k.shape[1])
    index = _IndexLaunch(_dense(given), places)
    thresholds, index_lse = (torch.empty(given.q.shape[:2], dtype=torch.float32, device=given.q.device) for _ in range(2))
    bits, scores = index.new_bits(), index.new_scores()
    queries = index.turn(index.given.index_q, torch.float32)
    with on_device_of(given.q):
        for chunk in index.chunks:
            index.score(chunk, queries, scores)
            index.select(chunk, scores, thresholds, index_lse, bits, search=True)
    del queries, scores
    out, lse = add_sinks(*kernel_forward(attended(index.given), places, bits), given.sinks)
    return out, lse, thresholds, index_lse, bits


def backward(
    grad_out: Tensor, given: Indexed, out: Tensor, lse: Tensor, thresholds: Tensor, index_lse: Tensor, places: Places
) -> tuple[Any, ...]:
    """Follows the contract of `reference.backward`, for queries in pieces: of k, v, keys and sinks the part that these queries make."""
    lse, thresholds, index_lse = lse.contiguous(), thresholds.contiguous(), index_lse.contiguous()
    index = _IndexLaunch(_dense(given), places)
    given = index.given
    own = given.index_q, given.index_weights
    grad_index_q, grad_weights = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in own)
    grad_keys = torch.zeros(given.keys.shape, dtype=torch.float32, device=given.keys.device)
    if not given.q.numel():
        empty = (torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in (given.q, given.k, given.v))
        return *empty, grad_index_q.zero_(), grad_keys, grad_weights.zero_(), None if given.sinks is None else torch.zeros_like(given.sinks)
    bits, scores, masses = index.new_bits(), index.new_scores(), index.new_scores()
    queries = index.turn(given.index_q, torch.float32)
    with on_device_of(given.q):
        for chunk in index.chunks:
            index.score(chunk, queries, scores)
            index.select(chunk, scores, thresholds, index_lse, bits, search=False)
            index.difference(chunk, scores, masses, lse, index_lse, bits)
            index.gradients(chunk, queries, masses, grad_weights, grad_keys)
    del scores, masses
    index.turn(queries, given.index_q.dtype, grad_index_q, back=True)
    del queries
    *of_heads, grad_sinks, _ = kernel_backward(grad_out, attended(given), out, lse, places, bits=bits)
    return *of_heads, grad_index_q, grad_keys, grad_weights, grad_sinks


def _dense(given: Indexed) -> Indexed:
    """The arguments with operands as the kernels read them."""
    q, k, v = (unit_stride(each) for each in (given.q, given.k, given.v))
    starts = None if given.starts is None else given.starts.contiguous()
    index_q, keys, weights = given.index_q.contiguous(), given.keys.contiguous(), given.index_weights.contiguous()
    return given._replace(q=q, k=k, v=v, index_q=index_q, keys=keys, index_weights=weights, starts=starts)


def _table(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int, int]:
    """Cos and sin, how many columns they rotate against as many others, and their strides."""
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    along, across = cos.stride()
    return cos, sin, cos.shape[1], along, across


class _IndexLaunch:
    """Launches of the index kernels for the queries of one call."""

    def __init__(self, given: Indexed, places: Places) -> None:
        self.given, self.places = given, places
        self.batch, self.num_queries, self.num_heads, self.width = given.index_q.shape
        self.num_keys = given.k.shape[1]
        self.num_columns = num_columns(self.num_keys)
        self.chunks = tuple(chunks(self.batch, self.num_queries, self.num_keys, places))
        self.starts = given.q if given.starts is None else given.starts
        self.window = given.window or 0
        self.factor = (self.num_heads * self.width) ** -0.5
        self.flags = {"HAS_WINDOW": given.window is not None, "HAS_STARTS": given.starts is not None}
        self.order = {"ZIG_ZAG": places.num_ranks > 1}
        self.keys_order = self.num_keys // (2 * places.num_ranks), places.num_ranks
        self.dtype: Any = {torch.bfloat16: triton.language.bfloat16, torch.float16: triton.language.float16}.get(
            given.index_q.dtype, triton.language.float32
        )

    def new_bits(self) -> Tensor:
        """No keys chosen, int32 [B, T, words]."""
        return torch.zeros(self.batch, self.num_queries, num_words(self.num_keys), dtype=torch.int32, device=self.given.q.device)

    def new_scores(self) -> Tensor:
        """A number per query of a chunk and key, uninitialised."""
        rows = chunk_rows(self.batch, self.num_queries // len(self.places.firsts), self.num_keys) if self.num_queries else 0
        return torch.empty(self.batch * rows * self.num_columns, dtype=torch.float32, device=self.given.q.device)

    def turn(self, x: Tensor, dtype: torch.dtype, turned: Tensor | None = None, *, back: bool = False) -> Tensor:
        """Index queries rotated by the angles of their positions, or back."""
        turned = torch.empty(x.shape, dtype=dtype, device=x.device) if turned is None else turned
        num_rows, numbers = self.batch * self.num_queries * self.num_heads, rows_constants(self.width)
        cos, sin, *angles = _table(self.given.cos, self.given.sin)
        with on_device_of(x):
            sizes = num_rows, self.num_queries, self.num_heads, *angles
            index_turn_kernel[(triton.cdiv(num_rows, numbers["R"]),)](x, cos, sin, turned, *sizes, **numbers, BACK=back)
        return turned

    def score(self, chunk: QueryChunk, queries: Tensor, scores: Tensor) -> None:
        """Scores of a chunk."""
        numbers, options = index_constants("score", self.width, self.given.index_q.element_size())
        index_score_kernel[self._tiles(chunk, numbers)](
            queries, self.given.keys, self.given.index_weights, self.starts, scores, self.num_queries, self.num_keys, *chunk,
            self.num_columns, self.num_heads, *self.keys_order, self.window, self.factor,
            **numbers, **self.flags, **self.order, **options,
        )  # fmt: skip

    def select(self, chunk: QueryChunk, scores: Tensor, thresholds: Tensor, index_lse: Tensor, bits: Tensor, *, search: bool) -> None:
        """Bits of a chunk, and with `search` its thresholds and log-sum-exps."""
        numbers, options = select_constants(self.num_keys)
        grid = triton.cdiv(chunk.num_rows, numbers["R"]), self.batch
        words = self.num_columns, bits.shape[2]
        index_select_kernel[grid](
            scores, self.starts, thresholds, index_lse, bits, self.num_queries, *chunk, *words, self.window, self.given.top_k,
            SEARCH=search, **numbers, **self.flags, **options,
        )  # fmt: skip

    def difference(self, chunk: QueryChunk, scores: Tensor, masses: Tensor, lse: Tensor, index_lse: Tensor, bits: Tensor) -> None:
        """Gradients of the scores of a chunk, in `masses`."""
        given = self.given
        numbers, options = mass_constants(given.q.shape[3], given.q.element_size())
        index_mass_kernel[self._tiles(chunk, numbers)](
            given.q, given.k, self.starts, lse, masses, self.num_queries, self.num_keys, *chunk, self.num_columns, given.q.shape[2],
            *self.keys_order, self.window, given.scale,
            *given.q.stride()[:3], *given.k.stride()[:3],
            **numbers, **self.flags, **self.order, **options,
        )  # fmt: skip
        index_difference_kernel[(chunk.num_rows, self.batch)](
            scores, masses, self.starts, index_lse, bits, self.num_queries, *chunk, self.num_columns, bits.shape[2], self.window,
            given.loss_factor,
            **difference_constants(self.num_keys), **self.flags,
        )  # fmt: skip

    def gradients(self, chunk: QueryChunk, queries: Tensor, differences: Tensor, grad_weights: Tensor, grad_keys: Tensor) -> None:
        """Adds to the gradient of the keys, then writes that of the weights, and that of the rotated queries over them."""
        given = self.given
        for name, function, grad in (("key", index_key_kernel, grad_keys), ("query", index_query_kernel, grad_weights)):
            numbers, options = index_constants(name, self.width, given.index_q.element_size())
            tiles = triton.cdiv(chunk.num_rows, numbers["M"])
            last = triton.cdiv(chunk.first + chunk.num_rows, numbers["N"])
            function[(last, self.batch) if name == "key" else (self.num_heads, tiles, self.batch)](
                queries,
                given.keys,
                given.index_weights,
                self.starts,
                differences,
                grad,
                self.num_queries,
                self.num_keys,
                *chunk,
                self.num_columns,
                *((self.num_heads,) if name == "key" else ()),
                *self.keys_order,
                self.window,
                self.factor,
                DTYPE=self.dtype,
                **numbers,
                **self.flags,
                **self.order,
                **options,
            )

    def _tiles(self, chunk: QueryChunk, numbers: dict[str, int]) -> tuple[int, int, int]:
        """Tiles of the keys that the last query sees, of queries, and sequences."""
        seen = triton.cdiv(chunk.first + chunk.num_rows, numbers["N"])
        return seen, triton.cdiv(chunk.num_rows, numbers["M"]), self.batch
