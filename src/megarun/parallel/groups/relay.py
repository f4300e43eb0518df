"""State of convolutions and recurrences across the ranks of a CP group (R-33).

Rank i of cp has the pieces i and 2 · cp − 1 − i of every sequence (`megarun.parallel.groups.context`). The state of an M or R block is
passed from piece to piece: up the ranks through their first pieces, on the last rank from its first to its second piece, and down the
ranks through the second pieces. Backward runs in reverse.

- A convolution needs the K − 1 inputs before each piece. They exist before it starts, so all ranks exchange them simultaneously.
- A recurrence needs the final state of the previous piece. So that ranks do not wait for complete pieces, its independent heads are split
  into lanes, and a rank sends each lane's state as soon as it is computed: while the next rank computes lane 0, this one computes lane 1.

States are sent in the accumulation dtype, fp32, as within a piece.

The scans are in `megarun.parallel.groups.relay_scans` and `megarun.parallel.groups.relay_mamba3`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megakernels import accumulator_dtype, causal_conv1d, conv_pieces, conv_pieces_backward
from megarun.parallel.groups.context import ContextParallel

FORWARD, BACKWARD = (0, 1), (1, 0)
"""Order in which a rank processes its two pieces."""


def convolve(cp: ContextParallel, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None) -> Tensor:
    """silu(causal convolution) of local tokens, [B, T / cp, C] in and out."""
    if cp.continued is not None:
        return cp.continued.convolve(x, weight, bias)
    if cp.degree == 1:
        return causal_conv1d(x, weight, bias, True, starts)
    y: Tensor = _Convolution.apply(cp, x, weight, bias, starts)  # type: ignore[no-untyped-call]
    return y


def relay_state(cp: ContextParallel, places: Sequence[int], first: Sequence[Tensor], step: Callable[[int, int, Tensor], Tensor]) -> None:
    """Compute this rank's two pieces lane by lane: receive each lane's state from the previous rank, send the new one to the next.

    Args:
        cp: CP group.
        places: Order of the rank's two pieces.
        first: Initial state of each lane, zeros; sent states have the same shape.
        step: Function of piece, lane and received state that returns the state to send.
    """
    below, above = cp.index - 1, cp.index + 1
    turned: dict[int, Tensor] = {}  # on the last rank, from one piece to the next
    sent: tuple[dist.Work, Tensor] | None = None
    for place, source, target in zip(places, (below, above), (above, below), strict=True):
        for lane, begin in enumerate(first):
            if source == cp.degree:
                arrived = turned.pop(lane)
            elif source < 0:
                arrived = begin
            else:
                arrived = torch.empty_like(begin)
                dist.recv(arrived, group=cp.group, group_src=source)
            state = step(place, lane, arrived)
            del arrived
            if sent is not None:
                sent[0].wait()
                sent = None
            if target == cp.degree:
                turned[lane] = state
            elif target >= 0:
                work = dist.isend(state, group=cp.group, group_dst=target)
                sent = (work, state) if work is not None else None
    if sent is not None:
        sent[0].wait()


_REGION: ContextVar[Callable[[Callable[[], tuple[Tensor, ...]]], tuple[Tensor, ...]] | None] = ContextVar("region", default=None)


def scan_once_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a recompute region's two runs, as torch's `checkpoint` takes them: the second reuses the scan outputs of the first.

    The outputs are cached like those of a selective checkpoint, and the ranks of the group do not wait again.
    """
    made: deque[tuple[Tensor, ...]] = deque()

    def first(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        found = compute()
        made.append(tuple(tensor.detach() for tensor in found))  # detached: the graph of an output would make a reference cycle
        return found

    def again(_: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return made.popleft()

    @contextmanager
    def inside(run: Callable[[Callable[[], tuple[Tensor, ...]]], tuple[Tensor, ...]]) -> Iterator[None]:
        token = _REGION.set(run)
        try:
            yield
        finally:
            _REGION.reset(token)

    return inside(first), inside(again)


def run_once(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The outputs of `compute`; the second run of a recompute region returns the first run's outputs."""
    run = _REGION.get()
    return compute() if run is None else run(compute)


class _Convolution(torch.autograd.Function):
    """Saves x, as the op on full sequences, and the inputs before each piece."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None) -> Tensor:
        """[B, T / cp, C] in and out."""
        num_before = weight.shape[1] - 1
        pieces = torch.unflatten(x, 1, (2, -1))
        before = of_previous(cp, pieces[:, :, pieces.shape[2] - num_before :])
        ctx.save_for_backward(x, before, weight, bias, starts)
        ctx.cp = cp
        return conv_pieces(x, before, weight, bias, True, starts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of local tokens, and their contribution to the gradients of weight and bias."""
        x, before, weight, bias, starts = ctx.saved_tensors
        cp, num_before = ctx.cp, before.shape[2]
        needs = ctx.needs_input_grad[2:4]
        grad_x, grad_before, grad_weight, grad_bias = conv_pieces_backward(gradient, x, before, weight, bias, True, starts, needs)
        pieces = torch.unflatten(grad_x, 1, (2, -1))
        pieces[:, :, pieces.shape[2] - num_before :] += of_next(cp, grad_before)
        return None, grad_x, grad_weight, grad_bias, None


def of_previous(cp: ContextParallel, own: Tensor) -> Tensor:
    """Values of local pieces [B, 2, ...] -> values of the piece before each; zeros before the first of the sequence."""
    return _moved(cp, own, (cp.index - 1, 0), (cp.index + 1, 1) if cp.index + 1 < cp.degree else (cp.index, 0))


def of_next(cp: ContextParallel, own: Tensor) -> Tensor:
    """Values of local pieces [B, 2, ...] -> values of the piece after each; zeros after the last of the sequence."""
    return _moved(cp, own, (cp.index + 1, 0) if cp.index + 1 < cp.degree else (cp.index, 1), (cp.index - 1, 1))


def _moved(cp: ContextParallel, own: Tensor, *sources: tuple[int, int]) -> Tensor:
    """Every rank's [B, 2, ...] -> for each local piece the values of a source piece; zeros if there is no source."""
    whole = own.new_empty((cp.degree, *own.shape))
    dist.all_gather_into_tensor(whole.flatten(0, 1), own.contiguous(), group=cp.group)
    moved = own.new_empty(own.shape)
    for place, (rank, piece) in enumerate(sources):
        moved[:, place] = whole[rank, :, piece] if rank >= 0 else 0
    return moved


def half(tensor: Tensor, place: int) -> Tensor:
    """One piece of [B, T, ...]."""
    return torch.unflatten(tensor, 1, (2, -1))[:, place]


def lane_slice(count: int, lane: int, lanes: int) -> slice:
    """A lane's heads or groups."""
    return slice(lane * count // lanes, (lane + 1) * count // lanes)


def lane_zeros(lanes: int, like: Tensor, num_heads: int, *widths: int) -> list[Tensor]:
    """Initial state of each lane, [B, H / lanes, ...], one tensor for all lanes."""
    shape = like.shape[0], num_heads // lanes, *widths
    return [torch.zeros(shape, dtype=accumulator_dtype(like.dtype), device=like.device)] * lanes


def new_gradients(
    inputs: Sequence[Tensor | None], written: Sequence[int], tokens: Sequence[int], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradient buffers: `written` uninitialised, filled by piece and lane; others zero, for sums; parameters' in the wider dtype.

    None for an absent input and for a frozen parameter.
    """
    made: list[Tensor | None] = []
    for index, tensor in enumerate(inputs):
        if tensor is None or (index not in tokens and not needs[index]):
            made.append(None)
        elif index in written:
            made.append(tensor.new_empty(tensor.shape))
        else:
            dtype = tensor.dtype if index in tokens else accumulator_dtype(tensor.dtype)
            made.append(tensor.new_zeros(tensor.shape, dtype=dtype))
    return made


def as_inputs(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients in the dtypes of their inputs."""
    pairs = zip(gradients, inputs, strict=True)
    return tuple(None if gradient is None or tensor is None else gradient.to(tensor.dtype) for gradient, tensor in pairs)
