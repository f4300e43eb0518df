"""Every operation without sequences, without rows, and with one position: outputs of the right shape, parameters' gradients zero."""

import pytest
import torch
from op_cases import CASES
from op_checks import gradients
from op_makers import BATCH, Case

LENGTH = 5
BATCHED = [case for case in CASES if next(iter(case.make(LENGTH, torch.float32).values())).shape[:2] == (BATCH, LENGTH)]
OF_ROWS = [case for case in CASES if case not in BATCHED]


def check(case: Case, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Runs forward and backward; gradients of parameters are zero without rows."""
    outputs = case.call(inputs)
    names = case.differentiable(inputs)
    found = gradients(list(outputs), [inputs[name] for name in names], [torch.ones_like(output) for output in outputs])
    assert [gradient.shape for gradient in found] == [inputs[name].shape for name in names]
    assert all(gradient.isfinite().all() for gradient in found)
    if not outputs[0].numel() or not next(iter(inputs.values())).numel():
        assert all(gradient.count_nonzero() == 0 for gradient in found)
    return outputs


@pytest.mark.parametrize("case", BATCHED, ids=lambda case: case.name)
def test_no_sequences(case: Case) -> None:
    made = case.make(LENGTH, torch.float32)
    rows = [name for name, value in made.items() if value.shape[:2] == (BATCH, LENGTH) or name == "initial"]
    empty = {name: value.detach()[:0].clone() if name in rows else value.detach() for name, value in made.items()}
    for name in case.differentiable(empty):
        empty[name].requires_grad_()
    assert check(case, empty)[0].shape[0] == 0


@pytest.mark.parametrize("case", OF_ROWS, ids=lambda case: case.name)
def test_no_rows(case: Case) -> None:
    check(case, case.make(0, torch.float32))


@pytest.mark.parametrize("case", [case for case in CASES if not case.name.endswith("packed")], ids=lambda case: case.name)
def test_one_position(case: Case) -> None:
    check(case, case.make(1, torch.float32))
