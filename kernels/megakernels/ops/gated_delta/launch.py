"""Launches of the delta rule's kernels over one part of the segments."""

import torch
from torch import Tensor

from megakernels.facts import SMALLEST_DOT
from megakernels.ops.gated_delta.facts import DELTA_COLUMNS, SUMMED, DeltaExtents
from megakernels.ops.gated_delta.inputs import GatedDeltaInputs
from megakernels.ops.gated_delta.kernel_gradients import delta_key_gradient_kernel, delta_value_gradient_kernel
from megakernels.ops.gated_delta.kernel_pairs import delta_pair_gradient_kernel
from megakernels.ops.gated_delta.kernel_row_pairs import delta_row_pair_gradient_kernel
from megakernels.ops.gated_delta.kernel_rows import delta_row_decay_gradient_kernel, delta_unit_gradient_kernel
from megakernels.ops.gated_delta.kernel_scores import delta_row_decay_kernel, delta_row_scores_kernel, delta_scores_kernel
from megakernels.ops.gated_delta.kernel_solve import delta_solve_kernel
from megakernels.ops.gated_delta.kernel_walk import delta_walk_gradient_kernel, delta_walk_kernel
from megakernels.ops.gated_delta.sizes import sizes_of

OPTIONS = {
    "scores": {"num_warps": 8},
    "row_decay": {"num_warps": 4},
    "row_scores": {"num_warps": 4},
    "solve": {"num_warps": 4},
    "walk": {"num_warps": 8, "num_stages": 2},
    "walk_gradient": {"num_warps": 4, "num_stages": 2},
    "value_gradient": {"num_warps": 4},
    "key_gradient": {"num_warps": 4},
    "pair_gradient": {"num_warps": 8},
    "row_pair_gradient": {"num_warps": 8},
    "row_decay_gradient": {"num_warps": 4},
    "unit_gradient": {"num_warps": 4},
}
"""Launch options of each kernel, for all shapes."""
Buffers = dict[str, Tensor]


def buffers_of(given: GatedDeltaInputs, sizes: DeltaExtents) -> Buffers:
    """The slots of one part, uninitialised."""
    like = given.q
    return {
        name: torch.empty(sizes.slots * count, dtype=torch.float32 if name in SUMMED else like.dtype, device=like.device)
        for name, count in sizes.elements.items()
    }


def part_of(wide: int, name: str) -> int:
    """Columns at once of a width."""
    return min(wide, DELTA_COLUMNS[name])


def prepare(given: GatedDeltaInputs, sizes: DeltaExtents, made: Buffers, first: int, count: int) -> None:
    """A part's decayed rows, scores, inverted systems, and their products with keys and values."""
    q, k, v, decay, beta, A_log, dt_bias, starts = given[:8]
    (batch, num_positions, num_groups, key_width), num_heads = q.shape, v.shape[2]
    Q, K, _ = sizes.sides.values()
    num_tiles, has_starts = count * sizes.tiles, starts is not None
    common = num_positions, num_heads, num_heads // num_groups, key_width, given.save_every, first, sizes.tiles
    numbers = key_width**-0.5, given.beta_limit
    strides = *q.stride()[:3], *k.stride()[:3], *decay.stride()[:3], *beta.stride()
    inputs, at_starts = (q, k, decay, beta, A_log, dt_bias), q if starts is None else starts
    if sizes_of(given).rows:
        plane, precise = sizes.slots * Q * K, sizes_of(given).planes > 1
        outputs = (made[name] for name in ("queries", "keys", "reads", "sums", "strengths", "carries"))
        delta_row_decay_kernel[(num_tiles, num_heads, batch)](
            *inputs, at_starts, *outputs, *common, plane,
            *strides,
            *numbers,
            Q=Q, K=K, W=part_of(K, "row_decay"), HAS_STARTS=has_starts, PRECISE=precise, **OPTIONS["row_decay"],
        )  # fmt: skip
        delta_row_scores_kernel[(num_tiles * (Q // SMALLEST_DOT), num_heads, batch)](
            q, k, at_starts, *(made[name] for name in ("sums", "strengths", "scores", "systems")), *common, num_tiles, plane,
            *strides[:6],
            numbers[0],
            Q=Q, K=K, HAS_STARTS=has_starts, PRECISE=precise, **OPTIONS["row_scores"],
        )  # fmt: skip
    else:
        outputs = (made[name] for name in ("queries", "keys", "reads", "scores", "systems", "strengths", "carries"))
        delta_scores_kernel[(num_tiles, num_heads, batch)](
            *inputs, at_starts, *outputs, *common,
            *strides,
            *numbers,
            Q=Q, K=K, W=part_of(K, "scores"), HAS_STARTS=has_starts, **OPTIONS["scores"],
        )  # fmt: skip
    delta_solve_kernel[(num_tiles, num_heads, batch)](
        *(made["systems"], made["inverses"], num_positions, num_heads, given.save_every, first, sizes.tiles),
        Q=Q,
        **OPTIONS["solve"],
    )


def walk(
    given: GatedDeltaInputs, sizes: DeltaExtents, made: Buffers, part: tuple[int, int],
    state: Tensor | None, states: Tensor,
    results: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Computes y and the last state, `results`, over all of the part's segments; without `results` the states before its tiles."""
    q, v = given.q, given.v
    batch, num_heads, value_width = q.shape[0], *v.shape[2:]
    y, last = (q, q) if results is None else results
    width = part_of(sizes.sides["V"], "walk")
    blocks = sizes.sides["V"] // width
    names = ("queries", "keys", "reads", "scores", "inverses", "strengths", "carries")
    outside = made.get("between", q), made.get("written", q)
    delta_walk_kernel[(batch, num_heads, blocks * (part[1] if results is None else 1))](
        v, *(made[name] for name in names), q if state is None else state, states, *outside, y, last, q.shape[1], num_heads, q.shape[3],
        value_width, given.save_every, sizes.segments, *part, sizes.tiles,
        *v.stride()[:3],
        **sizes.sides, W=width, HAS_INITIAL=state is not None, WALKS=results is not None, **OPTIONS["walk"],
    )  # fmt: skip


def walk_gradient(
    given: GatedDeltaInputs, sizes: DeltaExtents, made: Buffers, part: tuple[int, int],
    grad_y: Tensor, grad_state: Tensor | None, grad_first: Tensor,
) -> None:  # fmt: skip
    """The gradients of the states after a part's tiles, and of the state before the part."""
    q, v = given.q, given.v
    width = part_of(sizes.sides["V"], "walk")
    names = ("queries", "keys", "reads", "scores", "inverses", "carries")
    delta_walk_gradient_kernel[(q.shape[0], v.shape[2], sizes.sides["V"] // width)](
        grad_y, *(made[name] for name in names), q if grad_state is None else grad_state, made["grad_between"], made["solved"], grad_first,
        q.shape[1], v.shape[2], q.shape[3], v.shape[3], given.save_every, *part, sizes.tiles,
        *grad_y.stride()[:3],
        **sizes.sides, W=width, HAS_FINAL=grad_state is not None, **OPTIONS["walk_gradient"],
    )  # fmt: skip


def tile_gradients(
    given: GatedDeltaInputs,
    sizes: DeltaExtents,
    made: Buffers,
    part: tuple[int, int],
    grad_y: Tensor,
    gradients: tuple[Tensor, ...],
    shares: Tensor,
) -> None:
    """A part's gradients of q, k, v, decay and beta; and sums for A_log and dt_bias."""
    q, k, v = given.q, given.k, given.v
    (batch, num_positions, num_groups, key_width), num_heads = q.shape, v.shape[2]
    Q, K, V = sizes.sides.values()
    (first, count), tiles = part, sizes.tiles
    num_tiles = count * tiles
    grad_q, grad_k, grad_v = gradients[:3]
    columns = num_positions, num_heads, v.shape[3], given.save_every, first, tiles
    delta_value_gradient_kernel[(num_tiles, num_heads, batch)](
        grad_y, v, *(made[name] for name in ("strengths", "written", "solved", "systems", "scores", "unread")), grad_v, *columns,
        *grad_y.stride()[:3], *v.stride()[:3],
        Q=Q, V=V, W=part_of(V, "value"), **OPTIONS["value_gradient"],
    )  # fmt: skip
    length = part_of(K, "key_rows")
    names = ("between", "grad_between", "written", "solved", "queries", "keys", "reads", "carries")
    delta_key_gradient_kernel[(num_tiles * (K // length), num_heads, batch)](
        grad_y, *(made[name] for name in names), *columns, num_tiles,
        *grad_y.stride()[:3],
        **sizes.sides, L=length, W=part_of(V, "key"), **OPTIONS["key_gradient"],
    )  # fmt: skip
    (_row_gradients if sizes_of(given).rows else _pair_gradients)(given, sizes, made, part, gradients, shares)
    delta_unit_gradient_kernel[(num_tiles * (Q // SMALLEST_DOT), num_groups, batch)](
        q, k, made["queries"], made["reads" if sizes_of(given).rows else "keys"], grad_q, grad_k, num_positions, num_heads,
        num_heads // num_groups, key_width, given.save_every, first, tiles, num_tiles,
        *q.stride()[:3], *k.stride()[:3],
        key_width**-0.5,
        Q=Q, K=K, **OPTIONS["unit_gradient"],
    )  # fmt: skip


def _pair_gradients(
    given: GatedDeltaInputs, sizes: DeltaExtents, made: Buffers, part: tuple[int, int], gradients: tuple[Tensor, ...], shares: Tensor
) -> None:
    """One decay a head."""
    q, k, v, decay, beta, A_log, dt_bias, starts = given[:8]
    (batch, num_positions, num_groups, key_width), num_heads = q.shape, v.shape[2]
    Q, K, _ = sizes.sides.values()
    names = ("queries", "keys", "reads", "scores", "systems", "unread", "carries")
    delta_pair_gradient_kernel[(part[1] * sizes.tiles, num_heads, batch)](
        q, k, decay, beta, A_log, dt_bias, q if starts is None else starts, *(made[name] for name in names), *gradients[3:], shares,
        num_positions, num_heads, num_heads // num_groups, key_width, given.save_every, part[0], sizes.tiles, sizes.segments * sizes.tiles,
        *q.stride()[:3], *k.stride()[:3], *decay.stride(), *beta.stride(),
        key_width**-0.5, given.beta_limit,
        Q=Q, K=K, W=part_of(K, "pair"), HAS_STARTS=starts is not None, **OPTIONS["pair_gradient"],
    )  # fmt: skip


def _row_gradients(
    given: GatedDeltaInputs, sizes: DeltaExtents, made: Buffers, part: tuple[int, int], gradients: tuple[Tensor, ...], shares: Tensor
) -> None:
    """One decay a row of the state."""
    q, k, v, decay, _, A_log, dt_bias, starts = given[:8]
    (batch, num_positions, num_groups, key_width), num_heads = q.shape, v.shape[2]
    Q, K, _ = sizes.sides.values()
    (first, count), tiles = part, sizes.tiles
    names = ("sums", "strengths", "queries", "keys", "reads", "scores", "systems", "unread", "falls")
    delta_row_pair_gradient_kernel[(count * tiles * (Q // SMALLEST_DOT), num_heads, batch)](
        q, k, q if starts is None else starts, *(made[name] for name in names), gradients[4], num_positions, num_heads,
        num_heads // num_groups, key_width, given.save_every, first, tiles, count * tiles, sizes.slots * Q * K,
        *q.stride()[:3], *k.stride()[:3],
        key_width**-0.5, given.beta_limit,
        Q=Q, K=K, HAS_STARTS=starts is not None, PRECISE=sizes_of(given).planes > 1, **OPTIONS["row_pair_gradient"],
    )  # fmt: skip
    delta_row_decay_gradient_kernel[(count * tiles, num_heads, batch)](
        decay, A_log, dt_bias, made["falls"], made["keys"], made["carries"], gradients[3], shares, num_positions, num_heads, key_width,
        given.save_every, first, tiles, sizes.segments * tiles, sizes.slots * Q * K,
        *decay.stride()[:3],
        Q=Q, K=K, W=part_of(K, "row_decay_gradient"), PRECISE=sizes_of(given).planes > 1, **OPTIONS["row_decay_gradient"],
    )  # fmt: skip
