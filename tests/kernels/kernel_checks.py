"""Checks of Triton kernels in the interpreter, through the public operations.

The interpreter runs programs in order, which hides races between them: every value check runs again with the programs shuffled and asks for
the same bits.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from op_checks import gradients, rms_ratio, saved_by
from op_makers import Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHUFFLES = True
"""A device orders programs itself: there the second run is a repetition, with the same bits."""


@contextlib.contextmanager
def shuffled_grid(seed: int) -> Iterator[None]:
    """Programs along each grid axis run in a random order, and without the checks for overflow that the run in order has made."""
    if not SHUFFLES:
        yield
        return
    builder, options = type(interpreter.interpreter_builder), interpreter.interpreter_builder.options
    original, orders = builder.set_grid_idx, {}

    def set_grid_idx(self: Any, *place: int) -> None:
        for count in self.grid_dim:
            if count not in orders:
                orders[count] = random.Random(seed).sample(range(count), count)
        original(self, *[orders[count][index] for count, index in zip(self.grid_dim, place, strict=True)])

    builder.set_grid_idx = set_grid_idx
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        builder.set_grid_idx = original
        interpreter.interpreter_builder.options = options


@contextlib.contextmanager
def no_reference(module: ModuleType) -> Iterator[None]:
    """Fails if an operation would run its plain-torch functions instead of its kernels."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{module.__name__} ran")

    with pytest.MonkeyPatch.context() as patch:
        for name, value in vars(module).items():
            own = callable(value) and getattr(value, "__module__", "") == module.__name__
            if own and name.removesuffix("_from").endswith(("forward", "backward")):
                patch.setattr(module, name, refused)
        yield


def strided(tensor: Tensor) -> Tensor:
    """The same values as a slice of a wider tensor whose rest is NaN."""
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return tensor
    wider = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan"), dtype=tensor.dtype)
    wider[..., 2:-1] = tensor.detach()
    return wider[..., 2:-1].requires_grad_(tensor.requires_grad)


def run(case: Case, inputs: dict[str, Tensor], cotangents: list[Tensor] | None = None, *, views: bool = False) -> list[Tensor]:
    """Outputs, then gradients; with `views` of cotangents that are slices of wider tensors."""
    outputs = case.call(inputs)
    found = [outputs[index] for index in range(len(outputs))]
    if cotangents is None:
        cotangents = seeds_of(found)
    if views:
        cotangents = [strided(seed) for seed in cotangents]
    return [*found, *gradients(found, [inputs[name] for name in case.differentiable(inputs)], cotangents)]


def seeds_of(outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype) for output in outputs]


def check_values(
    case: Case,
    num_positions: int,
    dtype: torch.dtype,
    reference: ModuleType,
    *,
    views: bool = False,
    terms: Mapping[str, str] | None = None,
) -> None:
    """Outputs and every gradient against autograd through the fp64 formula, in order and shuffled, the same bits each time.

    `terms` names the tensor to which a parameter is added: its gradient is a sum of that tensor's, which may cancel except for rounding.
    """
    inputs = case.make(num_positions, dtype)
    if views:
        inputs = {name: strided(value) for name, value in inputs.items()}
    wide = {
        name: value.detach().double().requires_grad_(value.requires_grad) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    names = case.differentiable(inputs)
    with no_reference(reference):
        found = run(case, inputs, views=views)
        outputs = found[: len(found) - len(names)]
        cotangents = seeds_of(outputs)
        with shuffled_grid(seed=num_positions):
            again = run(case, inputs, cotangents)
    assert all(torch.equal(first, second) for first, second in zip(found, again, strict=True))
    exact = run(replace(case, call=case.exact), wide, [seed.double() for seed in cotangents])
    every = [*[f"output {index}" for index in range(len(outputs))], *names]
    ratios = {name: rms_ratio(a, b) for name, a, b in zip(every, found, exact, strict=True)}
    sizes = {name: right.norm().item() for name, right in zip(every, exact, strict=True)}
    for name, term in (terms or {}).items():
        if name in ratios and sizes[term] > sizes[name]:
            ratios[name] *= sizes[name] / sizes[term]
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= TOLERANCE[dtype]} == {}
    assert [tensor.dtype for tensor in found[len(outputs) :]] == [inputs[name].dtype for name in names]


def check_needs(case: Case, reference: ModuleType) -> None:
    """Each gradient alone has the bits it has among all."""
    full = case.make(9, torch.float32)
    names = case.differentiable(full)
    with no_reference(reference):
        together = dict(zip(names, run(case, full)[-len(names) :], strict=True))
        for name in names:
            inputs = {other: value.detach().requires_grad_(other == name) for other, value in full.items()}
            outputs = list(case.call(inputs))
            (found,) = gradients(outputs, [inputs[name]], seeds_of(outputs))
            assert torch.equal(found, together[name]), name


def check_uniform_cotangent(case: Case) -> None:
    """The gradient of a plain sum arrives with stride 0."""
    inputs = case.make(5, torch.float32)
    names = case.differentiable(inputs)
    outputs = case.call(inputs)
    ones = [torch.ones((), dtype=output.dtype).expand(output.shape) for output in outputs]
    found = gradients(outputs, [inputs[name] for name in names], ones)
    expected = run(case, inputs, [one.contiguous() for one in ones])[len(outputs) :]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def check_contract(case: Case) -> None:
    """The saved set is the documented one with the kernels too, and torch's own operator check passes.

    Its part under AOT dispatch reads the registrations alone, which `test_op_contract` checks with the plain-torch functions.
    """
    inputs = case.make(65, torch.bfloat16)
    outputs, packed = saved_by(lambda: case.call(inputs))
    by_address = {value.data_ptr(): name for name, value in inputs.items()}
    assert sorted(by_address[tensor.data_ptr()] for tensor in packed if tensor.data_ptr() in by_address) == sorted(case.saved)
    roles = {"x": torch.bfloat16, "accumulator": torch.float32, "int32": torch.int32}
    others = Counter((tuple(tensor.shape), tensor.dtype) for tensor in packed if tensor.data_ptr() not in by_address)
    expected = Counter((shape, roles[role]) for shape, role in case.extra(65))
    expected.update((tuple(outputs[index].shape), outputs[index].dtype) for index in case.saved_outputs)
    assert others == expected
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    report = torch.library.opcheck(*operator_of(case), test_utils=tests)
    assert set(report.values()) == {"SUCCESS"}


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """The decorator of a test of these cases."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def seeds(quick: Iterable[int], more: Iterable[int]) -> pytest.MarkDecorator:
    """The decorator of a test of random draws; `more` are slow."""
    return pytest.mark.parametrize("seed", [*quick, *(pytest.param(seed, marks=pytest.mark.slow) for seed in more)])


def contract_tests(
    reference: ModuleType,
    contract: Sequence[Case],
    needs: Sequence[Case] | None = None,
    uniform: Sequence[Case] | None = None,
    *,
    slow: Sequence[str] = (),
    fixture: str | None = None,
) -> list[Callable[[Case], None]]:
    """Tests of the saved set, of each gradient alone, and of the gradient of a sum.

    Args:
        reference: The operation's plain-torch functions.
        contract: Cases of `check_contract`.
        needs: Cases of `check_needs`; those of `contract` if None.
        uniform: Cases of `check_uniform_cotangent`; those of `needs` if None.
        slow: Names of the lists of cases that are marked slow.
        fixture: A fixture that each of them uses.
    """
    needs = contract if needs is None else needs
    checks: dict[str, tuple[Sequence[Case], Callable[[Case], None]]] = {
        "contract": (contract, check_contract),
        "needs": (needs, lambda case: check_needs(case, reference)),
        "uniform": (needs if uniform is None else uniform, check_uniform_cotangent),
    }

    def tested(name: str) -> Callable[[Case], None]:
        cases, check = checks[name]
        marks = [each(cases), *([pytest.mark.slow] if name in slow else []), *([pytest.mark.usefixtures(fixture)] if fixture else [])]

        def test(case: Case) -> None:
            check(case)

        for mark in marks:
            mark(test)
        return test

    return [tested(name) for name in checks]


def operator_of(case: Case) -> tuple[Any, tuple[Any, ...]]:
    """The torch op that the public function calls, with its arguments."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
            if func.namespace == "megakernels":
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    inputs = case.make(9, torch.float32)
    with Recorded():  # type: ignore[no-untyped-call]
        case.call(inputs)
    return calls[0]
