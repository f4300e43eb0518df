"""Pipeline schedules as integers: action orders, placement, in-flight counts and replay. No model, no bytes; one file per schedule."""

from megaplan.schedules.actions import (
    ACTION_NAMES,
    MAX_REPLAYED,
    Action,
    ActionKind,
    Orders,
    Overlap,
    ScheduleStep,
    computations,
    num_actions,
)
from megaplan.schedules.in_flight import InFlight, in_flight, peak_bytes, receive_buffers, shared_buffers
from megaplan.schedules.placement import Placement, num_copies, slot_owner, slots_of_rank
from megaplan.schedules.registry import (
    KINDS,
    SCHEDULES,
    SPLIT_BACKWARD,
    RegisteredSchedule,
    actions,
    cut_pipeline,
    placement,
    refuse_impossible,
    runnable_microbatches,
    schedule_problems,
)
from megaplan.schedules.timeline import LinkedOrders, SlotTimes, Timed, Timeline, link, replay
from megaplan.schedules.turns import Course, Leg, Legs

__all__ = [
    "ACTION_NAMES",
    "KINDS",
    "MAX_REPLAYED",
    "SCHEDULES",
    "SPLIT_BACKWARD",
    "Action",
    "ActionKind",
    "Course",
    "InFlight",
    "Leg",
    "Legs",
    "LinkedOrders",
    "Orders",
    "Overlap",
    "Placement",
    "RegisteredSchedule",
    "ScheduleStep",
    "SlotTimes",
    "Timed",
    "Timeline",
    "actions",
    "computations",
    "cut_pipeline",
    "in_flight",
    "link",
    "num_actions",
    "num_copies",
    "peak_bytes",
    "placement",
    "receive_buffers",
    "refuse_impossible",
    "replay",
    "runnable_microbatches",
    "schedule_problems",
    "shared_buffers",
    "slot_owner",
    "slots_of_rank",
]
