"""The way of optimizer state between host memory and the device: what the device holds at a time, and in which order it is copied."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from megarun.optim.adamw import AdamW
from megarun.optim.host_state import HostState, Unit

pytestmark = pytest.mark.runtime
CPU = torch.device("cpu")
SIZES = (100, 700, 130, 0, 900, 128)
"""Elements of the parameters, fp32: one is empty, as the shard of a last rank may be."""


def made(fraction: float = 1.0) -> tuple[list[nn.Parameter], list[AdamW], HostState]:
    parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    optimizers = [AdamW([([parameter], 0.0)], 1e-3) for parameter in parameters]
    host = HostState([Unit(optimizer, [parameter]) for optimizer, parameter in zip(optimizers, parameters, strict=True)], fraction, CPU)
    for optimizer, parameter in zip(optimizers, parameters, strict=True):
        optimizer.state[parameter] = optimizer.first_state(parameter, host.of(parameter))
    return parameters, optimizers, host


def test_an_update_reads_and_writes_what_is_on_the_host() -> None:
    """Two rounds of additions through the buffer reach host memory, and nothing else is touched."""
    parameters, optimizers, host = made()
    stored = [optimizer.state[parameter]["exp_avg"] for optimizer, parameter in zip(optimizers, parameters, strict=True)]
    for round_ in (1, 2):
        with host.updating():
            for index, (optimizer, parameter) in enumerate(zip(optimizers, parameters, strict=True)):
                with host.lent([parameter]):
                    lent = optimizer.state[parameter]["exp_avg"]
                    assert lent is not stored[index]
                    assert torch.equal(lent, torch.full_like(lent, (round_ - 1) * (index + 1)))
                    lent += index + 1
                    optimizer.state[parameter]["exp_avg_sq"] -= index + 1
                assert optimizer.state[parameter]["exp_avg"] is stored[index]
    host.settle()
    for index, (optimizer, parameter) in enumerate(zip(optimizers, parameters, strict=True)):
        state = optimizer.state[parameter]
        assert torch.equal(state["exp_avg"], torch.full_like(state["exp_avg"], 2 * (index + 1)))
        assert torch.equal(state["exp_avg_sq"], torch.full_like(state["exp_avg"], -2 * (index + 1)))


def test_the_buffer_holds_two_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next unit arrives before this one is updated; neither is where the other is."""
    parameters, _, host = made()
    fetched: list[int] = []
    fetch = HostState._fetch
    monkeypatch.setattr(HostState, "_fetch", lambda self, index: (fetched.append(index), fetch(self, index))[1])
    sizes = [2 * (-(-4 * size // 512) * 512) for size in SIZES]
    assert host.unit_bytes == sizes
    assert host.num_bytes == sum(sizes)
    with host.updating():
        assert fetched == [0]
        buffer: Any = host._buffer
        assert len(buffer) == max(map(sum, pairwise(sizes)))
        for index, parameter in enumerate(parameters):
            with host.lent([parameter]):
                assert fetched == list(range(min(index + 2, len(SIZES))))
                places = [host._place(each) for each in range(index, min(index + 2, len(SIZES)))]
                spans = [(place.data_ptr(), place.data_ptr() + len(place)) for place in places if len(place)]
                assert all(first[1] <= second[0] for first, second in zip(sorted(spans), sorted(spans)[1:], strict=False))
    assert host._buffer is None


def test_a_fraction_leaves_the_last_units_where_they_are() -> None:
    parameters, optimizers, host = made(0.3)
    held = [host.has(parameter) for parameter in parameters]
    assert held == [True, True, False, False, False, False]
    with host.updating(), host.lent([parameters[4]]):
        assert optimizers[4].state[parameters[4]]["exp_avg"].numel() == SIZES[4]


def test_state_is_lent_in_an_update_alone() -> None:
    parameters, _, host = made()
    with pytest.raises(RuntimeError, match="outside an update"), host.lent([parameters[0]]):
        pass


def test_a_failed_update_leaves_the_state_on_the_host() -> None:
    parameters, optimizers, host = made()
    stored = optimizers[0].state[parameters[0]]["exp_avg"]
    with pytest.raises(ZeroDivisionError), host.updating(), host.lent([parameters[0]]):
        raise ZeroDivisionError
    assert optimizers[0].state[parameters[0]]["exp_avg"] is stored
    assert host._buffer is None
