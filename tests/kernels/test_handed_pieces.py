"""Convolution, scan and recurrence piece by piece, each from the state of the previous piece: equal to the op on the full sequence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_checks import rms_ratio
from torch import Tensor

from megakernels import (
    causal_conv1d,
    conv_pieces,
    conv_pieces_backward,
    gated_conv1d,
    gated_conv_pieces,
    gated_conv_pieces_backward,
    gated_delta,
    gated_delta_piece,
    gated_delta_piece_backward,
    m2rnn,
    m2rnn_piece,
    m2rnn_piece_backward,
    mamba3,
    mamba3_ahead,
    mamba3_ahead_backward,
    mamba3_piece,
    mamba3_piece_backward,
    selective_scan,
    selective_scan_piece,
    selective_scan_piece_backward,
    ssd,
    ssd_piece,
    ssd_piece_backward,
)
from megakernels.ops.gated_delta.piece import DeltaSettings
from megakernels.ops.mamba3.piece import Mamba3Settings

pytestmark = pytest.mark.requirement("R-33")
PIECES, LENGTH, BATCH = 4, 6, 2
T = PIECES * LENGTH
EXACT = 1e-12
Op = Callable[..., Any]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def document_starts(packed: bool) -> tuple[Tensor | None, Tensor | None]:
    """Starts of whole rows, and counted from each piece; documents begin inside pieces, at their edges, and before them."""
    if not packed:
        return None, None
    edges = torch.tensor([[0, 4, 11, 12], [0, 13, 14, 19]])
    whole = torch.stack([row[(row.unsqueeze(1) <= torch.arange(T)).sum(0) - 1] for row in edges]).to(torch.int32)
    return whole, (whole - torch.arange(T) // LENGTH * LENGTH).to(torch.int32)


def piece(tensor: Tensor | None, index: int) -> Tensor | None:
    return None if tensor is None else tensor[:, index * LENGTH : (index + 1) * LENGTH]


@pytest.mark.parametrize("packed", [False, True])
def test_a_convolution_of_pieces_is_the_convolution_of_the_sequence(packed: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = draw(BATCH, T, 5), draw(5, 4), draw(5)
    whole_starts, starts = document_starts(packed)
    expected = causal_conv1d(x, weight, bias, True, whole_starts)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, weight, bias), gradient)
    ends = x.detach().unflatten(1, (PIECES, LENGTH))[:, :, LENGTH - 3 :]
    before = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
    assert rms_ratio(conv_pieces(x.detach(), before, weight.detach(), bias.detach(), True, starts), expected) < EXACT
    grad_x, grad_before, grad_weight, grad_bias = conv_pieces_backward(
        gradient, x.detach(), before, weight.detach(), bias.detach(), True, starts
    )
    grad_x = grad_x.unflatten(1, (PIECES, LENGTH))
    grad_x[:, :-1, LENGTH - 3 :] += grad_before[:, 1:]
    for found, right in zip((grad_x.flatten(1, 2), grad_weight, grad_bias), wanted, strict=True):
        assert rms_ratio(found, right) < EXACT


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_convolution_of_pieces_is_that_of_the_sequence(has_bias: bool, packed: bool) -> None:
    """The products before a piece are passed on; their gradient goes back to both factors."""
    torch.manual_seed(0)
    sequences, weight = [draw(BATCH, T, 5) for _ in range(3)], draw(5, 4)
    bias = draw(5) if has_bias else None
    whole_starts, starts = document_starts(packed)
    expected = gated_conv1d(*sequences, weight, bias, whole_starts)
    gradient = torch.randn_like(expected)
    inputs = (*sequences, weight, *((bias,) if bias is not None else ()))
    wanted = torch.autograd.grad(expected, inputs, gradient)
    plain, taps, shift = [each.detach() for each in sequences], weight.detach(), None if bias is None else bias.detach()
    ends = (plain[0] * plain[2]).unflatten(1, (PIECES, LENGTH))[:, :, LENGTH - 3 :]
    before = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
    assert rms_ratio(gated_conv_pieces(*plain, before, taps, shift, starts), expected) < EXACT
    *found, of_before, of_weight, of_bias = gated_conv_pieces_backward(gradient, *plain, before, taps, shift, starts)
    for own, other in ((0, 2), (2, 0)):
        pieces = found[own].unflatten(1, (PIECES, LENGTH))
        pieces[:, :-1, LENGTH - 3 :] += of_before[:, 1:] * plain[other].unflatten(1, (PIECES, LENGTH))[:, :-1, LENGTH - 3 :]
    for made, right in zip((*found, of_weight, *((of_bias,) if has_bias else ())), wanted, strict=True):
        assert rms_ratio(made, right) < EXACT


@pytest.mark.parametrize("needs", [(False, False), (True, False), (False, True)])
def test_convolutions_make_no_gradient_of_what_is_frozen(needs: tuple[bool, bool]) -> None:
    """Gradients of the tokens, and of a trained parameter, do not change."""
    torch.manual_seed(0)
    x, gate, value, before = (torch.randn(BATCH, *shape) for shape in ((T, 5), (T, 5), (T, 5), (PIECES, 3, 5)))
    weight, bias, gradient = torch.randn(5, 4), torch.randn(5), torch.randn(BATCH, T, 5)
    plain, gated = (gradient, x, before, weight, bias, True, None), (gradient, x, gate, value, before, weight, bias, None)
    for operation, given in ((conv_pieces_backward, plain), (gated_conv_pieces_backward, gated)):
        everything, found = operation(*given), operation(*given, needs)
        wanted = (True,) * (len(found) - 2) + needs
        for made, right, want in zip(found, everything, wanted, strict=True):
            assert (made is not None) == want
            assert made is None or torch.equal(made, right)


def test_a_scan_makes_no_gradient_of_what_is_frozen() -> None:
    """A caller that has no place for a parameter's gradient gets the others as before."""
    torch.manual_seed(0)
    inputs = [draw(BATCH, T, 4, 3), draw(BATCH, T, 4), draw(4), draw(BATCH, T, 2, 5), draw(BATCH, T, 2, 5), draw(4), draw(4)]
    given, state = [each.detach() for each in inputs], torch.zeros(BATCH, 4, 3, 5, dtype=torch.float64)
    y, states = torch.empty_like(given[0]), torch.empty(BATCH, -(-T // 8), 4, 3, 5, dtype=torch.float64)
    ssd_piece(state, given, None, 8, y, states)
    whole, frozen = [torch.zeros_like(each) for each in given], [torch.zeros_like(each) if each.dim() > 1 else None for each in given]
    before = [ssd_piece_backward(state, y, given, None, states, 8, gradients) for gradients in (whole, frozen)]
    assert torch.equal(*before)
    for made, right in zip(frozen, whole, strict=True):
        assert made is None or torch.equal(made, right)


@pytest.mark.parametrize("packed", [False, True])
def test_a_scan_of_pieces_is_the_scan_of_the_sequence(packed: bool) -> None:
    """Pieces of two chunks, the second one short; the state crosses them forward, its gradient back."""
    torch.manual_seed(0)
    inputs = [draw(BATCH, T, 4, 3), draw(BATCH, T, 4), draw(4), draw(BATCH, T, 2, 5), draw(BATCH, T, 2, 5), draw(4), draw(4)]
    tokens = (0, 1, 3, 4)
    whole_starts, starts = document_starts(packed)
    limits = 0.4, 1.5
    expected = ssd(*inputs, 4, whole_starts, dt_limits=limits)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    plain = [tensor.detach() for tensor in inputs]
    y, states = torch.empty_like(plain[0]), torch.empty(BATCH, PIECES, 2, 4, 3, 5, dtype=torch.float64)
    state = torch.zeros(BATCH, 4, 3, 5, dtype=torch.float64)

    def own(tensors: list[Tensor], index: int) -> list[Tensor]:
        return [piece(tensor, index) if place in tokens else tensor for place, tensor in enumerate(tensors)]

    for index in range(PIECES):
        state = ssd_piece(state, own(plain, index), piece(starts, index), 4, piece(y, index), states[:, index], limits)
    assert rms_ratio(y, expected) < EXACT
    gradients = [torch.zeros_like(tensor) for tensor in plain]
    grad_state = torch.zeros_like(state)
    for index in reversed(range(PIECES)):
        grad_state = ssd_piece_backward(
            grad_state, piece(gradient, index), own(plain, index), piece(starts, index), states[:, index], 4, own(gradients, index), limits
        )
    for found, right in zip(gradients, wanted, strict=True):
        assert rms_ratio(found, right) < EXACT


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("rank", "num_angles", "heavy_tail"), [(1, 0, False), (1, 2, True), (3, 2, False)])
def test_a_trapezoidal_scan_of_pieces_is_that_of_the_sequence(rank: int, num_angles: int, heavy_tail: bool, packed: bool) -> None:
    """State and phase cross the pieces, and a share of each first position goes to the weight of the one before it."""
    torch.manual_seed(0)
    heads, groups, width, dim = 4, 2, 3, 5
    inputs = [
        draw(BATCH, T, heads, width),
        draw(BATCH, T, heads, width),
        draw(BATCH, T, rank, groups, dim),
        draw(BATCH, T, rank, groups, dim),
    ]
    inputs += [draw(BATCH, T, heads) for _ in range(3)]
    inputs += [draw(BATCH, T, num_angles) if num_angles else None]
    inputs += [draw(heads, rank, dim), draw(heads, rank, dim), draw(heads), draw(heads)]
    inputs += [draw(heads, rank, width) if rank > 1 else None for _ in range(3)]
    whole_starts, starts = document_starts(packed)
    settings = Mamba3Settings(chunk_size=3, save_every=4, heavy_tail=heavy_tail)
    expected = mamba3(*inputs, 3, whole_starts, save_every=4, heavy_tail=heavy_tail)
    gradient = torch.randn_like(expected)
    given = [tensor for tensor in inputs if tensor is not None]
    wanted = torch.autograd.grad(expected, given, gradient)
    plain = [None if tensor is None else tensor.detach() for tensor in inputs]

    def own(tensors: list[Tensor | None], index: int) -> list[Tensor | None]:
        return [piece(tensor, index) if place < 8 else tensor for place, tensor in enumerate(tensors)]

    def first(index: int) -> tuple[Tensor, ...]:
        here = None if starts is None else starts[:, index * LENGTH]
        return plain[4][:, index * LENGTH], plain[6][:, index * LENGTH], plain[11], here

    y = torch.empty_like(plain[0])
    states = torch.empty(BATCH, PIECES, 2, heads, width, dim, dtype=torch.float64)
    phases = torch.empty(BATCH, PIECES, 2, heads, num_angles, dtype=torch.float64)
    carried = torch.zeros(BATCH, heads, width * dim + num_angles, dtype=torch.float64)
    zero = torch.zeros(BATCH, heads, dtype=torch.float64)
    ahead = [*(mamba3_ahead(*first(index)) for index in range(1, PIECES)), zero]
    for index in range(PIECES):
        kept = states[:, index], phases[:, index]
        carried = mamba3_piece(carried, own(plain, index), piece(starts, index), ahead[index], settings, piece(y, index), *kept)
    assert rms_ratio(y, expected) < EXACT
    gradients = [None if tensor is None else torch.zeros_like(tensor) for tensor in plain]
    grad_carried, grad_ahead = torch.zeros_like(carried), torch.empty_like(zero)
    for index in reversed(range(PIECES)):
        kept = states[:, index], phases[:, index]
        grad_carried = mamba3_piece_backward(
            grad_carried,
            piece(gradient, index),
            own(plain, index),
            piece(starts, index),
            ahead[index],
            *kept,
            settings,
            own(gradients, index),
            grad_ahead,
        )
        if index + 1 < PIECES:
            grad_dt, grad_trapezoid, grad_bias = mamba3_ahead_backward(grad_ahead, *first(index + 1))
            gradients[4][:, (index + 1) * LENGTH] += grad_dt
            gradients[6][:, (index + 1) * LENGTH] += grad_trapezoid
            gradients[11] += grad_bias
    for found, right in zip((each for each in gradients if each is not None), wanted, strict=True):
        assert rms_ratio(found, right) < EXACT


def check_pieces(
    inputs: list[Tensor], sequences: tuple[int, ...], shape: tuple[int, ...], whole: Op, forward: Op, backward: Op,
    *, value: int, packed: bool,
) -> None:  # fmt: skip
    """A recurrence by pieces, and its gradients, are those of the sequence.

    Args:
        inputs: The operation's tensors.
        sequences: Places of those that have a position for each token.
        shape: Saved states of a piece, then the shape of a state.
        whole: The operation of inputs and starts.
        forward: The piece of state, inputs, starts, y and states.
        backward: The gradient of the state of those of state and y, of inputs, starts, states, and of gradients that it writes.
        value: Place of the input that y is shaped as.
        packed: True if a row has several documents.
    """
    whole_starts, starts = document_starts(packed)
    expected = whole(inputs, whole_starts)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    plain = [tensor.detach() for tensor in inputs]
    y, states = torch.empty_like(plain[value]), torch.empty(BATCH, PIECES, *shape, dtype=torch.float64)
    state = torch.zeros(BATCH, *shape[1:], dtype=torch.float64)

    def own(tensors: list[Tensor], index: int) -> list[Tensor]:
        return [piece(tensor, index) if place in sequences else tensor for place, tensor in enumerate(tensors)]

    for index in range(PIECES):
        state = forward(state, own(plain, index), piece(starts, index), piece(y, index), states[:, index])
    assert rms_ratio(y, expected) < EXACT
    gradients = [torch.zeros_like(tensor) for tensor in plain]
    grad_state = torch.zeros_like(state)
    for index in reversed(range(PIECES)):
        operands = own(plain, index), piece(starts, index), states[:, index], own(gradients, index)
        grad_state = backward(grad_state, piece(gradient, index), *operands)
    for found, right in zip(gradients, wanted, strict=True):
        assert rms_ratio(found, right) < EXACT


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_a_delta_rule_of_pieces_is_the_delta_rule_of_the_sequence(per_row: bool, packed: bool) -> None:
    torch.manual_seed(0)
    rows = (3,) if per_row else ()
    inputs = [draw(BATCH, T, 2, 3), draw(BATCH, T, 2, 3), draw(BATCH, T, 4, 2), draw(BATCH, T, 4, *rows), draw(BATCH, T, 4)]
    inputs += [draw(4), draw(4, *rows)]
    settings = DeltaSettings(chunk_size=3, save_every=4, beta_limit=2.0)
    check_pieces(
        inputs, (0, 1, 2, 3, 4), (2, 4, 3, 2),
        lambda given, starts: gated_delta(*given, 3, 4, starts, beta_limit=2.0),
        lambda state, given, starts, *made: gated_delta_piece(state, given, starts, settings, *made),
        lambda state, y, given, starts, states, grads: gated_delta_piece_backward(state, y, given, starts, states, settings, grads),
        value=2, packed=packed,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_a_selective_scan_of_pieces_is_that_of_the_sequence(packed: bool) -> None:
    torch.manual_seed(0)
    inputs = [draw(BATCH, T, 5), draw(BATCH, T, 5), draw(5, 3), draw(BATCH, T, 3), draw(BATCH, T, 3), draw(5), draw(5)]
    check_pieces(
        inputs, (0, 1, 3, 4), (2, 5, 3),
        lambda given, starts: selective_scan(*given, 4, starts),
        lambda state, given, starts, *made: selective_scan_piece(state, given, starts, 4, *made),
        lambda state, y, given, starts, states, grads: selective_scan_piece_backward(state, y, given, starts, states, 4, grads),
        value=0, packed=packed,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_a_recurrence_of_pieces_is_the_recurrence_of_the_sequence(packed: bool) -> None:
    torch.manual_seed(0)
    inputs = [draw(BATCH, T, 3), draw(BATCH, T, 3), draw(BATCH, T, 4, 2), draw(BATCH, T, 4)]
    inputs += [draw(4, 2, 2), draw(4, 2), draw(4), draw(4)]
    check_pieces(
        inputs, (0, 1, 2, 3), (3, 4, 3, 2),
        lambda given, starts: m2rnn(*given, 4, starts),
        lambda state, given, starts, *made: m2rnn_piece(state, given, starts, 4, *made),
        lambda state, y, given, starts, states, grads: m2rnn_piece_backward(state, y, given, starts, states, 4, grads),
        value=2, packed=packed,
    )  # fmt: skip
