"""Attention by FlashAttention-4: its table, its bytes, its calls and what runs without it, with a package in plain torch in its place."""

import importlib.metadata
import random
import sys
from collections.abc import Iterator
from inspect import signature
from types import ModuleType
from typing import Any

import fake_flash4
import pytest
import torch
from torch import Tensor

from megakernels import attention, use_kernels, use_libraries
from megakernels.facts import KernelScratch
from megakernels.libraries import FLASH4, LIBRARIES, Loaded, loaded
from megakernels.ops.attention import choice
from megakernels.ops.attention.facts import AttentionSizes
from megakernels.ops.attention.flash4 import calls
from megakernels.ops.attention.flash4.facts import BACKWARD_BLOCKS, refusal
from megakernels.ops.attention.inputs import Attention

BF16 = torch.bfloat16
PLAIN: dict[str, Any] = {"shared": False, "whole": True, "packed": False, "relations": False, "masked": False}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package in plain torch, on a device that has it; it runs on the CPU."""
    monkeypatch.setattr(calls, "_is_able", lambda _: True)
    monkeypatch.setattr(calls, "loaded", lambda _: Loaded(fake_flash4, None))  # type: ignore[arg-type]
    monkeypatch.setattr(choice, "runs_kernels", choice.chooses_kernels)
    fake_flash4.CALLS.clear()
    use_kernels("triton")
    use_libraries([FLASH4])
    yield
    use_libraries([])


def inputs(
    *shape: int, groups: int, width: int, value: int, sinks: bool = False, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    batch, length, heads = shape
    made = torch.Generator().manual_seed(length + width)
    q, k, v = (
        torch.randn(batch, length, each, wide, generator=made).to(dtype).requires_grad_()
        for each, wide in ((heads, width), (groups, width), (groups, value))
    )
    return q, k, v, torch.randn(heads, generator=made).requires_grad_() if sinks else None


@pytest.mark.parametrize(
    ("widths", "settings", "reason"),
    [
        ((128, 128), {}, None),
        ((128, 128), {"shared": True}, None),
        ((64, 64), {"shared": True}, None),
        ((256, 256), {"shared": True}, None),
        ((96, 64), {}, None),
        ((192, 128), {}, None),
        ((96, 64), {"shared": True}, "shares no key heads"),
        ((64, 32), {}, "not compiled"),
        ((224, 192), {}, "not compiled"),
        ((64, 128), {}, "not compiled"),
        ((264, 264), {}, "not compiled"),
        ((100, 100), {}, "not compiled"),
        ((128, 128), {"packed": True}, "documents on the host"),
        ((128, 128), {"relations": True}, "class of the key"),
        ((128, 128), {"masked": True}, "chosen keys"),
        ((128, 128), {"whole": False}, "pieces of a sequence"),
    ],
)
def test_the_table(widths: tuple[int, int], settings: dict[str, bool], reason: str | None) -> None:
    found = refusal(*widths, 2, **{**PLAIN, **settings})
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)
    assert refusal(*widths, 4, **{**PLAIN, **settings}) == "it has no fp32"


def test_sizes_hold_the_table_and_the_arrays_of_the_package() -> None:
    """Random sizes: bytes inside are those of the arrays that the package allocates, launches its kernels; others are unchanged."""
    draw, taken = random.Random(4), 0
    for _ in range(400):
        groups, share = draw.choice([1, 2, 4]), draw.choice([1, 1, 4])
        width = draw.choice([8, 64, 72, 96, 128, 160, 192, 256])
        value = draw.choice([width, width, 64, 128])
        batch, length = draw.randint(1, 3), draw.choice([1, 2, 63, 128, 1000, 4096])
        flags = [draw.random() < share for share in (0.2, 0.15, 0.3, 0.15)]
        window = draw.choice([None, 17])
        sizes = AttentionSizes(batch, length, length, groups * share, groups, width, value, draw.choice([2, 2, 2, 4]), window, *flags)
        library = sizes._replace(library=True)
        assert not sizes.in_library
        if sizes.refusal is not None:
            assert library.in_library is False
            assert library.inside(4) == sizes.inside(4)
            assert library.products() == sizes.products() or not sizes.accepted
            continue
        taken += 1
        assert sizes.accepted
        q, k, v = (
            torch.empty(batch, length, each, wide, dtype=BF16, device="meta")
            for each, wide in ((groups * share, width), (groups, width), (groups, value))
        )
        arrays = fake_flash4.scratch(q, k, v)
        assert library.inside(4) == KernelScratch(0, sum(each.nbytes for each in arrays))
        passes = library.kernels(library.work(), batch * length)
        assert passes is not None
        post = 1 if share == 1 else 3  # kernels that round the fp32 sums; counters and shared sums are set to zero, dq by the kernel of δ
        assert passes[1].launches == 2 + post + len(arrays) - 3
        assert passes[1].flops == passes[0].flops // (width + value) * (3 * width + 2 * value)
        assert {each.kind for each in (*passes[0].kinds, *passes[1].kinds)} == {"flash4.forward", "flash4.backward"}
    assert taken > 60


def test_blocks_cover_every_width() -> None:
    assert list(BACKWARD_BLOCKS) == sorted(BACKWARD_BLOCKS)
    assert all(not rows % 64 and not multiple % 32 for rows, _, multiple in BACKWARD_BLOCKS.values())


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"groups": 2, "width": 16, "value": 16}, {}),
        ({"groups": 4, "width": 80, "value": 64}, {"window": 5}),
        ({"groups": 1, "width": 16, "value": 16, "sinks": True}, {"window": 3}),
        ({"groups": 2, "width": 16, "value": 16}, {"cap": 2.0}),
    ],
)
@pytest.mark.usefixtures("package")
def test_values_gradients_and_what_is_saved(sizes: dict[str, Any], settings: dict[str, Any]) -> None:
    """Out, gradients and the saved tensors are those without the package; each pass is one call."""
    tensors = inputs(2, 33, 4, **sizes)
    wanted = [each for each in tensors if each is not None]

    def run() -> tuple[Tensor, list[tuple[Any, ...]], tuple[Tensor, ...]]:
        saved: list[tuple[Any, ...]] = []

        def keep(each: Tensor) -> Tensor:
            saved.append((each.shape, each.stride(), each.dtype))
            return each

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            out = attention(*tensors[:3], 0.3, settings.get("window"), None, tensors[3], cap=settings.get("cap"))
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
        return out, saved, torch.autograd.grad(out, wanted, cotangent)

    found = run()
    window = settings.get("window")
    expected = {"sinks": tensors[3] is not None, "window": (None, None) if window is None else (window - 1, 0)}
    assert [name for name, _ in fake_flash4.CALLS] == ["forward", "backward"]
    assert [{key: call[key] for key in expected} for _, call in fake_flash4.CALLS] == [expected, expected]
    assert [call["cap"] for _, call in fake_flash4.CALLS] == [settings.get("cap"), settings.get("cap", 0.0)]
    use_libraries([])
    plain = (each.detach().double().requires_grad_() for each in wanted)
    q, k, v, *sinks = plain
    out = attention(q, k, v, 0.3, window, None, *(sinks or [None]), cap=settings.get("cap"))
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(BF16).double()
    for mine, exact in zip((found[0], *found[2]), (out, *torch.autograd.grad(out, (q, k, v, *sinks), cotangent)), strict=True):
        assert (mine.double() - exact).norm() < 8e-3 * exact.norm()  # two roundings to bf16
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(choice, "runs_kernels", lambda _: False)
        own = run()
    assert found[1] == own[1]


@pytest.mark.usefixtures("package")
def test_what_it_refuses_goes_to_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = inputs(2, 33, 4, groups=2, width=16, value=16)
    given = Attention(q.detach(), k.detach(), v.detach(), torch.zeros(2, 33, dtype=torch.int32), 0.3, None)
    own: list[Attention] = []
    monkeypatch.setattr(choice, "kernel_forward", lambda each, _: (own.append(each), (each.q, each.q))[1])
    choice.forward(given)
    assert own == [given]
    assert not fake_flash4.CALLS
    assert not calls.runs(given._replace(starts=None, q=torch.zeros(2, 33, 4, 24, dtype=BF16)[..., 4:20]))  # begins within 16 bytes
    assert calls.runs(given._replace(starts=None))


@pytest.mark.usefixtures("package")
def test_scratch_is_stated_as_it_is_allocated() -> None:
    tensors = inputs(2, 33, 4, groups=2, width=16, value=16, sinks=True)
    q, k, v, sinks = (each.detach() for each in tensors if each is not None)
    given = Attention(q, k, v, None, 0.3, None, sinks)
    out, lse = choice.forward(given)
    needs = (True, True, True, True, False)
    choice.backward(out, given, out, lse, needs)
    assert choice.forward_scratch(given) == 0
    assert choice.backward_scratch(out, given, out, lse, needs) == sum(each.nbytes for each in fake_flash4.SCRATCH)


def module(name: str, **functions: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(functions)
    return made


@pytest.mark.parametrize(
    ("version", "content", "reason"),
    [
        (None, None, "not installed"),
        ("4.1", None, "version 4.1 is installed, and the calls and bytes of 4.0.0b36 are known"),
        ("4.0.0b36", None, "its import fails: ModuleNotFoundError"),
        ("4.0.0b36", {"_flash_attn_fwd": len}, "it has no _flash_attn_bwd"),
        ("4.0.0b36", {"_flash_attn_fwd": len, "_flash_attn_bwd": len}, None),
    ],
)
def test_a_package_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, version: str | None, content: dict[str, Any] | None, reason: str | None
) -> None:
    def found(_: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    path = LIBRARIES[FLASH4].module
    parts = path.split(".")
    for count in range(1, len(parts)):
        name = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, name, module(name, __path__=[]))
    monkeypatch.setitem(sys.modules, path, None if content is None else module(path, **content))  # None: the import fails
    loaded.cache_clear()
    try:
        result = loaded(FLASH4)
    finally:
        loaded.cache_clear()
    assert (result.module is None) == (reason is not None)
    assert (result.reason or "").startswith(reason or "")


def test_the_parameters_are_the_package_s() -> None:
    """The functions of an installed package have every parameter that is given."""
    pytest.importorskip("flash_attn.cute.interface")
    package: Any = loaded(FLASH4).module
    for name in LIBRARIES[FLASH4].functions:
        assert set(signature(getattr(fake_flash4, name)).parameters) <= set(signature(getattr(package, name)).parameters)
