"""What the plain-torch operations need inside themselves, beside what the estimate counts: found from shapes, on any machine.

Neither estimate nor trace looks inside an operation of `megakernels`: fp32 copies of its inputs and products of them are born and gone
between two moments that either counts. On a GPU they are inside torch's peak. Here one rank is traced, every operation's own Python is run
once more on the fake operands of each call, and its highest moment is set on top of what was alive around the call. An operation that has
a Triton kernel counts with its results alone, and so does what CUDA's own kernels take inside one operation of torch. What an operation
states of its inside the trace has already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from megakernels import scratch_bytes
from megakernels.ops.moe import grouped
from megaplan.columns import Phase
from megarun.job.job import Job
from megarun.trace.owners import Owners
from megarun.trace.rank import trace_rank
from megarun.trace.replaced import replaced
from megarun.trace.tracker import plain_tensors

BLOCK_BYTES = 512
"""Sizes are multiples of the CUDA allocator's smallest block."""
ON_INDICES = ("megakernels.dispatch_plan.default", "megakernels.arrival_plan.default")
"""They sort a few bytes a token, and how many of each kind is not in the shapes."""


@dataclass(frozen=True, slots=True)
class PhaseScratch:
    """One phase with its operations' insides.

    Attributes:
        trace_bytes: Peak of the trace, which looks into no operation.
        with_scratch_bytes: Peak with them; at least the trace's.
        op: The operation in which that peak lies, empty if it is the trace's.
        scratch_bytes: What that operation has alive then, beside its operands.
    """

    trace_bytes: int
    with_scratch_bytes: int
    op: str
    scratch_bytes: int


class Inside(NamedTuple):
    """An operation's own storages: at its highest moment, and when it returns."""

    peak_bytes: int
    returned_bytes: int


def phases_with_scratch(job: Job, workspace_bytes: int) -> dict[Phase, PhaseScratch]:
    """Trace rank 0 with every operation's inside; as `trace_rank`, in a process that has no process group."""
    highest: dict[Phase, tuple[int, str, int]] = {}
    known: dict[Any, Inside] = {}
    ran = Owners.ran

    def looked_into(owners: Owners, op: str, operands: tuple[Any, ...]) -> None:
        ran(owners, op, operands)
        own = _own_python(op)
        if own is None or scratch_bytes(op, operands):
            return
        key = op, tuple(_signature(operand) for operand in operands)
        if key not in known:
            known[key] = inside(own, operands)
        found = known[key]
        total = owners.live.live_bytes - found.returned_bytes + found.peak_bytes
        if total > highest.get(owners.live.phase, (0, "", 0))[0]:
            highest[owners.live.phase] = total, op.removesuffix(".default"), found.peak_bytes

    with replaced(Owners, ran=looked_into), _grouped_products_of_fakes():
        traced = trace_rank(job, 0, workspace_bytes=workspace_bytes).phases
    found = {}
    for phase, size in traced.items():
        total, op, scratch = highest.get(phase, (0, "", 0))
        found[phase] = PhaseScratch(size, total, op, scratch) if total > size else PhaseScratch(size, size, "", 0)
    return found


def inside(run: Callable[..., Any], operands: tuple[Any, ...]) -> Inside:
    """Run an operation's Python, count the storages that it makes."""
    counter = _Counter(operands)
    with torch.no_grad(), counter:
        made = run(*operands)
        returned = counter.live_bytes
    del made
    return Inside(counter.peak_bytes, returned)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's mode has no types
    def __init__(self, operands: tuple[Any, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage()._cdata for tensor in plain_tensors(operands)}
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in plain_tensors(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
                self._known.add(key)
                weakref.finalize(storage, self._died, key, size)
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return out

    def _died(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


def _own_python(op: str) -> Callable[..., Any] | None:
    """The function of an operation of ours that has no kernel; None for any other."""
    if not op.startswith("megakernels.") or op in ON_INDICES:
        return None
    run: Callable[..., Any] = OPDEFS[op.removesuffix(".default").replace(".", "::", 1)]._init_fn
    return None if "runs_triton" in run.__code__.co_names else run


def _signature(operand: Any) -> Any:
    if isinstance(operand, Tensor):
        return tuple(operand.shape), operand.stride(), operand.dtype
    return tuple(operand) if isinstance(operand, list) else operand


@contextmanager
def _grouped_products_of_fakes() -> Iterator[None]:
    """Grouped products by their results alone: their own path asks for addresses and counts, which fakes have not."""

    def times(groups: grouped.RowGroups, rows: Tensor, matrices: Tensor) -> Tensor:  # noqa: ARG001
        return rows.new_empty(rows.shape[0], matrices.shape[2])

    def outer(groups: grouped.RowGroups, left: Tensor, right: Tensor) -> Tensor:
        return left.new_empty(groups._counts.shape[0], left.shape[1], right.shape[1])

    with replaced(grouped.RowGroups, times=times, outer=outer):
        yield
