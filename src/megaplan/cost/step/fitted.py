"""The combinations of device, dtype, family, framework and launch of the fitted steps, and those that a step lacks."""

from functools import cache
from typing import NamedTuple

from megaplan.cost.step.constants import fitted_tuples
from megaplan.cost.step.frameworks import known_release
from megaplan.cost.step.workload import TimedStep
from megaplan.inventory.tensors import Inventory

NEAR, FAR = "near", "far"
"""Steps outside the fitted combinations: each part was fitted, or device with dtype or the framework never was."""
OTHERS = "others"
"""Interval of held-out runs of other people, used for no constant (benchmarks/unseen); the interval of a `far` step extends to it."""


class FittedTuple(NamedTuple):
    """A combination that the constants of a step depend on; steps of another one are predicted less well.

    Attributes:
        device: Name of the device.
        dtype: Dtype of the linears.
        family: dense, moe or hybrid.
        framework: The framework of `frameworks.json`.
        compiled: compiled or eager.
        tensor: tp 1, tp > 1, or async tp where gathers overlap products in torch.compile.
        era: The release with constants that applies; empty for a framework without such releases.
        optimizer: adamw or muon.
    """

    device: str
    dtype: str
    family: str
    framework: str
    compiled: str
    tensor: str
    era: str
    optimizer: str

    @property
    def place(self) -> tuple[str, str]:
        """Device and dtype, whose product rates are one constant."""
        return self.device, self.dtype


ASYNC_TENSOR = frozenset({"torchtitan"})
"""Frameworks that overlap a tensor group's exchanges by torch's async TP, which changes their steps."""


def family_of(inventory: Inventory) -> str:
    """Class of a model: hybrid with M layers, moe with E layers, else dense."""
    letters = {block.family for block in inventory.layers}
    return "hybrid" if "M" in letters else "moe" if "E" in letters else "dense"


def tuple_of(work: TimedStep) -> FittedTuple:
    """The combination of a step."""
    software, machine = work.software, work.machine
    tensor = "tp 1" if work.mesh.tp == 1 else "tp > 1"
    if work.mesh.tp > 1 and software.name in ASYNC_TENSOR and software.tp_overlap:
        tensor = "async tp"
    return FittedTuple(
        machine.name,
        software.dtype,
        family_of(work.inventory),
        software.name,
        "compiled" if software.compiled else "eager",
        tensor,
        known_release(software.name, software.release) or "",
        "muon" if work.spec.optimizer.uses_muon else "adamw",
    )


def is_near(found: FittedTuple, fitted: frozenset[FittedTuple]) -> bool:
    """True if some fitted step has the device in the dtype, some the framework, and some the optimizer."""
    places, frameworks = {each.place for each in fitted}, {each.framework for each in fitted}
    return found.place in places and found.framework in frameworks and found.optimizer in {each.optimizer for each in fitted}


def missing_parts(found: FittedTuple, fitted: frozenset[FittedTuple]) -> tuple[str, ...]:
    """The parts for which the fitted steps of the other parts have no example; empty for a fitted combination.

    Device and dtype come first. A step without a stated release takes any.
    """
    left, missing = set(fitted), []
    place = {each for each in left if each.place == found.place}
    if place:
        left = place
    else:
        missing.append(f"{found.device} in {found.dtype}")
    for part in ("family", "framework", "compiled", "tensor", "era", "optimizer"):
        wanted = getattr(found, part)
        here = {each for each in left if getattr(each, part) == wanted} if wanted or part != "era" else left
        if here:
            left = here
        else:
            missing.append(f"release {wanted}" if part == "era" else wanted)
    return tuple(missing)


@cache
def known_tuples() -> frozenset[FittedTuple]:
    """The combinations of the rows that the constants are fitted to."""
    return frozenset(FittedTuple(*each) for each in fitted_tuples())


def interval_class(work: TimedStep) -> tuple[str, tuple[str, ...]]:
    """Name of the interval of a step, and the parts that no fitted step has with the others.

    A fitted combination has the interval of its family; any other has `near FAMILY` or `far FAMILY`.
    """
    found, fitted = tuple_of(work), known_tuples()
    missing = missing_parts(found, fitted)
    if not missing:
        return found.family, ()
    return f"{NEAR if is_near(found, fitted) else FAR} {found.family}", missing
