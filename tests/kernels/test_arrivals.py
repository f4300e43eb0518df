"""Rows that arrive from several ranks: sorted by expert and sent back in the order they came."""

import pytest
import torch
from op_checks import gradients
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megakernels import arrival_plan, combine, dispatch, dispatch_plan, experts

COUNTS = {
    "even": [[2, 2], [2, 2], [2, 2]],
    "an idle expert": [[3, 0], [1, 0], [0, 0]],
    "a silent rank": [[0, 0], [5, 1], [2, 2]],
    "one expert takes all": [[0, 7, 0], [0, 9, 0]],
    "nothing at all": [[0, 0], [0, 0]],
}


@pytest.mark.requirement("R-19")
@pytest.mark.requirement("R-58")
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_arrived_rows_are_sorted_by_expert_stably(counts: list[list[int]]) -> None:
    arrived = [expert for source in counts for expert, count in enumerate(source) for _ in range(count)]
    rows, totals = arrival_plan(torch.tensor(counts, dtype=torch.int32), len(arrived))
    assert rows.tolist() == sorted(range(len(arrived)), key=arrived.__getitem__)
    assert totals.tolist() == [sum(source[expert] for source in counts) for expert in range(len(counts[0]))]


def test_fake_arrivals_have_the_stated_number_of_rows() -> None:
    """Fake counts have no values."""
    counts = torch.tensor([[1, 2], [0, 3]], dtype=torch.int32)
    real = arrival_plan(counts, 6)
    with FakeTensorMode() as mode:
        fake = arrival_plan(mode.from_tensor(counts), 6)
    for found, expected in zip(fake, real, strict=True):
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())


@pytest.mark.requirement("R-58")
@pytest.mark.parametrize("chosen", ["mixed", "one expert", "none on the second rank"])
def test_experts_on_two_ranks_are_experts_on_one(chosen: str) -> None:
    """Both ranks' halves played by one process, without a collective: the same rows, outputs and gradients."""
    generator = torch.Generator().manual_seed(3)
    num_tokens, top_k, num_experts, hidden, width, ranks = 6, 2, 4, 5, 3, 2
    draws = [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens * ranks)]
    indices = torch.stack(draws).to(torch.int32)
    if chosen == "one expert":
        indices, top_k = torch.full_like(indices[:, :1], 2), 1
    elif chosen == "none on the second rank":
        indices %= 2
        indices[:, 1] = 1 - indices[:, 0]

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, weights = tensor(num_tokens * ranks, hidden), tensor(num_tokens * ranks, top_k)
    up, down = tensor(num_experts, width, hidden), tensor(num_experts, hidden, width)
    cotangent = torch.randn(num_tokens * ranks, hidden, generator=generator, dtype=torch.float64)

    rows, counts = dispatch_plan(indices, num_experts)
    whole = combine(experts(dispatch(x, rows, top_k), weights, rows, counts, None, up, down, "relu2"), rows, top_k)
    expected = gradients([whole], [x, weights, up, down], [cotangent])

    local, plans = num_experts // ranks, [dispatch_plan(part, num_experts) for part in indices.chunk(ranks)]
    sent = [dispatch(part, plan[0], top_k) for part, plan in zip(x.chunk(ranks), plans, strict=True)]
    weighing = [dispatch(part.reshape(-1, 1), plan[0], 1) for part, plan in zip(weights.chunk(ranks), plans, strict=True)]
    sizes = [plan[1].view(ranks, local).sum(1).tolist() for plan in plans]
    returned: list[list[Tensor]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        own = slice(rank * local, (rank + 1) * local)
        arrived_counts = torch.stack([plan[1].view(ranks, local)[rank] for plan in plans])
        arrived = torch.cat([rows.split(size)[rank] for rows, size in zip(sent, sizes, strict=True)])
        arrived_weights = torch.cat([rows.split(size)[rank] for rows, size in zip(weighing, sizes, strict=True)])
        order, totals = arrival_plan(arrived_counts, arrived.shape[0])
        processed = experts(dispatch(arrived, order, 1), arrived_weights, order, totals, None, up[own], down[own], "relu2")
        for source, back in enumerate(combine(processed, order, 1).split([size[rank] for size in sizes])):
            returned[source].append(back)
    halves = [combine(torch.cat(parts), plan[0], top_k) for parts, plan in zip(returned, plans, strict=True)]
    found = [torch.cat(halves), *gradients([torch.cat(halves)], [x, weights, up, down], [cotangent])]
    for a, b in zip(found, [whole, *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_counts_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"arrival_plan: counts must be int32 \[R,E\]; got counts = \(2, 2\), dtype = torch\.int64"):
        arrival_plan(torch.zeros(2, 2, dtype=torch.int64), 0)
