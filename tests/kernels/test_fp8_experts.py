"""Experts in eight bits against numpy in fp64 with an independent rounding, and their stated shapes and scratch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from delayed_numbers import numbers_for
from rounding import Peak, blocked, quantised
from storages import Idle
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from megakernels import dispatch_plan, fp8_experts, fp8_experts_backward, scratch_bytes
from megakernels._common import device
from megakernels.ops.fp8_experts import op as module
from megakernels.ops.fp8_experts import products
from megakernels.ops.fp8_linear.packing.facts import packed_columns

ALL = pytest.mark.parametrize("scaling", ["tensor", "rows", "delayed"])
EXPERTS, HIDDEN, WIDTH, TOKENS = 4, 32, 48, 11
NAMES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


class Case(NamedTuple):
    """Tensors of a call and its activation."""

    x: Tensor
    grad_y: Tensor
    weights: Tensor
    rows: Tensor
    counts: Tensor
    bank: dict[str, Tensor | None]
    activation: str


def case(dtype: torch.dtype, *, gated: bool, biased: bool, top_k: int = 2) -> Case:
    """The last expert has no rows, and the first a number that 16 does not divide."""
    generator = torch.Generator().manual_seed(7)

    def made(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))).to(dtype)

    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:top_k] for _ in range(TOKENS)]).int()
    rows, counts = dispatch_plan(chosen, EXPERTS)
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "gate_bias": (WIDTH,), "up_bias": (WIDTH,)}
    shapes["down_bias"] = (HIDDEN,)
    without = {*(() if gated else ("gate", "gate_bias")), *(() if biased else NAMES[3:])}
    bank = {name: None if name in without else made(EXPERTS, *shape) for name, shape in shapes.items()}
    weights = torch.rand(TOKENS, top_k, generator=generator)
    return Case(made(TOKENS, HIDDEN), made(TOKENS, HIDDEN), weights, rows, counts, bank, "swiglu" if gated else "relu2")


def numbers_of(given: Case, scaling: str) -> list[Tensor]:
    return numbers_for(scaling, 2 + (given.bank["gate"] is not None))


def forward(given: Case, scaling: str, keeps: bool, x: Tensor | None = None) -> list[Tensor]:
    x, bank = given.x if x is None else x, given.bank
    biases = {name: bank[name] for name in NAMES[3:]}
    front = (x, given.weights, given.rows, given.counts, bank["gate"], bank["up"], bank["down"], given.activation)
    return fp8_experts(*front, scaling, keeps, **biases, numbers=numbers_of(given, scaling))  # type: ignore[arg-type]


def backward(given: Case, scaling: str, kept: tuple[Tensor, Tensor | None], made: list[Tensor]) -> list[Tensor]:
    bank, gated = given.bank, given.bank["gate"] is not None
    front = (given.grad_y, *kept, given.weights, given.rows, given.counts, made[1] if gated else None, made[1 + gated])
    biases = {name: bank[name] for name in NAMES[3:]}
    front += (bank["gate"], bank["up"], bank["down"], given.activation)  # type: ignore[assignment]
    return fp8_experts_backward(*front, scaling, **biases, numbers=numbers_of(given, scaling))  # type: ignore[arg-type]


def exact(tensor: Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.double().numpy()


def close(found: Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    tolerance = 2**-7 if dtype == torch.bfloat16 else 2**-18
    assert np.abs(found.double().numpy() - expected).max() <= tolerance * max(np.abs(expected).max(), 1e-30)


def narrowed(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(dtype).double().numpy()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("scaling", ["tensor", "rows", "mxfp8"])
@pytest.mark.parametrize(("gated", "biased"), [(True, True), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_expert_multiplies_its_rows_as_quantised_matrices(dtype: torch.dtype, scaling: str, gated: bool, biased: bool) -> None:
    """Row by row and expert by expert, in fp64, with what the operation kept of the first products."""
    given = case(dtype, gated=gated, biased=biased)
    made = forward(given, scaling, scaling != "mxfp8")
    found = dict(
        zip(
            ("x", "weights", *(name for name in NAMES if given.bank[name] is not None)),
            backward(given, scaling, (given.x, None), made),
            strict=True,
        )
    )
    by_row = scaling != "tensor"
    token, weight = (given.rows // 2).numpy(), given.weights.flatten().double().numpy()[given.rows.numpy()][:, None]
    owner = np.repeat(np.arange(EXPERTS), given.counts.numpy())

    def scaled(x: np.ndarray, axis: int) -> np.ndarray:
        return blocked(x, scaling, axis) if scaling == "mxfp8" else quantised(x, "e4m3", axis)

    def rows_of(x: np.ndarray) -> np.ndarray:
        return scaled(x, 1) if by_row else quantised(x, "e4m3", None)

    def stack(name: str, axis: int) -> np.ndarray:
        """Each row, or column, of a matrix scaled; or the whole bank."""
        bank = exact(given.bank[name])
        return (
            np.stack([scaled(one, axis) for one in bank])
            if by_row
            else quantised(bank.reshape(EXPERTS, -1), "e4m3", None).reshape(bank.shape)
        )

    def columns_of(x: np.ndarray, expert: int, whole: np.ndarray) -> np.ndarray:
        own = owner == expert
        return scaled(x[own], 0) if by_row else quantised(np.concatenate([whole, x]), "e4m3", None)[len(whole) :][own]

    def bias_of(name: str) -> np.ndarray | float:
        return exact(given.bank[name])[owner] if biased else 0.0

    def times(x: np.ndarray, matrices: np.ndarray) -> np.ndarray:
        return np.stack([matrices[expert] @ row for expert, row in zip(owner, x, strict=True)])

    x, grad_y = exact(given.x), exact(given.grad_y)
    kept = dict(zip(("gate", "up") if gated else ("up",), (exact(each) for each in made[1 : 2 + gated]), strict=True))
    for name, out in kept.items():
        expected = narrowed(times(rows_of(x)[token], stack(name, 1)), dtype) + bias_of(f"{name}_bias")
        close(torch.from_numpy(out), expected, dtype)
    acted = kept["gate"] * sigmoid(kept["gate"]) * kept["up"] if gated else np.maximum(kept["up"], 0) ** 2
    hidden = narrowed(acted * weight, dtype)
    y = np.zeros_like(x)
    np.add.at(y, token, times(rows_of(hidden), stack("down", 1)) + bias_of("down_bias") * weight)
    close(made[0], y, dtype)

    pulled = narrowed(times(rows_of(grad_y)[token], stack("down", 0).swapaxes(1, 2)), dtype)
    grad_weights = np.zeros(given.weights.numel())
    grad_weights[given.rows.numpy()] = (pulled * acted).sum(1) + (grad_y[token] * bias_of("down_bias")).sum(1)
    close(found["weights"].flatten(), grad_weights, dtype)
    inner = {"up": pulled * weight * (kept["gate"] * sigmoid(kept["gate"]) if gated else 2 * np.maximum(kept["up"], 0))}
    if gated:
        share = sigmoid(kept["gate"])
        inner["gate"] = pulled * weight * kept["up"] * share * (1 + kept["gate"] * (1 - share))
    inner = {name: narrowed(values, dtype) for name, values in inner.items()}
    grad_x = np.zeros_like(x)
    for name, values in inner.items():
        np.add.at(grad_x, token, times(rows_of(values), stack(name, 0).swapaxes(1, 2)))
        expected = np.stack([columns_of(values, expert, values).T @ columns_of(x[token], expert, x) for expert in range(EXPERTS)][:-1])
        near(found[name][:-1], expected, dtype)
        assert not found[name][-1].any()
        if biased:
            expected = np.stack([values[owner == expert].sum(0) for expert in range(EXPERTS)])
            close(found[f"{name}_bias"], expected, dtype)
    near(found["x"], grad_x, dtype)
    expected = np.stack([columns_of(grad_y[token], expert, grad_y).T @ columns_of(hidden, expert, hidden) for expert in range(EXPERTS - 1)])
    near(found["down"][:-1], expected, dtype)


def near(found: Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    """Compares values made of gradients behind an activation: a unit in the last place may round them to the next eight-bit number."""
    size = np.sqrt((expected**2).mean())
    assert np.sqrt(((found.double().numpy() - expected) ** 2).mean()) <= (2**-6 if dtype == torch.bfloat16 else 2**-10) * size


@ALL
@pytest.mark.parametrize("top_k", [1, 2])
def test_what_is_kept_gives_the_gradients_that_the_input_gives(scaling: str, top_k: int) -> None:
    given = case(torch.bfloat16, gated=True, biased=True, top_k=top_k)
    *made, low, scales = forward(given, scaling, True)
    without = forward(given, scaling, False)
    assert all(torch.equal(first, second) for first, second in zip(made, without, strict=True))
    first, second = backward(given, scaling, (low, scales), made), backward(given, scaling, (given.x, None), made)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


@ALL
def test_no_rows_at_all(scaling: str) -> None:
    """A rank of an EP group whose experts no token chose has no rows."""
    given = case(torch.bfloat16, gated=True, biased=True)
    empty = given._replace(
        x=given.x[:0], grad_y=given.grad_y[:0], weights=given.weights[:0, :1], rows=given.rows[:0], counts=torch.zeros_like(given.counts)
    )
    *made, low, scales = forward(empty, scaling, True)
    found = backward(empty, scaling, (low, scales), made)
    assert [tuple(each.shape) for each in (*made, found[0])] == [(0, HIDDEN), (0, WIDTH), (0, WIDTH), (0, HIDDEN)]
    assert all(not each.any() for each in found)


@ALL
@pytest.mark.parametrize("gated", [False, True])
def test_fake_tensors_match_real_ones(scaling: str, gated: bool) -> None:
    def described(results: list[Tensor]) -> list[tuple[Any, ...]]:
        return [(tuple(tensor.shape), tensor.dtype, tensor.stride()) for tensor in results]

    given = case(torch.bfloat16, gated=gated, biased=gated)
    made = forward(given, scaling, True)
    found = backward(given, scaling, (made[-2], made[-1]), made)
    with FakeTensorMode() as mode:
        bank = {name: None if each is None else mode.from_tensor(each) for name, each in given.bank.items()}
        fake = Case(*(mode.from_tensor(each) for each in given[:5]), bank, given.activation)  # type: ignore[arg-type]
        fakes = forward(fake, scaling, True)
        assert described(fakes) == described(made)
        assert described(backward(fake, scaling, (fakes[-2], fakes[-1]), fakes)) == described(found)


@ALL
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("gated", "biased", "top_k", "keeps"), [(True, False, 4, False), (True, True, 1, True), (False, True, 2, True)])
def test_stated_scratch_is_what_the_operations_allocate(
    scaling: str, packed: bool, gated: bool, biased: bool, top_k: int, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In addition to their results: of the code that CUDA runs in bf16, on tensors without data."""
    kernel = pytest.importorskip("megakernels.ops.fp8_experts.kernel")
    linear = pytest.importorskip("megakernels.ops.fp8_linear.kernel")
    moe, plan = pytest.importorskip("megakernels.ops.moe.kernel"), pytest.importorskip("megakernels.ops.moe.kernel_plan")
    monkeypatch.setitem(device._chosen, "kernels", "triton")
    monkeypatch.setattr(device, "runs_triton", lambda *_: True)
    for owner in (kernel, linear, moe, plan):
        for name in [name for name in vars(owner) if name.endswith("_kernel")]:
            monkeypatch.setattr(owner, name, Idle())
    monkeypatch.setattr(products, "has_grouped_product", lambda *_: True)
    with FakeTensorMode():
        tokens, count, hidden, width = 40, 6, 160, 96

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16)

        rows = torch.empty(tokens * top_k, dtype=torch.int32)
        up, down = empty(count, width, hidden), empty(count, hidden, width)
        gate = empty(count, width, hidden) if gated else None
        biases = (empty(count, width) if gated else None, empty(count, width), empty(count, hidden)) if biased else (None, None, None)
        weights, counts = torch.empty(tokens, top_k), torch.empty(count, dtype=torch.int32)
        bank = (gate, up, down, "swiglu" if gated else "relu2", scaling)
        low = list[Tensor | None]()
        if packed:
            kinds = (gate, up, down)
            low += [None if each is None else packed_rows(each, scaling) for each in kinds]
            low += [None if each is None else torch.empty(count * each.shape[2] if scaling == "rows" else 1) for each in kinds]
        numbers = numbers_for(scaling, 2 + gated)
        operands: tuple[Any, ...] = (empty(tokens, hidden), weights, rows, counts, *bank, keeps, *biases, None, low, numbers)
        made = check("_fp8_experts", operands)
        kept = (made[-2], made[-1]) if keeps else (operands[0], None)
        first = (empty(tokens, hidden), *kept, weights, rows, counts, made[1] if gated else None, made[1 + gated])
        check("_fp8_experts_backward", (*first, *bank, *biases, None, low, numbers))


def packed_rows(stack: Tensor, scaling: str) -> Tensor:
    """Room for packed matrices."""
    return torch.empty((stack.shape[0] * stack.shape[1], packed_columns(stack.shape[2], scaling)), dtype=torch.uint8)


def check(name: str, operands: tuple[Any, ...]) -> list[Tensor]:
    with Peak(operands) as counted:
        results: list[Tensor] = getattr(module, name)._init_fn(*operands)
    inside = counted.peak - sum(tensor.nbytes for tensor in tree_leaves(results))
    assert inside == scratch_bytes(f"megakernels.{name.removeprefix('_')}.default", operands), name
    return results


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda given: forward(given, "columns", False), "scaling = columns"),
        (lambda given: forward(given._replace(rows=given.rows[:3]), "rows", False), "rows [N·k]"),
        (lambda given: forward(given, "rows", False, given.x.double()), "one dtype"),
        (lambda given: backward(given, "rows", (given.x[:2], None), forward(given, "rows", False)), "grad_y must be"),
        (lambda given: backward(given, "rows", (given.x, torch.ones(3)), forward(given, "rows", False)), "with its scales"),
    ],
)
def test_what_does_not_fit_is_refused(change: Callable[[Case], Any], said: str) -> None:
    with pytest.raises(ValueError, match="fp8_experts") as caught:
        change(case(torch.float32, gated=True, biased=False))
    assert said in str(caught.value)


def test_widths_that_tensor_cores_do_not_read_are_refused() -> None:
    given = case(torch.float32, gated=False, biased=False)
    odd = given._replace(bank={**given.bank, "up": torch.ones(EXPERTS, 40, HIDDEN), "down": torch.ones(EXPERTS, HIDDEN, 40)})
    with pytest.raises(ValueError, match="F = 40"):
        forward(odd, "rows", False)


def test_values_that_are_not_finite_reach_the_result() -> None:
    """So that the loss shows them."""
    for value in (float("inf"), float("nan")):
        for scaling in ("tensor", "rows"):
            given = case(torch.float32, gated=True, biased=False)
            given.x[2, 3] = value
            assert not forward(given, scaling, False)[0][2].isfinite().any()
