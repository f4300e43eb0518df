"""DualPipe for torch's runtime of pipeline actions, which has the order of one copy of the model only.

Slots of the second copy have stage numbers one higher, so that no stage number is next to one of the other copy: torch passes tensors
between neighbours on one rank without a message. Each copy numbers its own microbatches from 0, and each has its own inputs.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed.pipelining.schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    _Action,
    _PipelineScheduleRuntime,
)

from megaplan.schedules import Action, actions, slot_owner
from megarun.parallel.apply.planned import torch_action

HALVES = "halves"
"""Keyword of a step: the keyword inputs of the microbatches of each copy."""
NOWHERE = -1
"""Rank of the stage number between the two copies."""


def stage_number(slot: int, num_parts: int) -> int:
    """Torch's stage index of a slot; `num_parts` are the slots of one copy."""
    return slot + slot // num_parts


class ScheduleDualPipe(_PipelineScheduleRuntime):
    """megaplan's order of `dualpipe`; `n_microbatches` are those of one copy, half of the schedule's."""

    def __init__(self, stages: Any, n_microbatches: int, **keywords: Any) -> None:
        super().__init__(stages, n_microbatches, **keywords)  # type: ignore[no-untyped-call]
        parts = self.pp_group_size
        owners = {stage_number(slot, parts): slot_owner("mirror", slot, parts)[0] for slot in range(2 * parts)}
        self.stage_index_to_group_rank = {parts: NOWHERE, **owners}
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        orders = actions("dualpipe", parts, 1, 2 * n_microbatches)
        self.pipeline_order = {rank: [torch_action(step, self._place) for step in order] for rank, order in enumerate(orders)}
        reduced: dict[int, list[Any]] = {}
        for rank, order in self.pipeline_order.items():
            gathered: list[Any] = torch_schedules._add_unshard_reshard(order)
            reduced[rank] = torch_schedules._add_reduce_grad(gathered, n_microbatches)
        self.pipeline_order_with_comms = with_transfers(reduced, parts, self.stage_index_to_group_rank.__getitem__)

    def _place(self, action: Action) -> tuple[int, int]:
        """Torch's stage index and the copy's own number of a microbatch."""
        return stage_number(action.slot, self.pp_group_size), action.microbatch % self._n_microbatches

    def _split_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Inputs by microbatch; the keyword inputs of the two copies as a pair."""
        halves = (kwargs or {}).get(HALVES, ({}, {}))
        found, _ = super()._split_inputs(args, {})
        first, second = (super(ScheduleDualPipe, self)._split_inputs((), half)[1] for half in halves)
        return found, [{HALVES: pair} for pair in zip(first, second, strict=True)]


def with_transfers(orders: dict[int, list[Any]], num_parts: int, owner: Callable[[int], int]) -> dict[int, list[Any]]:
    """The orders with their messages: each is sent after its action, and received at the receiver's position in its order at that time.

    So two ranks post their messages to each other in one order, as by torch's own pass, which ends a microbatch only at the last stage.

    Args:
        orders: torch's computations of each rank.
        num_parts: Slots of one copy.
        owner: Function of a stage number that gives its rank.
    """
    made: dict[int, list[Any]] = {rank: [] for rank in orders}
    arrived: set[tuple[Any, int, int]] = set()
    places = dict.fromkeys(orders, 0)

    def ready(action: Any) -> bool:
        place = action.stage_index % (num_parts + 1)
        if action.computation_type == FORWARD:
            return place == 0 or (RECV_F, action.stage_index, action.microbatch_index) in arrived
        backward = action.computation_type in (FULL_BACKWARD, BACKWARD_INPUT)
        return not backward or place == num_parts - 1 or (RECV_B, action.stage_index, action.microbatch_index) in arrived

    def send(rank: int, action: Any) -> None:
        place, stage, microbatch = action.stage_index % (num_parts + 1), action.stage_index, action.microbatch_index
        if action.computation_type == FORWARD and place < num_parts - 1:
            sends, receives, after = SEND_F, RECV_F, stage + 1
        elif action.computation_type in (FULL_BACKWARD, BACKWARD_INPUT) and place > 0:
            sends, receives, after = SEND_B, RECV_B, stage - 1
        else:
            return
        made[rank].append(_Action(stage, sends, microbatch))
        made[owner(after)].append(_Action(after, receives, microbatch))
        arrived.add((receives, after, microbatch))

    moves = True
    while moves:
        moves = False
        for rank, order in orders.items():
            if places[rank] == len(order):
                continue
            action = order[places[rank]]
            parts = action.sub_actions or (action,)
            if all(map(ready, parts)):
                made[rank].append(action)
                for part in parts:
                    send(rank, part)
                places[rank] += 1
                moves = True
    if any(places[rank] < len(order) for rank, order in orders.items()):
        raise ValueError("the orders wait for each other forever")
    return made
