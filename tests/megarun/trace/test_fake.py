"""A rank that is played on fake tensors needs no device, also on a machine that has one."""

import pytest
import torch
from torch import nn

from megarun.trace.fake import lone_rank

pytestmark = pytest.mark.runtime


def test_a_played_rank_does_not_start_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's step asks a device that is there whether it captures a graph."""

    def start() -> None:
        raise RuntimeError("the device was asked")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", start)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", start)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    with pytest.raises(RuntimeError, match="the device was asked"):
        optimizer.step()
    with lone_rank(0, 1):
        optimizer.step()
    assert parameter[0].item() < 0
