"""R-57: under schedules of several chunks per rank, a stage's output is whole until the backward of its microbatch has ended."""

from typing import Any
from weakref import ref

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from megarun.trace.rank import NUM_STEPS, trace_rank

pytestmark = pytest.mark.runtime
PP, VPP, NUM_MICROBATCHES = 2, 2, 4
KINDS = (
    "interleaved_1f1b",
    "dualpipev",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("looped_bfs", "interleaved_zero_bubble", "zbv")),
)


class Outputs:
    """The output of every forward of a rank's stages, and what is left of it when its backward begins and ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: dict[tuple[int, int], tuple[Any, Any, int]] = {}
        self.ended: list[tuple[int, int]] = []
        self._running = (-1, -1)
        forward, backward = PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk
        computing = PipelineStage.backward_maybe_with_nosync

        def noted_forward(stage: Any, microbatch: int, *arguments: Any, **keywords: Any) -> Any:
            made = forward(stage, microbatch, *arguments, **keywords)
            (output,), _ = stage.fwd_cache[microbatch]  # the root of autograd's backward; torch passes on a detached one
            self.alive[stage.stage_index, microbatch] = ref(output), ref(output.untyped_storage()), output.untyped_storage().nbytes()
            assert self._whole(stage.stage_index, microbatch)
            return made

        def noted_backward(stage: Any, microbatch: int, *arguments: Any, **keywords: Any) -> Any:
            self._running = stage.stage_index, microbatch
            return backward(stage, microbatch, *arguments, **keywords)

        def noted_computing(stage: Any, *arguments: Any, **keywords: Any) -> Any:
            assert self._whole(*self._running), f"{self._running}: released before its backward"
            made = computing(stage, *arguments, **keywords)
            assert self._whole(*self._running), f"{self._running}: released in its backward"
            self.ended.append(self._running)
            return made

        monkeypatch.setattr(PipelineStage, "forward_one_chunk", noted_forward)
        monkeypatch.setattr(PipelineStage, "backward_one_chunk", noted_backward)
        monkeypatch.setattr(PipelineStage, "backward_maybe_with_nosync", noted_computing)

    def _whole(self, stage: int, microbatch: int) -> bool:
        """The tensor lives, reads the storage that it was made with, and that one has all its bytes."""
        output, storage, nbytes = self.alive[stage, microbatch]
        tensor: torch.Tensor | None = output()
        return tensor is not None and storage() is not None and tensor.untyped_storage().nbytes() == nbytes > 0


@pytest.mark.requirement("R-57")
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_live_to_the_end_of_their_backward(kind: str, job_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = {"kind": kind, "num_microbatches": NUM_MICROBATCHES}
    job = job_with({"mesh": {"pp": PP, "vpp": VPP}, "schedule": schedule, "batch": {"micro_batch_size": 1, "seq_length": 16}})
    outputs = Outputs(monkeypatch)
    trace_rank(job, 0)
    slots = {slot.index for slot in job.slots(0)}
    assert sorted(outputs.ended) == sorted((slot, index) for slot in slots for index in range(NUM_MICROBATCHES) for _ in range(NUM_STEPS))
    assert all(output() is None for output, _, _ in outputs.alive.values())  # kept for the backward, and for nothing else


def test_a_released_output_is_seen(job_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that empties its output once it is sent, as some pipelines do, fails the test above."""
    forward = PipelineStage.forward_one_chunk
    outputs = Outputs(monkeypatch)
    noted = PipelineStage.forward_one_chunk
    assert noted is not forward

    def releasing(stage: Any, microbatch: int, *arguments: Any, **keywords: Any) -> Any:
        made = noted(stage, microbatch, *arguments, **keywords)
        (output,), _ = stage.fwd_cache[microbatch]
        output.data = torch.empty((1,), dtype=output.dtype, device=output.device)
        return made

    monkeypatch.setattr(PipelineStage, "forward_one_chunk", releasing)
    schedule = {"kind": "interleaved_1f1b", "num_microbatches": NUM_MICROBATCHES}
    job = job_with({"mesh": {"pp": PP, "vpp": VPP}, "schedule": schedule, "batch": {"micro_batch_size": 1, "seq_length": 16}})
    with pytest.raises(AssertionError, match="released before its backward"):
        trace_rank(job, 0)
    assert not outputs.ended
