"""megaplan's orders as actions of torch's pipeline runtime, for schedules that torch does not have."""

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    _Action,
    _PipelineScheduleRuntime,
)

from megaplan.schedules import Action, ActionKind, ScheduleStep, actions

_KINDS = {
    ActionKind.FORWARD: FORWARD,
    ActionKind.BACKWARD: FULL_BACKWARD,
    ActionKind.INPUT: BACKWARD_INPUT,
    ActionKind.WEIGHT: BACKWARD_WEIGHT,
}


def same_place(action: Action) -> tuple[int, int]:
    """Torch's stage index and microbatch of a computation: the plan's."""
    return action.slot, action.microbatch


def torch_action(step: ScheduleStep, place: Callable[[Action], tuple[int, int]] = same_place) -> _Action:
    """An action of torch's runtime; `place` gives torch's stage index and microbatch of a computation."""
    if isinstance(step, Action):
        stage, microbatch = place(step)
        return _Action(stage, _KINDS[step.kind], microbatch)
    return _Action(-1, OVERLAP_F_B, None, tuple(torch_action(part, place) for part in step.parts))


class SchedulePaired1F1B(_PipelineScheduleRuntime):
    """megaplan's order of `paired_1f1b`, with the messages that torch adds."""

    def __init__(self, stages: Any, n_microbatches: int, **keywords: Any) -> None:
        super().__init__(stages, n_microbatches, **keywords)  # type: ignore[no-untyped-call]
        orders = actions("paired_1f1b", self.pp_group_size, len(stages), n_microbatches)
        self.pipeline_order = {rank: [torch_action(step) for step in order] for rank, order in enumerate(orders)}
        self._prepare_schedule_with_comms(self.pipeline_order)
