"""Times of the slots of cuts, each by the device that it lies on."""

from __future__ import annotations

from collections.abc import Sequence

from megaplan.cost.values import LayerTime, ModelTimes
from megaplan.schedules import Course, Leg, SlotTimes


def of_own_slots(times: Sequence[ModelTimes], spans: Sequence[tuple[int, int]]) -> tuple[LayerTime, ...]:
    """Time of each slot by the times of its own device; one model's times for each slot."""
    of_device = {id(each): each.of_slots(spans) for each in times}
    return tuple(of_device[id(each)][slot] for slot, each in enumerate(times))


def fastest(times: Sequence[ModelTimes]) -> ModelTimes:
    """The least times of every part of the model on any of the slots."""
    if len(set(map(id, times))) == 1:
        return times[0]
    layers = tuple(map(_least, zip(*(each.layers for each in times), strict=True)))
    return ModelTimes(layers, _least([each.first for each in times]), _least([each.last for each in times]), times[0].boundary_ns)


def _least(times: Sequence[LayerTime]) -> LayerTime:
    forward, inputs = (min([getattr(each, f"{part}_exchange_ns") for each in times]) for part in ("forward", "input"))
    return LayerTime(
        min(each.forward_compute_ns for each in times) + forward,
        min(each.input_compute_ns for each in times) + inputs,
        min(each.weight_ns for each in times),
        forward_legs=(Leg(0, forward),) if forward else (),
        backward_legs=(Leg(0, inputs),) if inputs else (),
    )


def replayed(times: Sequence[ModelTimes], spans: Sequence[tuple[int, int]], copies: int = 1) -> SlotTimes:
    """F, I and W of the slots of all copies of a model for a replay, and the courses of their pairs where these take turns."""
    slots = of_own_slots(times, spans)
    forward, inputs, weight = (tuple([getattr(each, part) for each in slots]) for part in ("forward_ns", "input_ns", "weight_ns"))
    courses: tuple[tuple[Course, Course], ...] = ()
    if any(slot.forward_legs for slot in slots):
        courses = tuple([_courses(slot, each.issue_ns) for slot, each in zip(slots, times, strict=True)])
    return SlotTimes(forward * copies, inputs * copies, weight * copies, courses=courses * copies)


def _courses(slot: LayerTime, issue_ns: int) -> tuple[Course, Course]:
    """A forward and a backward of a slot; what its host takes longer than the device is no part of its time."""
    forward, backward = slot.forward_ns, slot.backward_ns
    return (
        Course(slot.forward_legs, forward, min(forward, slot.forward_launches * issue_ns)),
        Course(slot.backward_legs, backward, min(backward, slot.backward_launches * issue_ns)),
    )
