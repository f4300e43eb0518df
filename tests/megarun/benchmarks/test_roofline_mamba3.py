"""The roofline's counts of Mamba-3's scan, whose launches may process a part of the sequence each."""

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megakernels import use_kernels
from megakernels.ops.mamba3 import facts
from megaplan.devices import load_device

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # rooflines

pytest.importorskip("triton")
from rooflines.own import Bodies
from rooflines.work import Work

pytestmark = pytest.mark.runtime


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    use_kernels("triton")
    with FakeTensorMode(), torch.no_grad():
        yield


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def work(name: str, *args: Any) -> Work:
    func = getattr(torch.ops.megakernels, name).default
    return Bodies(load_device("h200")).work_of(func, args, func(*args))


def operands_of(batch: int, length: int, heads: int, groups: int) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Operands of Mamba-3's scan of 4 ranks and 32 angles, as wide as its kernels take, and what it saves every 64 positions."""
    x, keys, steps = empty(batch, length, heads, 64), empty(batch, length, 4, groups, 128), empty(batch, length, heads)
    weights = (*(empty(heads, 4, 128) for _ in range(2)), *(empty(heads) for _ in range(2)), *(empty(heads, 4, 64) for _ in range(3)))
    given = x, x.clone(), keys, keys.clone(), steps, steps.clone(), steps.clone(), empty(batch, length, 32), *weights, None
    segments = batch, length // 64, heads
    return given, (empty(*segments, 64, 128), empty(*segments, 32, dtype=torch.float32))


@pytest.mark.parametrize("random", [Random(seed) for seed in range(4)])
def test_the_scan_computes_tiles_of_64_rows(random: Random) -> None:
    batch, groups, per_group, segments = (random.randint(1, 3) for _ in range(4))
    given, saved = operands_of(batch, 64 * segments, groups * per_group, groups)
    tiles = batch * groups * per_group * segments * 4
    scores, values, states = 2 * 64 * 64 * 128, 2 * 64 * 64 * 64, 2 * 64 * 64 * 128
    found = work("mamba3", *given, 16, 64, False)
    assert (found.product_flops, found.inside, found.launches) == ({"bf16": tiles * (scores + values + 2 * states)}, "triton", 5)
    back = work("mamba3_backward", given[0].clone(), *given, *saved, 16, 64, False, [True] * 15)
    assert back.product_flops == {"bf16": tiles * (5 * scores + 3 * values + 6 * states)}


def test_a_scan_in_parts_moves_what_it_moves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for intermediates between parts, and parameters."""
    given, saved = operands_of(2, 512, 8, 2)
    operands = (*given, 16, 64, False), (given[0].clone(), *given, *saved, 16, 64, False, [True] * 15)
    whole = work("mamba3", *operands[0]), work("mamba3_backward", *operands[1])
    monkeypatch.setattr(facts, "STATES_BYTES", 1)
    parts = work("mamba3", *operands[0]), work("mamba3_backward", *operands[1])
    again = 2 * 4 * 2 * 8 * 64 * 128 + 2 * sum(each.nbytes for each in given[8:15])
    for once, several in zip(whole, parts, strict=True):
        more = several.launches - once.launches
        assert more >= 2 * 7
        assert 0 < several.num_bytes - once.num_bytes < more * again
