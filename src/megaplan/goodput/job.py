"""A job with its checkpoints and interruptions: the interval of its saves, and the wall-clock time of its steps."""

from functools import cached_property
from typing import NamedTuple

from megaplan.goodput.checkpoints import CheckpointSizes, StorageTime
from megaplan.goodput.figures import figures
from megaplan.goodput.model import Interruptions, Shares
from megaplan.goodput.recovery import Faults, Recovery
from megaplan.goodput.values import Losses
from megaplan.spec.host import device_of
from megaplan.spec.models import Run, Spec


class Saving(NamedTuple):
    """The cost of a save.

    Attributes:
        stall: Seconds that it stops training.
        write: Seconds from the beginning of a save until it is complete.
        read: Seconds to read it.
    """

    stall: float
    write: float
    read: float


def saving_to(spec: Spec, sizes: CheckpointSizes, storage: StorageTime) -> Saving:
    """A save to a storage: a copy to host memory, then the write, for which training waits if it is not asynchronous."""
    copied = _copy_seconds(sizes) + figures()["save_seconds"].value
    written = copied + storage.write_seconds
    return Saving(written if (spec.run or Run()).save == "sync" else copied, written, storage.read_seconds)


def saving_to_peers(spec: Spec, sizes: CheckpointSizes) -> Saving:
    """A save whose copy is sent to the host memory of another node, from which a replaced node reads it."""
    device = device_of(spec.device)
    adapters = spec.device.per_node * device.network_bandwidth.value * device.efficiency["network"].value / 100
    copied, moved = _copy_seconds(sizes), max(sizes.node_host_bytes) / adapters
    return Saving(copied, copied + moved, moved)


def _copy_seconds(sizes: CheckpointSizes) -> float:
    return max(sizes.rank_host_bytes) / figures()["copy_bytes_per_second"].value


class Job:
    """Steps of a job, with saves and interruptions.

    Args:
        faults: Interruptions and their parts.
        saving: Cost of a save.
        step: Seconds from one step to the next.
        num_steps: Steps of the run.
        recovery: Recovery; by default that of `faults`.
        interval: Steps between saves; by default those with the best goodput.
        evaluations: Share of the time between saves in evaluations, which are not steps.
    """

    def __init__(
        self,
        faults: Faults,
        saving: Saving,
        step: float,
        num_steps: int,
        *,
        recovery: Recovery | None = None,
        interval: int | None = None,
        evaluations: float = 0.0,
    ) -> None:
        self.faults, self.saving, self.step, self.num_steps, self.evaluations = faults, saving, step, num_steps, evaluations
        self.recovery = faults.recovery(saving.read) if recovery is None else recovery
        self.interruptions = Interruptions(faults.rate, saving.stall, saving.write, self.recovery.seconds)
        self.interval = self.interruptions.best_interval(step, num_steps) if interval is None else interval
        self.start = faults.value("restart") + figures()["compile_seconds"].value

    def changed(self, recovery: Recovery | None = None, interval: int | None = None) -> "Job":
        """The job with another recovery, or with another interval."""
        return Job(self.faults, self.saving, self.step, self.num_steps, recovery=recovery, interval=interval, evaluations=self.evaluations)

    @cached_property
    def shares(self) -> Shares:
        """Shares of the time after the first start."""
        return self.interruptions.shares(self.interval * self.step)

    @property
    def useful_seconds(self) -> float:
        """All steps and their evaluations, once."""
        return self.num_steps * self.step

    @property
    def wall_seconds(self) -> float:
        """Time from the first start to the last step; infinite if nothing is ever saved."""
        return self.start + self.useful_seconds / self.shares.useful if self.shares.useful else float("inf")

    @property
    def goodput(self) -> float:
        """Share of wall-clock time in steps that are kept."""
        return self.useful_seconds * (1 - self.evaluations) / self.wall_seconds

    @property
    def num_interruptions(self) -> float:
        """Expected interruptions."""
        return self.interruptions.rate * (self.wall_seconds - self.start)

    @property
    def losses(self) -> Losses:
        """Shares of wall-clock time that are not kept steps."""
        running = 1 - self.start / self.wall_seconds
        down = self.shares.down * running / self.recovery.seconds
        return Losses(
            self.start / self.wall_seconds,
            self.evaluations * self.useful_seconds / self.wall_seconds,
            self.shares.stalls * running,
            self.shares.repeated * running,
            *(down * part for part in self.recovery),
        )
