"""Promises of docs/reference/ops.md for every operation, its values excepted."""

from collections import Counter
from typing import Any

import pytest
import torch
from op_cases import CASES
from op_checks import bytes_of, gradients, live_bytes, saved_by
from op_makers import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


def extra_of(case: Case, num_positions: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    roles = {"x": dtype, "accumulator": accumulator, "int32": torch.int32}
    return [(shape, roles[role]) for shape, role in case.extra(num_positions)]


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The package's operations that run, each with its arguments and outputs, and the names of all others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own: list[tuple[Any, tuple[Any, ...], list[Tensor]]] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "megakernels":
            self.own.append((func, args, [result] if isinstance(result, Tensor) else list(result)))
        else:
            self.others.append(str(func))
        return result


@pytest.mark.requirement("R-65")
@EACH_CASE
@DTYPES
def test_the_saved_set_is_the_contract(case: Case, dtype: torch.dtype) -> None:
    inputs = case.make(65, dtype)
    outputs, packed = saved_by(lambda: case.call(inputs))
    by_address = {value.data_ptr(): name for name, value in inputs.items()}
    kept = [by_address[tensor.data_ptr()] for tensor in packed if tensor.data_ptr() in by_address]
    assert sorted(kept) == sorted(case.saved)
    others = Counter((tuple(tensor.shape), tensor.dtype) for tensor in packed if tensor.data_ptr() not in by_address)
    expected = Counter(extra_of(case, 65, dtype))
    kept_outputs = [outputs[index] for index in case.saved_outputs]
    expected.update((tuple(output.shape), output.dtype) for output in kept_outputs)
    assert {output.data_ptr() for output in kept_outputs} <= {tensor.data_ptr() for tensor in packed}
    assert others == expected


@EACH_CASE
@DTYPES
def test_live_bytes_after_forward_are_outputs_and_saved_set(case: Case, dtype: torch.dtype) -> None:
    """Counted at the allocator, so that a tensor kept as a context attribute or in a closure is found."""
    inputs = case.make(65, dtype)
    case.call(inputs)  # the first call may fill caches of torch's own
    outputs, live = live_bytes(lambda: case.call(inputs))
    extra = sum(torch.Size(shape).numel() * kind.itemsize for shape, kind in extra_of(case, 65, dtype))
    assert live == bytes_of(outputs) + extra


@EACH_CASE
def test_live_bytes_after_backward_are_the_gradients(case: Case) -> None:
    inputs = case.make(65, torch.bfloat16)
    names = case.differentiable(inputs)

    def run() -> tuple[Tensor, ...]:
        outputs = case.call(inputs)
        return gradients(outputs, [inputs[name] for name in names], [torch.ones_like(output) for output in outputs])

    run()
    found, live = live_bytes(run)
    assert live == bytes_of(found)


@EACH_CASE
@DTYPES
def test_fake_tensors_match_real_ones(case: Case, dtype: torch.dtype) -> None:
    """Shapes, dtypes and strides of outputs and gradients; a tracer sees nothing of an operation but its outputs."""

    def describe(inputs: dict[str, Tensor]) -> tuple[list[tuple[Any, ...]], Recorded]:
        with Recorded() as recorded:
            outputs = case.call(inputs)
            ones = [torch.ones_like(output) for output in outputs]
            found = gradients(outputs, [inputs[name] for name in case.differentiable(inputs)], ones)
        tensors = [*[tensor for _, _, results in recorded.own for tensor in results], *found]
        return [(tuple(tensor.shape), tensor.dtype, tensor.stride()) for tensor in tensors], recorded

    inputs = case.make(65, dtype)
    real, _ = describe(inputs)
    with FakeTensorMode() as mode:
        fake, recorded = describe({name: mode.from_tensor(value) for name, value in inputs.items()})
    assert fake == real
    assert set(recorded.others) <= {
        "aten.ones_like.default",
        "aten.detach.default",
        "prim.device.default",
    }  # the test's, and two without bytes


@EACH_CASE
def test_only_wanted_gradients_are_computed(case: Case) -> None:
    full = case.make(33, torch.float64)
    names = case.differentiable(full)
    outputs = case.call(full)
    ones = [torch.ones_like(output) for output in outputs]
    expected = dict(zip(names, gradients(outputs, [full[name] for name in names], ones), strict=True))
    for name in names:
        inputs = {other: value.detach().requires_grad_(other == name) for other, value in full.items()}
        outputs = case.call(inputs)
        with Recorded() as recorded:
            (found,) = gradients(outputs, [inputs[name]], ones)
        assert torch.equal(found, expected[name]), name
        assert [len(results) for operator, _, results in recorded.own if operator._opname.endswith("_backward")] == [1]


@EACH_CASE
def test_outputs_and_gradients_own_their_storage(case: Case) -> None:
    inputs = case.make(64, torch.float32)
    outputs = case.call(inputs)
    ones = [torch.ones_like(output) for output in outputs]
    found = gradients(outputs, [inputs[name] for name in case.differentiable(inputs) if name not in case.same_gradient], ones)
    addresses = [tensor.untyped_storage().data_ptr() for tensor in (*inputs.values(), *outputs, *ones, *found)]
    assert len(set(addresses)) == len(addresses)


@EACH_CASE
def test_compiled_equals_eager(case: Case) -> None:
    torch.compiler.reset()
    inputs = case.make(17, torch.float32)
    names = case.differentiable(inputs)
    compiled = torch.compile(case.call, backend="aot_eager", fullgraph=True)
    results = []
    for call in (case.call, compiled):
        outputs = call(inputs)
        results.append((*outputs, *gradients(outputs, [inputs[name] for name in names], [torch.ones_like(output) for output in outputs])))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


@EACH_CASE
def test_torchs_own_operator_check_passes(case: Case) -> None:
    """Schema, autograd registration, fake implementation and tracing with dynamic shapes."""
    inputs = case.make(9, torch.float32)
    with Recorded() as recorded:
        case.call(inputs)
    ((operator, arguments, _),) = recorded.own
    report = torch.library.opcheck(operator, arguments)
    assert set(report.values()) == {"SUCCESS"}
