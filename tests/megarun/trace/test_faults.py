"""Planted faults: each is named in the report, and nothing is reported without one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from trace_checks import BF16

import megarun.engine.trainer
from megaplan.budget.peaks import build_budget
from megaplan.columns import Column
from megaplan.dtypes import DType
from megaplan.hosts.values import BlockLedger, LedgerTensor
from megarun.model.mlp import DenseBlock
from megarun.trace import kept, report
from megarun.trace.compare import RankComparison
from megarun.trace.rank import trace_rank

pytestmark = pytest.mark.runtime


@pytest.fixture
def differences(job_with: Any) -> Any:
    """Traces the small hybrid, and gives the names of its differences after checking that the report shows them."""

    def trace_differences() -> list[str]:
        job = job_with({"precision": BF16, "schedule.num_microbatches": 2})
        trace = trace_rank(job, 0)
        budget = build_budget(job.spec, job.inventory, job.layout).of_rank(0)
        text = " ".join(" ".join(report.lines([RankComparison(budget, trace)], job.spec.mesh, top=10)).split())
        names = [item.name for item in trace.differences]
        assert all(name in text for name in names)
        return names

    return trace_differences


class Saves(torch.autograd.Function):
    """The identity, saving a tensor that it does not need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Holds(Saves):
    """The same as an attribute of the context, which no hook on saved tensors sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.held = x * 2
        return x.clone()


def patched_body(monkeypatch: pytest.MonkeyPatch, wrap: Any) -> None:
    body = DenseBlock.body
    monkeypatch.setattr(DenseBlock, "body", lambda self, x: wrap(self, body(self, x)))


def test_without_a_fault_nothing_is_reported(differences: Any) -> None:
    assert differences() == []


def test_an_extra_saved_tensor(differences: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patched_body(monkeypatch, lambda _, x: Saves.apply(x))
    assert differences() == ["layers.3: working [2, 24, 32] bfloat16 by aten.mul.Tensor, saved by the block, is not in the ledger"]


@pytest.mark.slow
def test_a_tensor_held_by_a_context(differences: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patched_body(monkeypatch, lambda _, x: Holds.apply(x))
    assert differences() == [
        "layers.3: working [2, 24, 32] bfloat16 by aten.mul.Tensor, alive, not saved by autograd, is not in the ledger"
    ]


@pytest.mark.slow
def test_a_float32_copy_kept_alive(differences: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known twice: as kept by its forward, and as alive when the step has ended."""

    def keep(block: DenseBlock, x: Tensor) -> Tensor:
        object.__setattr__(block, "copy", x.detach().float())
        return x

    patched_body(monkeypatch, keep)
    made = "layers.3: working [2, 24, 32] float32 by aten._to_copy"
    assert differences() == [f"{made}, alive, not saved by autograd, is not in the ledger", f"{made}, is still alive after the step"]


@pytest.mark.slow
def test_a_buffer_not_released(differences: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clip, kept_alive = megarun.engine.trainer.clip_factor, []

    def clip_and_keep(*arguments: Any) -> Any:
        kept_alive.append(torch.empty(1000))
        return clip(*arguments)

    monkeypatch.setattr(megarun.engine.trainer, "clip_factor", clip_and_keep)
    assert differences() == ["stage: 2 × scratch [1000] float32 by aten.empty.memory_format, is still alive after the step"]


def test_a_ledger_entry_too_many(differences: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = kept.block_ledger

    def padded(spec: Any, name: str, block: Any, *rest: Any) -> BlockLedger:
        found = ledger(spec, name, block, *rest)
        if name != "layers.1":
            return found
        phantom = LedgerTensor("phantom", (2, 24, 64), DType.BF16, Column.ACTIVATIONS, "kept by out_proj")
        return BlockLedger((*found.saved, phantom), found.output)

    monkeypatch.setattr(kept, "block_ledger", padded)
    names = differences()
    assert names == ["layers.1: phantom [2, 24, 64] bf16, kept by out_proj in the ledger, is not in the trace"]


@pytest.mark.slow
def test_a_ledger_entry_of_the_wrong_size(differences: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are reported: the entry without a storage, and the storage without an entry."""
    ledger = kept.block_ledger

    def halved(spec: Any, name: str, block: Any, *rest: Any) -> BlockLedger:
        found = ledger(spec, name, block, *rest)
        saved = [
            LedgerTensor(t.name, (t.shape[0] // 2, *t.shape[1:]), t.dtype, t.column, t.why, t.basis, t.keepers) if t.name == "states" else t
            for t in found.saved
        ]
        return BlockLedger(tuple(saved), found.output)

    monkeypatch.setattr(kept, "block_ledger", halved)
    names = differences()
    assert len(names) == 4
    assert sum("states" in name and "is not in the trace" in name for name in names) == 2
    assert sum("megakernels.ssd, saved by the block, is not in the ledger" in name for name in names) == 1
    assert sum("megakernels.m2rnn, saved by the block, is not in the ledger" in name for name in names) == 1
