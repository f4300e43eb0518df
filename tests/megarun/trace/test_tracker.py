"""The tracker alone: lives of storages, phases, replay; and that counting changes nothing."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile

from megakernels import rms_norm
from megaplan.columns import Phase
from megarun.trace.tracker import LiveBytes

pytestmark = pytest.mark.runtime
KIB = 1024


class NoObserver:
    """Says nothing about any storage."""

    def on_alloc(self, record: Any, operands: Any) -> None:
        """Leave the record as it is."""

    def on_accumulate(self, total: Any, part: Any) -> None:
        """Ignore."""

    def on_run(self, op: str, operands: Any) -> None:
        """Ignore."""


def tracker(granule_bytes: int = 1, **options: bool) -> LiveBytes:
    return LiveBytes(NoObserver(), granule_bytes, **options)


@pytest.mark.parametrize("fake", [False, True])
def test_a_storage_counts_once_from_allocation_to_free(fake: bool) -> None:
    """Views add nothing, and keep their storage alive."""
    live = tracker()
    with FakeTensorMode() if fake else nullcontext(), live:
        x = torch.empty(256)
        assert live.live_bytes == KIB
        part = x.view(16, 16)[3:5]
        assert live.live_bytes == KIB
        del x
        assert live.live_bytes == KIB
        y = torch.empty(128, dtype=torch.bfloat16)
        assert live.live_bytes == KIB + 256
        del part
        assert live.live_bytes == 256
        del y
    assert live.live_bytes == 0


def test_resizes_count() -> None:
    """Gathered parameters are freed and reallocated by resizing their storage."""
    live = tracker()
    with FakeTensorMode(), live:
        x = torch.empty(256)
        x.untyped_storage().resize_(0)
        assert live.live_bytes == 0
        x.untyped_storage().resize_(2 * KIB)
        assert live.live_bytes == 2 * KIB
        del x
    assert live.live_bytes == 0


def test_meta_tensors_and_tensors_from_outside_do_not_count() -> None:
    live = tracker()
    outside = torch.ones(256)
    with live:
        kept = torch.empty(256, device="meta"), outside[3:5]
        assert live.live_bytes == 0
        del kept


def test_a_trace_on_fake_tensors_ignores_real_ones() -> None:
    live = tracker(fake_only=True)
    with live:
        kept = torch.ones(256)
        assert live.live_bytes == 0
        del kept


def test_sizes_round_up_to_the_granule() -> None:
    live = tracker(512)
    with live:
        small = torch.empty(1), torch.empty(129)
        assert live.live_bytes == 512 + 1024
        del small


def test_phases_have_their_own_peaks_and_replay_gives_their_storages() -> None:
    """A phase starts with what is alive, and its peak is not where it starts or ends."""
    live = tracker()
    with live:
        kept = torch.empty(256)
        live.enter_phase(Phase.FORWARD_BACKWARD)
        temporary = torch.empty(512)
        del temporary
        live.enter_phase(Phase.OPTIMIZER)
        del kept
    at_peaks = live.at_peaks()
    assert {phase: sorted(size for _, size in found) for phase, found in at_peaks.items()} == {
        Phase.INIT: [KIB],
        Phase.FORWARD_BACKWARD: [KIB, 2 * KIB],
        Phase.OPTIMIZER: [KIB],
    }


WEIGHT, SCALE = torch.eye(64), torch.ones(64)
USES = {
    "product": lambda x: x * 3,
    "addition": lambda x: x + 1,  # hands the gradient on without a copy
    "view": lambda x: linear(x.view(2, 32, 64), WEIGHT),  # its gradient is a view, whose storage something else holds too
    "own operation": lambda x: rms_norm(x, SCALE, 1e-5),
}


def allocations(uses: tuple[str, ...], *, tracked: bool) -> Counter[int]:
    """Sizes that one backward allocates, as torch's own profiler sees them."""
    shared = torch.randn(64, 64, requires_grad=True) * 2
    outputs = [USES[use](shared) for use in uses]
    gradients = [torch.ones_like(output) for output in outputs]
    with tracker() if tracked else nullcontext(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        torch.autograd.backward(outputs, gradients)
    events = measured.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = (event.nbytes() for event in events if event.name() == "[memory]")
    return Counter(size for size in sizes if size >= 64 * 64 * 4)


@pytest.mark.parametrize(
    "uses",
    [
        ("product", "product"),
        ("product", "product", "product"),
        ("view", "view"),
        ("view", "view", "view"),
        ("product", "addition"),
        ("addition", "product"),
        ("view", "product"),
        ("product", "view"),
        ("own operation", "own operation", "addition"),
    ],
)
def test_counting_does_not_change_what_backward_allocates(uses: tuple[str, ...]) -> None:
    """Autograd adds gradients in place where it may, except under a dispatch mode: the tracker makes up for that."""
    assert allocations(uses, tracked=True) == allocations(uses, tracked=False)


def test_sums_in_place_are_right() -> None:
    """The sum that the tracker makes in place is the one autograd would make."""

    def gradient(*, tracked: bool) -> Tensor:
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        with tracker() if tracked else nullcontext():
            y = x * 2
            (y * 3 + y * y + y.sin()).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(tracked=True), gradient(tracked=False))
