"""Pipeline schedules as integers: action orders, placement, in-flight counts and replay. No model, no bytes; a file a schedule."""

from megaplan.schedule.actions import Action, Kind, Orders, Overlap, Step, computations
from megaplan.schedule.in_flight import InFlight, in_flight, peak_bytes, receive_buffers
from megaplan.schedule.placement import Placement, slot_owner, slots_of_rank
from megaplan.schedule.registry import KINDS, SCHEDULES, SPLIT_BACKWARD, Schedule, actions, placement, refuse_impossible, schedule_problems
from megaplan.schedule.timeline import LinkedOrders, SlotTimes, Timed, Timeline, link, replay

__all__ = [
    "KINDS",
    "SCHEDULES",
    "SPLIT_BACKWARD",
    "Action",
    "InFlight",
    "Kind",
    "LinkedOrders",
    "Orders",
    "Overlap",
    "Placement",
    "Schedule",
    "SlotTimes",
    "Step",
    "Timed",
    "Timeline",
    "actions",
    "computations",
    "in_flight",
    "link",
    "peak_bytes",
    "placement",
    "receive_buffers",
    "refuse_impossible",
    "replay",
    "schedule_problems",
    "slot_owner",
    "slots_of_rank",
]
