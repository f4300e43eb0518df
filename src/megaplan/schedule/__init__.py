"""Pipeline schedules as integers: action orders, placement, in-flight counts and replay. No model, no bytes; a file a schedule."""

from megaplan.schedule.actions import Action, Kind
from megaplan.schedule.in_flight import in_flight, receive_buffers
from megaplan.schedule.placement import Placement, slot_owner, slots_of_rank
from megaplan.schedule.registry import actions, placement, schedule_problems
from megaplan.schedule.timeline import Timeline, replay

__all__ = [
    "Action",
    "Kind",
    "Placement",
    "Timeline",
    "actions",
    "in_flight",
    "placement",
    "receive_buffers",
    "replay",
    "schedule_problems",
    "slot_owner",
    "slots_of_rank",
]
