"""Operations over positions that continue where the last call of a block ended, for a text that grows token by token.

A block that is given a `Continued` in its `ContextParallel` keeps what later positions need: keys and values, the last inputs of
convolutions, states of scans and recurrences. The operations are those of the pieces of a context group, with one piece. There is no
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megakernels import accumulator_dtype, attention_pieces, conv_pieces, gated_conv_pieces, mamba3_ahead, mamba3_piece

if TYPE_CHECKING:
    from megakernels.ops.mamba3.piece import Mamba3Settings

NUM_TOKENS = 8
"""Inputs of Mamba-3's scan with positions: x, z, B, C, dt, A, trapezoid and angles."""
DT, TRAPEZOID, DT_BIAS = 4, 6, 11


class Continued:
    """Earlier positions of one block; its operations are known by the order of their calls in a forward."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._calls = 0

    def begin(self) -> None:
        """Begin a forward of the block over the next positions."""
        self._calls = 0

    def _call(self) -> int:
        self._calls += 1
        if len(self._kept) < self._calls:
            self._kept.append(None)
        return self._calls - 1

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None, cap: float | None
    ) -> Tensor:
        """Attention of the first positions of a text, or of one further position [B, 1, H, D], to all so far."""
        call = self._call()
        earlier = self._kept[call]
        if earlier is None:
            self._kept[call] = [_within(each, window) for each in (k, v)]
            return attention_pieces(q, k, v, None, scale, window, [0], [0], sinks, cap=cap)[0]
        if q.shape[1] != 1:
            raise ValueError(f"a text is continued by one position at a time; got {q.shape[1]}")
        keys, values = self._kept[call] = [_within(torch.cat(pair, 1), window) for pair in zip(earlier, (k, v), strict=True)]
        places = list(range(keys.shape[1]))
        return attention_pieces(q, keys, values, None, scale, window, places[-1:], places, sinks, cap=cap)[0]

    def _before(self, call: int, x: Tensor, num_before: int) -> Tensor:
        """The last inputs of a convolution before x [B, T, C], [B, 1, num_before, C]; the next call's inputs are kept."""
        kept = self._kept[call]
        before: Tensor = x.new_zeros((x.shape[0], num_before, x.shape[2])) if kept is None else kept
        joined = torch.cat([before, x], 1)
        self._kept[call] = joined[:, joined.shape[1] - num_before :]
        return before.unsqueeze(1)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(causal convolution) of the next positions, [B, T, C] in and out."""
        return conv_pieces(x, self._before(self._call(), x, weight.shape[1] - 1), weight, bias, True, None)

    def convolve_gated(self, input_gate: Tensor, output_gate: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """output_gate · causal convolution(input_gate · value) of the next positions."""
        before = self._before(self._call(), input_gate * value, weight.shape[1] - 1)
        return gated_conv_pieces(input_gate, output_gate, value, before, weight, bias, None)

    def scan(self, given: Any, every: int, setting: Any, inputs: Sequence[Tensor]) -> Tensor:
        """A scan of the next positions.

        Args:
            given: The scan, a `RelayedScan` (`megarun.parallel.groups.relay_scans`).
            every: Positions that have one saved state.
            setting: Argument of the piece.
            inputs: Inputs of the scan.
        """
        call, like, wide = self._call(), inputs[given.output], accumulator_dtype(inputs[0].dtype)
        shape = given.state(inputs)
        num_states = -(-like.shape[1] // every) + given.saves_last
        states = inputs[0].new_empty((like.shape[0], num_states, *shape), dtype=wide if given.accumulates else None)
        y = inputs[0].new_empty(like.shape)
        state = like.new_zeros((like.shape[0], *shape), dtype=wide) if self._kept[call] is None else self._kept[call]
        self._kept[call] = given.piece(state, list(inputs), None, setting, y, states)
        return y

    def trapezoidal_scan(self, settings: Mamba3Settings, inputs: Sequence[Tensor | None]) -> Tensor:
        """Mamba-3's scan of the next positions.

        A position's weight in the state depends on the next position, so the last one is scanned again when the next exists.

        Args:
            settings: Settings of the scan.
            inputs: Inputs of `mamba3_piece`.
        """
        call, tokens, weights = self._call(), list(inputs[:NUM_TOKENS]), list(inputs[NUM_TOKENS:])
        kept = self._kept[call]
        x, keys, angles = tokens[0], tokens[2], tokens[NUM_TOKENS - 1]
        if x is None or keys is None:
            raise ValueError("a scan has x and B")
        width = x.shape[3] * keys.shape[-1] + (0 if angles is None else angles.shape[2])
        zeros = x.new_zeros((*x.shape[:1], x.shape[2], width), dtype=accumulator_dtype(x.dtype))
        carried, waiting = (zeros, [None] * NUM_TOKENS) if kept is None else kept
        joined = [each if each is None or old is None else torch.cat([old, each], 1) for old, each in zip(waiting, tokens, strict=True)]
        last = [None if each is None else each[:, each.shape[1] - 1 :] for each in joined]
        body = [None if each is None else each[:, : each.shape[1] - 1] for each in joined]
        made = []
        if body[0] is not None and body[0].shape[1]:
            firsts = [each[:, 0] for each in (last[DT], last[TRAPEZOID]) if each is not None]
            ahead = mamba3_ahead(firsts[0], firsts[1], inputs[DT_BIAS], None)  # type: ignore[arg-type]
            y, carried = _piece(carried, [*body, *weights], ahead, settings)
            made.append(y)
        none = x.new_zeros((x.shape[0], x.shape[2]), dtype=carried.dtype)
        made.append(_piece(carried, [*last, *weights], none, settings)[0])
        self._kept[call] = carried, last
        whole = torch.cat(made, 1)
        return whole[:, whole.shape[1] - x.shape[1] :]


def _within(tensor: Tensor, window: int | None) -> Tensor:
    """The last positions, as many as a window has."""
    return tensor if window is None else tensor[:, max(0, tensor.shape[1] - window) :]


def _piece(carried: Tensor, inputs: Sequence[Tensor | None], ahead: Tensor, settings: Mamba3Settings) -> tuple[Tensor, Tensor]:
    """Output of a piece, and the state and phase after it."""
    x, keys, angles = inputs[0], inputs[2], inputs[NUM_TOKENS - 1]
    if x is None or keys is None:
        raise ValueError("a scan has x and B")
    rows = x.shape[0], -(-x.shape[1] // settings.save_every), x.shape[2]
    states = x.new_empty((*rows, x.shape[3], keys.shape[-1]))
    phases = x.new_empty((*rows, 0 if angles is None else angles.shape[2]), dtype=carried.dtype)
    y = torch.empty_like(x)
    return y, mamba3_piece(
        carried, [None if each is None else each.contiguous() for each in inputs], None, ahead, settings, y, states, phases
    )
