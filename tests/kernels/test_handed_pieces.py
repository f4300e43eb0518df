"""Convolution, scan and recurrence piece by piece, each taking up what the piece before handed on: together the operation on the whole."""

import pytest
import torch
from op_checks import rms_ratio
from torch import Tensor

from megakernels.causal_conv1d import causal_conv1d
from megakernels.causal_conv1d.pieces import conv_pieces, conv_pieces_backward
from megakernels.m2rnn import m2rnn
from megakernels.m2rnn.piece import m2rnn_piece, m2rnn_piece_backward
from megakernels.ssd import ssd
from megakernels.ssd.piece import ssd_piece, ssd_piece_backward

pytestmark = pytest.mark.requirement("R-33")
PIECES, LENGTH, BATCH = 4, 6, 2
T = PIECES * LENGTH
EXACT = 1e-12


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def document_starts(packed: bool) -> tuple[Tensor | None, Tensor | None]:
    """Of whole rows, and counted from each piece; documents begin inside pieces, at their edges, and before them."""
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
def test_a_scan_of_pieces_is_the_scan_of_the_sequence(packed: bool) -> None:
    """Pieces of two chunks, the second one short; the state crosses them forward, its gradient back."""
    torch.manual_seed(0)
    inputs = [draw(BATCH, T, 4, 3), draw(BATCH, T, 4), draw(4), draw(BATCH, T, 2, 5), draw(BATCH, T, 2, 5), draw(4), draw(4)]
    tokens = (0, 1, 3, 4)
    whole_starts, starts = document_starts(packed)
    expected = ssd(*inputs, 4, whole_starts)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    plain = [tensor.detach() for tensor in inputs]
    y, states = torch.empty_like(plain[0]), torch.empty(BATCH, PIECES, 2, 4, 3, 5, dtype=torch.float64)
    state = torch.zeros(BATCH, 4, 3, 5, dtype=torch.float64)

    def own(tensors: list[Tensor], index: int) -> list[Tensor]:
        return [piece(tensor, index) if place in tokens else tensor for place, tensor in enumerate(tensors)]

    for index in range(PIECES):
        state = ssd_piece(state, own(plain, index), piece(starts, index), 4, piece(y, index), states[:, index])
    assert rms_ratio(y, expected) < EXACT
    gradients = [torch.zeros_like(tensor) for tensor in plain]
    grad_state = torch.zeros_like(state)
    for index in reversed(range(PIECES)):
        grad_state = ssd_piece_backward(
            grad_state, piece(gradient, index), own(plain, index), piece(starts, index), states[:, index], 4, own(gradients, index)
        )
    for found, right in zip(gradients, wanted, strict=True):
        assert rms_ratio(found, right) < EXACT


@pytest.mark.parametrize("packed", [False, True])
def test_a_recurrence_of_pieces_is_the_recurrence_of_the_sequence(packed: bool) -> None:
    torch.manual_seed(0)
    inputs = [draw(BATCH, T, 3), draw(BATCH, T, 3), draw(BATCH, T, 4, 2), draw(BATCH, T, 4)]
    inputs += [draw(4, 2, 2), draw(4, 2), draw(4), draw(4)]
    whole_starts, starts = document_starts(packed)
    expected = m2rnn(*inputs, 4, whole_starts)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    plain = [tensor.detach() for tensor in inputs]
    y, states = torch.empty_like(plain[2]), torch.empty(BATCH, PIECES, 3, 4, 3, 2, dtype=torch.float64)
    state = torch.zeros(BATCH, 4, 3, 2, dtype=torch.float64)

    def own(tensors: list[Tensor], index: int) -> list[Tensor]:
        return [piece(tensor, index) if place < 4 else tensor for place, tensor in enumerate(tensors)]

    for index in range(PIECES):
        state = m2rnn_piece(state, own(plain, index), piece(starts, index), 4, piece(y, index), states[:, index])
    assert rms_ratio(y, expected) < EXACT
    gradients = [torch.zeros_like(tensor) for tensor in plain]
    grad_state = torch.zeros_like(state)
    for index in reversed(range(PIECES)):
        grad_state = m2rnn_piece_backward(
            grad_state, piece(gradient, index), own(plain, index), piece(starts, index), states[:, index], 4, own(gradients, index)
        )
    for found, right in zip(gradients, wanted, strict=True):
        assert rms_ratio(found, right) < EXACT
