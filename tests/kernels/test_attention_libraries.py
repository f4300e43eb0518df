"""Attention's forward by libraries: supported inputs of each, and arguments of its call, on tensors without storage."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megakernels import use_kernels
from megakernels.ops.attention import choice, vendor
from megakernels.ops.attention.inputs import Attention
from megakernels.ops.attention.reference import made_like
from megakernels.ops.attention.vendor import Machine, library_of

HOPPER, AMPERE, TURING = (Machine(capability, 91000, True) for capability in ((9, 0), (8, 0), (7, 5)))
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("machine", "widths", "settings", "expected"),
    [
        (HOPPER, (128, 128), {}, "cudnn"),
        (Machine((10, 0), 91000, True), (64, 64), {}, "cudnn"),
        (HOPPER, (96, 64), {}, "cudnn"),
        (HOPPER, (256, 256), {}, "cudnn"),
        (HOPPER, (256, 256), {"window": True}, "flash"),
        (Machine((10, 0), 91000, True), (256, 256), {}, "flash"),
        (HOPPER, (192, 128), {}, None),
        (HOPPER, (128, 128), {"window": True}, "flash"),
        (HOPPER, (96, 64), {"window": True}, None),
        (HOPPER, (128, 128), {"packed": True}, None),
        (HOPPER, (100, 100), {}, None),
        (HOPPER, (128, 124), {}, None),
        (HOPPER, (264, 264), {}, None),
        (HOPPER, (128, 128), {"num_positions": 1}, None),
        (HOPPER, (128, 128), {"dtype": torch.float32}, None),
        (HOPPER, (128, 128), {"dtype": torch.float16}, "cudnn"),
        (HOPPER._replace(cudnn_version=None), (128, 128), {}, "flash"),
        (HOPPER._replace(cudnn_version=8907), (128, 128), {}, "flash"),
        (HOPPER._replace(cudnn_version=None, has_flash=False), (128, 128), {}, None),
        (AMPERE, (128, 128), {}, "flash"),
        (AMPERE, (96, 64), {}, None),
        (Machine((12, 0), 91000, True), (128, 128), {}, "flash"),
        (TURING, (64, 64), {}, None),
    ],
)
def test_the_library_of_a_shape(machine: Machine, widths: tuple[int, int], settings: dict[str, Any], expected: str | None) -> None:
    given = {"dtype": BF16, "num_positions": 4096, "window": False, "packed": False} | settings
    width, value_width = widths
    assert library_of(machine, width=width, value_width=value_width, **given) == expected


class Calls(TorchDispatchMode):
    """Operations of attention that run meanwhile, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if "attention" in str(func):
            self.found.append((func._schema.name, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def operands(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Slices of wider rows, as a projection's split makes them."""
    return [torch.empty(*shape[:-1], shape[-1] + 8, dtype=BF16, device="meta")[..., :-8] for shape in shapes]


@pytest.mark.parametrize(
    ("library", "value_width", "window"), [("cudnn", 64, None), ("cudnn", 96, None), ("flash", 96, None), ("flash", 96, 33)]
)
def test_calls_and_results(library: vendor.Library, value_width: int, window: int | None) -> None:
    """Causal, scaled, without dropout; key heads as they are, not repeated; out and lse as the operation saves them."""
    q, k, v = operands((2, 130, 8, 96), (2, 130, 2, 96), (2, 130, 2, value_width))
    given = Attention(q, k, v, None, 0.3, window)
    with Calls() as calls:
        out, lse = vendor.FORWARDS[library](given)
    for found, expected in zip((out, lse), made_like(given), strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.is_contiguous()
    ((name, args, settings),) = calls.found
    named = dict(
        zip([each.name for each in getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema.arguments], args, strict=False)
    )
    named |= settings
    assert (named["is_causal"], named.get("dropout_p", 0.0), named["scale"]) == (True, 0.0, 0.3)  # dispatch omits default arguments
    heads = 1 if library == "cudnn" else 2
    assert [named[each].shape[heads] for each in ("query", "key", "value")] == [8, 2, 2]
    assert all(named[each]._base is tensor._base for each, tensor in zip(("query", "key", "value"), (q, k, v), strict=True))
    if library == "cudnn":
        assert named.get("attn_bias") is None
        assert named["compute_log_sumexp"]
    else:
        assert (named["cum_seq_q"], named["cum_seq_k"], named["max_q"], named["max_k"]) == (None, None, 130, 130)
        assert (named.get("window_size_left"), named.get("window_size_right")) == ((None, None) if window is None else (32, 0))


def test_rows_are_read_as_they_are_where_they_are_aligned() -> None:
    rows = torch.empty(2, 9, 3, 40, dtype=BF16, device="meta")
    assert vendor.is_aligned(rows)
    assert vendor.is_aligned(rows[:, 1:, 1:, 8:24])
    assert vendor.is_aligned(rows[:1].expand(4, -1, -1, -1))
    assert not vendor.is_aligned(rows[..., 4:12])  # begins within 16 bytes
    assert not vendor.is_aligned(rows[..., 1:].contiguous())
    assert not vendor.is_aligned(rows.mT)


def test_a_cuda_tensor_goes_to_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "machine_of", lambda _: HOPPER)
    use_kernels("triton")
    with FakeTensorMode():
        q, k = (torch.empty(2, 9, heads, 64, dtype=BF16, device="cuda") for heads in (4, 2))
        plain = Attention(q, k, k, None, 0.3, None)
        assert vendor.library_for(plain) == "cudnn"
        assert vendor.library_for(plain._replace(starts=torch.empty(2, 9, dtype=torch.int32, device="cuda"))) is None
        assert vendor.library_for(plain._replace(k=torch.empty(2, 9, 2, 68, dtype=BF16, device="cuda"))) is None
        with Calls() as calls:
            out, lse = choice.forward(plain._replace(window=4))
        assert [name for name, _, _ in calls.found] == ["aten::_flash_attention_forward"]
        assert (out.shape, out.device, lse.shape, lse.dtype) == (q.shape, q.device, (2, 4, 9), torch.float32)


def test_off_cuda_there_is_no_library() -> None:
    (q,) = operands((1, 8, 2, 64))
    assert vendor.library_for(Attention(q, q, q, None, 0.1, None)) is None


@pytest.mark.parametrize(("name", "arguments"), [("_flash_attention_forward", 10), ("_scaled_dot_product_cudnn_attention", 8)])
def test_torch_has_the_calls(name: str, arguments: int) -> None:
    """torch's libraries take as many positional arguments as are given."""
    schema = getattr(torch.ops.aten, name).default._schema
    assert len([each for each in schema.arguments if not each.kwarg_only]) == arguments
