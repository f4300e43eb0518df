"""The order that a torch schedule class executes, found by running it over stages that only record actions.

torch's own listing (`pipeline_order`) differs: in torch 2.13 the last rank of `Schedule1F1B` lists forwards 1 … M for 0 … M − 1. An
overlapped forward and backward is two computations, which torch runs sequentially.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from megaplan.schedules import actions, computations, placement, shared_buffers, slots_of_rank
from megaplan.spec.models import Spec
from megarun.errors import refusal
from megarun.parallel.apply.mirrored import stage_number

RECEIVED = (">", "<")
"""Marks of receives of activations and of gradients."""
ScheduleClass = type[PipelineScheduleSingle] | type[PipelineScheduleMulti]


class _RecordingStage:
    """A fake pipeline stage without communication, which records every computation as `0F3`: slot, kind, microbatch.

    Receives are `0>3` of an activation and `0<3` of a gradient.
    """

    submod = None

    def __init__(self, slot: int, num_parts: int, copies: int, rank: int, num_ranks: int, notes: list[str], first: int) -> None:
        """`num_parts` are the slots of one of the `copies` of the model, `first` is the number of the copy's first microbatch."""
        self.stage_index, self.num_stages = stage_number(slot, num_parts), copies * num_parts + copies - 1
        self.group_rank, self.group_size = rank, num_ranks
        self.is_first, self.is_last = slot % num_parts == 0, (slot + 1) % num_parts == 0
        self._slot, self._first = slot, first
        self.has_backward = True
        self._notes = notes

    def _note(self, kind: str, microbatch: int) -> None:
        self._notes.append(f"{self._slot}{kind}{self._first + microbatch}")

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self._note("F", microbatch)

    def backward_one_chunk(self, microbatch: int, full_backward: bool = True, **_: Any) -> None:
        self._note("B" if full_backward else "I", microbatch)

    def backward_weight_one_chunk(self, microbatch: int, **_: Any) -> None:
        self._note("W", microbatch)

    def _nothing(self, *_: Any) -> None:
        """Transfers between the middle stages of a V, which are on one rank."""

    set_local_fwd_input = get_local_bwd_output = set_local_bwd_input = _nothing

    def perform_reduce_grad(self, _: int) -> None:
        """The reduction that ends a stage's step."""

    def _no_operations(self, _: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_send_ops = _no_operations

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        self._note(RECEIVED[0], microbatch)
        return []

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        self._note(RECEIVED[1], microbatch)
        return []


def executed_order(kind: ScheduleClass, slots: Sequence[int], pp_rank: int, pp: int, num_microbatches: int, copies: int = 1) -> list[str]:
    """The computations and receives that one pipeline rank runs under a schedule class, in order.

    Args:
        kind: Schedule class of torch.
        slots: Slots of this rank, by chunk; every rank has the same number.
        pp_rank: Pipeline rank.
        pp: Pipeline degree.
        num_microbatches: Number of microbatches of one optimizer step.
        copies: Copies of the model that the ranks hold.
    """
    notes: list[str] = []
    parts, each = pp * len(slots) // copies, num_microbatches // copies
    stages: Any = [_RecordingStage(slot, parts, copies, pp_rank, pp, notes, slot // parts * each) for slot in slots]
    schedule: Any = kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], each)
    schedule._initialize_stage = schedule._initialize_stages = lambda *_, **__: None
    schedule._step_microbatches()
    return notes


def overwritten(ordered: Sequence[str], slot: int, numbers: tuple[int, int]) -> str | None:
    """The first receive of a slot into a buffer whose microbatch has not ended its backward; None if there is none.

    Args:
        ordered: Notes of `executed_order`.
        slot: The slot.
        numbers: Receive buffers of its activations and of its gradients; 0 for tensors that no message brings.
    """
    ends, own = dict[int, int](), f"{slot}"
    parts = [re.fullmatch(r"(\d+)(\D)(\d+)", note) for note in ordered]
    notes = [(place, part[2], int(part[3])) for place, part in enumerate(parts) if part is not None and part[1] == own]
    for place, kind, microbatch in notes:
        if kind in ("B", "W"):
            ends[microbatch] = place
    for place, kind, microbatch in notes:
        if kind in RECEIVED and (number := numbers[RECEIVED.index(kind)]) and ends.get(microbatch - number, -1) > place:
            return ordered[place]
    return None


def check_order(kind: ScheduleClass, pp_rank: int, spec: Spec) -> None:
    """Refuse a torch schedule that does not execute this pipeline rank's actions in megaplan's order.

    Raises:
        MegaplanError: MP606, naming rank and position.
    """
    mesh, name, num_microbatches = spec.mesh, spec.schedule.kind, spec.schedule.num_microbatches
    planned = [str(action) for action in computations(actions(name, mesh.pp, mesh.vpp, num_microbatches)[pp_rank])]
    slots = slots_of_rank(placement(name), pp_rank, mesh.pp, mesh.vpp)
    ordered = executed_order(kind, slots, pp_rank, mesh.pp, num_microbatches, spec.num_copies)
    executed = [note for note in ordered if not set(RECEIVED) & set(note)]
    if planned == executed:
        buffers = shared_buffers(name, mesh.pp, mesh.vpp, num_microbatches)[pp_rank]
        for slot, numbers in zip(slots, buffers, strict=True):
            if (early := overwritten(ordered, slot, numbers)) is not None:
                detail = f"pp rank {pp_rank}: {kind.__name__} of torch {torch.__version__} receives {early} while its buffer is in use"
                raise refusal("MP606", detail, "schedule.kind")
        return
    longest = max(len(planned), len(executed))
    pairs = zip(planned + ["nothing"] * longest, executed + ["nothing"] * longest, strict=False)
    position, (ours, theirs) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    detail = f"pp rank {pp_rank}, position {position}: the plan has {ours}, {kind.__name__} of torch {torch.__version__} runs {theirs}"
    raise refusal("MP606", detail, "schedule.kind")
