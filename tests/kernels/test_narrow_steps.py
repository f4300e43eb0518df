"""The narrow steps of E, M and R blocks: no buffer besides results, no intermediate saved, fp32 where it matters."""

import pytest
import torch
from op_checks import bytes_of, peak_bytes, saved_by

from megakernels import causal_conv1d, combine, dispatch, dispatch_plan, route

N, TOP_K, HIDDEN, EXPERTS = 256, 4, 512, 8
INDEX_BYTES = 3 * 8
"""Bytes of a row's indices: its position, and temporaries for its token's index."""


@pytest.mark.requirement("R-66")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_moved_without_a_buffer_of_all_rows(dtype: torch.dtype) -> None:
    """Dispatch allocates its output; combine, whatever top_k, one slot of each token at a time."""
    torch.manual_seed(0)
    x = torch.randn(N, HIDDEN).to(dtype)
    peaks = []
    for top_k in (TOP_K, 2 * TOP_K):
        rows, _ = dispatch_plan(torch.randint(0, EXPERTS, (N, top_k), dtype=torch.int32), EXPERTS)
        sent = dispatch(x, rows, top_k)
        assert peak_bytes(lambda: dispatch(x, rows, top_k)) <= bytes_of([sent]) + INDEX_BYTES * N * top_k  # noqa: B023
        peaks.append(peak_bytes(lambda: combine(sent, rows, top_k)))  # noqa: B023
    assert peaks[1] - peaks[0] <= INDEX_BYTES * N * TOP_K < bytes_of([x])


@pytest.mark.requirement("R-66")
def test_a_bf16_router_decides_in_fp32() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(N, HIDDEN).bfloat16(), torch.randn(EXPERTS, HIDDEN).bfloat16()
    weights, indices, _ = route(x, weight, TOP_K, False)
    exact, chosen, _ = route(x.double(), weight.double(), TOP_K, False)
    narrow = torch.softmax(x @ weight.T, -1).sort(descending=True).values[:, :TOP_K]
    assert weights.dtype is torch.float32
    assert torch.equal(indices, chosen)
    assert (weights - exact).abs().max() < 1e-5 < (narrow - exact).abs().max()


@pytest.mark.requirement("R-66")
def test_a_convolution_and_its_activation_are_one_operation() -> None:
    """The intermediate between the two is not saved."""
    inputs = [torch.randn(2, N, HIDDEN), torch.randn(HIDDEN, 4), torch.randn(HIDDEN)]
    for tensor in inputs:
        tensor.requires_grad_()
    _, kept = saved_by(lambda: causal_conv1d(*inputs, silu=True))
    assert {tensor.data_ptr() for tensor in kept} == {tensor.data_ptr() for tensor in inputs}
