"""Seconds that a job loses to an interruption: until it is detected, until it runs again, and until it has its state."""

from math import exp
from typing import NamedTuple

from megaplan.goodput.figures import REQUEUE_SECONDS, RESTART_SECONDS, RunFigure, by_devices, figures, given
from megaplan.spec.models import Run, Spec

TIMEOUT_STEPS = 5
"""Longest steps that the time limit of megarun's hang detection is at least."""


class Recovery(NamedTuple):
    """Mean seconds of each part of a recovery.

    Attributes:
        detection: Time from the interruption to the end of the job.
        replacement: The whole job is queued again because no spare node replaces a broken one; weighted by its frequency.
        restart: Processes start and connect, where nodes keep their environment; weighed in the same way.
        compile: Seconds of the first step minus a later one.
        read: The checkpoint is read.
    """

    detection: float
    replacement: float
    restart: float
    compile: float
    read: float

    @property
    def seconds(self) -> float:
        """The whole recovery."""
        return sum(self)


class Faults(NamedTuple):
    """Interruptions and recovery of a job, from the spec and the figures.

    Attributes:
        figures: Every figure with its basis, given ones among them.
        rate: Interruptions of the job per second.
        timeout: Seconds of the time limit that detects a hang.
        margin: Seconds from the end of that limit to the end of the job.
        num_spares: Spare nodes.
    """

    figures: dict[str, RunFigure]
    rate: float
    timeout: RunFigure
    margin: float
    num_spares: int

    def value(self, name: str) -> float:
        """The number of a figure."""
        return self.figures[name].value

    @property
    def detection(self) -> float:
        """Mean seconds until an interruption has ended the job."""
        if "detection" in self.figures:
            return self.value("detection")
        hangs = self.value("hangs")
        return (1 - hangs) * self.value("crash_detection_seconds") + hangs * (self.timeout.value + self.margin)

    def has_spare(self, num_spares: int) -> float:
        """Probability that a spare node is there for a broken one: fewer than all are in repair, which begin at random."""
        mean = self.rate * self.value("hardware") * self.value("repair")
        term = total = exp(-mean) if mean < 700 else 0.0
        for count in range(1, num_spares):
            term *= mean / count
            total += term
        return min(1.0, total) if num_spares else 0.0

    def recovery(self, read_seconds: float, num_spares: int | None = None, detection: float | None = None) -> Recovery:
        """The parts of a recovery; given spares or detection replace the job's."""
        spare = self.has_spare(self.num_spares if num_spares is None else num_spares)
        queued = self.value("hardware") * (1 - spare)
        return Recovery(
            self.detection if detection is None else detection,
            queued * self.value("replacement"),
            (1 - queued) * self.value("restart"),
            self.value("warm_compile_seconds"),
            read_seconds,
        )


def faults_of(spec: Spec, step_seconds: float) -> Faults:
    """Interruptions and recoveries of a spec's job with steps of this length."""
    run = spec.run or Run()
    known, world = figures(), spec.mesh.world_size
    found = {name: known[name] for name in ("hangs", "crash_detection_seconds", "hardware", "warm_compile_seconds")}
    found["mtbf"] = known["mtbf_hours"] if run.mtbf is None else given("mtbf", run.mtbf, "h of one device")
    found["repair"] = known["repair_seconds"] if run.repair is None else given("repair", run.repair, "s")
    restart, requeue = by_devices("restart", RESTART_SECONDS, world), by_devices("replacement", REQUEUE_SECONDS, world)
    found["restart"] = restart if run.restart is None else given("restart", run.restart, "s")
    found["replacement"] = requeue if run.replacement is None else given("replacement", run.replacement, "s")
    if run.hangs is not None:
        found["hangs"] = given("hangs", run.hangs, "of interruptions")
    if run.detection is not None:
        found["detection"] = given("detection", run.detection, "s")
    trained = spec.host.kind.trained
    timeout = known["step_timeout_seconds" if trained else "torch_timeout_seconds"]
    longest = TIMEOUT_STEPS * step_seconds
    if trained and longest > timeout.value:
        timeout = timeout._replace(value=longest)
    found["hang_timeout_seconds"] = timeout
    margin = known["hang_margin_seconds"]
    found["hang_margin_seconds"] = margin
    return Faults(found, world / (found["mtbf"].value * 3600), timeout, margin.value, run.spares)
