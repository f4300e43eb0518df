"""A spec's whole run: days, cost, energy, checkpoints, goodput, and the changes that would raise it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from megaplan.budget.values import Budget
from megaplan.columns import Basis
from megaplan.diagnostics import refuse
from megaplan.errors import MegaplanError
from megaplan.goodput.checkpoints import CLASSES, STATES_IN_MEMORY, CheckpointSizes, StorageTime, checkpoint_sizes, storage_times
from megaplan.goodput.figures import RunFigure, figures, given
from megaplan.goodput.job import Job, Saving, saving_to, saving_to_peers
from megaplan.goodput.length import StepsOfRun, Sustained, combined, steps_of_run, sustained_rate
from megaplan.goodput.recovery import Faults, faults_of
from megaplan.goodput.values import (
    Checkpoints,
    NamedFigure,
    RankShare,
    RunChange,
    RunDays,
    RunEstimate,
    SaveInterval,
    Spread,
    StorageSeconds,
)
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout
from megaplan.layout.step_time import PlannedTime
from megaplan.spec.host import device_of
from megaplan.spec.models import Run, Spec
from megaplan.spec.pools import parts_of
from megaplan.units import format_bytes, format_figure

FORMAT = "megaplan.run/1"
DAY, HOUR, MILLION = 86400.0, 3600.0, 1e6
JOULES_OF_KWH = 3.6e6
FAST_DETECTION_SECONDS = 10.0
"""Detection by inspecting devices and adapters every 10 to 30 s instead of waiting for a time limit (arXiv:2509.16293, table 3)."""
ENOUGH_SPARES = 0.99
MOST_SPARES = 256


@dataclass(frozen=True)
class StepOfRun:
    """Seconds of a step, with the ends of its interval and its basis."""

    seconds: float
    low: float
    high: float
    basis: str


def step_of_run(spec: Spec, time: PlannedTime | str) -> StepOfRun:
    """The time of the run's steps: measured (`run.step`), or planned.

    Raises:
        MegaplanError: MP471, the step has no time.
    """
    run = spec.run or Run()
    if run.step is not None:
        return StepOfRun(run.step, run.step, run.step, "given")
    if isinstance(time, str):
        raise refuse("MP471", f"the step of {spec.name} is not timed: {time}", "--step 1.5s    # a measured step", key="run.step")
    return StepOfRun(time.seconds, time.low, time.high, f"{time.basis}, {time.calibration}")


def run_estimate(spec: Spec, inventory: Inventory, layout: Layout, budget: Budget, time: PlannedTime | str) -> RunEstimate:
    """The whole run of a spec.

    Raises:
        MegaplanError: MP471, the step has no time; MP472: interruptions are more frequent than finished saves.
    """
    step = step_of_run(spec, time)
    rate = sustained_rate(spec.run or Run())
    steps = steps_of_run(spec, inventory, layout.spans, time, step.seconds, rate.figure.value)
    return _Estimate(spec, checkpoint_sizes(spec, inventory, layout, budget), step, rate, steps).result(fits=budget.fits)


class _Estimate:
    """The parts of a run's estimate."""

    def __init__(self, spec: Spec, sizes: CheckpointSizes, step: StepOfRun, rate: Sustained, steps: StepsOfRun) -> None:
        self.spec, self.sizes, self.step, self.rate, self.steps = spec, sizes, step, rate, steps
        self.run = spec.run or Run()
        self.in_memory = self.run.save == "memory"
        self.tokens = self.steps.num_steps * spec.global_batch_tokens if self.run.tokens is None else self.run.tokens
        value = rate.figure.value
        self.low = combined(1.0, ((step.seconds, step.low), (value, rate.high)), -1)
        self.high = combined(1.0, ((step.seconds, step.high), (value, rate.low)), 1)
        self.storages = storage_times(spec, sizes)
        self.faults = faults_of(spec, step.seconds)
        self.job = self.job_with(steps.cadence)
        if hopeless := [job for job in (self.job, *self._ends) if not job.shares.useful]:
            raise self._endless(hopeless[0])

    def _endless(self, job: Job) -> MegaplanError:
        """MP472 for a job that completes no save, with times between interruptions in which it completes one."""
        cycle = job.interruptions.cycle(job.interval * job.step)
        needed = (cycle + job.saving.write + job.recovery.seconds) * self.spec.mesh.world_size / HOUR
        detail = (
            f"an interruption every {format_figure(1 / self.faults.rate)} s, a recovery of {format_figure(job.recovery.seconds)} s,"
            f" a save of {format_figure(job.saving.write)} s every {format_figure(cycle)} s"
        )
        return refuse("MP472", detail, f"--mtbf {ceil(max(needed, figures()['mtbf_hours'].value))}h", key="run.mtbf")

    def job_with(self, seconds: float, storage: StorageTime | None = None) -> Job:
        """The job with a given time per step, with copies in memory, or with checkpoints in the run's storage or another one."""
        if self.in_memory and storage is None:
            return self.job_in_memory(seconds)
        saving = saving_to(self.spec, self.sizes, storage or self.storages[self.run.storage])
        interval = None if self.run.interval is None else max(1, round(self.run.interval / self.steps.cadence))
        return self._job(saving, seconds, None if interval is None else min(interval, self.steps.num_steps))

    def job_in_memory(self, seconds: float) -> Job:
        """The job with copies of every step in the memory of a peer, which are made while the next step computes gradients."""
        saving = saving_to_peers(self.spec, self.sizes)
        return self._job(saving._replace(stall=max(0.0, saving.write - seconds)), seconds, 1)

    def _job(self, saving: Saving, seconds: float, interval: int | None) -> Job:
        evaluations = self.steps.evaluations / (self.steps.cadence * self.steps.num_steps)
        return Job(self.faults, saving, seconds, self.steps.num_steps, interval=interval, evaluations=evaluations)

    def spread(self, of: Callable[[Job], float]) -> Spread:
        """A number of the job at the expected steps and at the ends of their interval."""
        low, high = self._ends
        return Spread(of(self.job), of(low), of(high))

    @property
    def _ends(self) -> tuple[Job, Job]:
        return self.job_with(self.steps.cadence * self.low), self.job_with(self.steps.cadence * self.high)

    def hours(self, job: Job, num_spares: int) -> float:
        """Device hours, spare nodes included."""
        return job.wall_seconds / HOUR * (self.spec.mesh.world_size + num_spares * self.spec.device.per_node)

    def result(self, *, fits: bool) -> RunEstimate:
        """Everything."""
        spec, run, job = self.spec, self.run, self.job
        hours = self.spread(lambda job: self.hours(job, run.spares))
        cost = None if run.price is None else scaled(hours, run.price)
        power, overhead, carbon = self._energy()
        energy = None if power is None else scaled(hours, power.value * overhead.value)
        emitted = None if energy is None else scaled(energy, carbon.value)
        named = [figure for figure in (power, overhead, carbon) if figure is not None and power is not None]
        return RunEstimate(
            format=FORMAT,
            name=spec.name,
            device=" + ".join(dict.fromkeys(part.spec.device.name for part in parts_of(spec))),
            num_devices=spec.mesh.world_size,
            num_spare_devices=run.spares * spec.device.per_node,
            fits=fits,
            rollouts_left_out=self.spec.post_training is not None,
            tokens=self.tokens,
            steps=self.steps.num_steps,
            tokens_of_step=spec.global_batch_tokens,
            step_seconds=Spread(self.step.seconds, self.step.low, self.step.high),
            step_basis=self.step.basis,
            mean_step_seconds=Spread(*(end * self.steps.mean for end in (1.0, self.low, self.high))),
            days=self.spread(lambda job: job.wall_seconds / DAY),
            days_by_cause=self._days_by_cause(),
            device_hours=hours,
            cost=cost,
            cost_per_million_tokens=scaled(cost, MILLION / self.tokens),
            energy_kwh=energy,
            joules_per_token=scaled(energy, JOULES_OF_KWH / self.tokens),
            carbon_kg=emitted,
            carbon_grams_per_million_tokens=scaled(emitted, 1000 * MILLION / self.tokens),
            goodput=job.goodput,
            losses=job.losses,
            interruptions=job.num_interruptions,
            mtbf_hours=1 / self.faults.rate / HOUR,
            recovery_seconds=job.recovery.seconds,
            interval=self._interval(),
            checkpoints=self._checkpoints(),
            gains=tuple(sorted((each for each in self._changes() if each.goodput), key=lambda change: -change.goodput)),
            figures=tuple(NamedFigure(each.name, each.value, each.unit, str(each.basis), each.source) for each in self._figures(named)),
        )

    def _days_by_cause(self) -> RunDays:
        job, steps, losses = self.job, self.steps, self.job.losses
        stalls, start = losses.stalls * job.wall_seconds, losses.start * job.wall_seconds
        lost = job.wall_seconds - job.useful_seconds - stalls - start
        return RunDays(*(each / DAY for each in (steps.plain, steps.ramp, steps.slow, steps.evaluations, stalls, lost, start)))

    def _energy(self) -> tuple[RunFigure | None, RunFigure, RunFigure]:
        """Kilowatts of a device, the data centre's overhead, and kilograms of CO2 a kilowatt-hour."""
        run, known, parts = self.run, figures(), parts_of(self.spec)
        boards = [board for part in parts for board in [device_of(part.spec.device).power] * len(part.ranks) if board is not None]
        power = None
        if len(boards) == self.spec.mesh.pp:
            mean, source = sum(board.value for board in boards) / len(boards) / 1000, "; ".join(dict.fromkeys(b.source for b in boards))
            power = RunFigure("power", mean, "kW of one device", boards[0].basis, source)
        if run.power is not None:
            power = given("power", run.power, "kW of one device")
        overhead = known["pue"] if run.pue is None else given("pue", run.pue, "")
        return power, overhead, known["carbon"] if run.carbon is None else given("carbon", run.carbon, "kg CO2e/kWh")

    def _interval(self) -> SaveInterval:
        job, faults = self.job, self.job.interruptions
        seconds = job.interval * job.step
        half, same, double = (faults.goodput(factor * seconds) * (1 - job.evaluations) for factor in (0.5, 1.0, 2.0))
        return SaveInterval(job.interval, seconds, self.run.interval is None and not self.in_memory, faults.young, half, same, double)

    def _checkpoints(self) -> Checkpoints:
        sizes, job = self.sizes, self.job
        cycle = job.interruptions.cycle(job.interval * job.step)
        stages = tuple(RankShare(stage.pp_rank, stage.num_ranks, stage.bytes, stage.largest_rank_bytes) for stage in sizes.stages)
        classes = tuple(
            StorageSeconds(
                name=each.name,
                node_bytes_per_second=each.node_bandwidth.value,
                total_bytes_per_second=None if each.total_bandwidth is None else each.total_bandwidth.value,
                write_seconds=each.write_seconds,
                read_seconds=each.read_seconds,
                survives_a_node=each.survives,
                goodput=self.job_with(job.step, each).goodput if each.survives or each.name == self.run.storage else None,
            )
            for each in (self.storages[name] for name in CLASSES)
        )
        stall = cycle - job.interval * job.step
        return Checkpoints(
            whole_bytes=sizes.whole_bytes,
            ranks=stages,
            rank_host_bytes=max(sizes.rank_host_bytes) * (STATES_IN_MEMORY if self.in_memory else 1),
            node_host_bytes=sizes.memory_copies_bytes if self.in_memory else max(sizes.node_host_bytes),
            stall_seconds=job.saving.stall,
            stall_share=stall / cycle,
            storage=self.run.storage,
            classes=classes,
        )

    def _changes(self) -> Iterator[RunChange]:
        job, faults, spares = self.job, self.faults, self.run.spares
        kept = None if self.run.interval is None else job.interval
        enough = _enough_spares(faults)
        for count in dict.fromkeys((spares + 1, enough)):
            if count > spares:
                recovery = faults.recovery(job.saving.read, num_spares=count)
                changed = job.changed(recovery, kept)
                there = f"there in {100 * faults.has_spare(count):.3g} % of cases"
                yield self._change(f"{count} spare node{'s' if count > 1 else ''}", changed, count, there)
        if faults.detection > FAST_DETECTION_SECONDS:
            recovery = faults.recovery(job.saving.read, detection=FAST_DETECTION_SECONDS)
            changed = job.changed(recovery, kept)
            now = f"now {format_figure(faults.detection)} s"
            yield self._change(f"detection within {FAST_DETECTION_SECONDS:g} s", changed, spares, now)
        if self.spec.mesh.world_size > self.spec.device.per_node and not self.in_memory:
            changed = self.job_in_memory(job.step)
            memory = format_bytes(self.sizes.memory_copies_bytes)
            yield self._change("copies in a peer's memory", changed, spares, f"{memory} host per node")
        if self.run.interval is not None and not self.in_memory:
            changed = job.changed()
            yield self._change(f"a save every {changed.interval} steps", changed, spares, "the interval with the best goodput")

    def _change(self, name: str, job: Job, num_spares: int, note: str) -> RunChange:
        hours, now = self.hours(job, num_spares), self.hours(self.job, self.run.spares)
        price = self.run.price
        return RunChange(name, job.goodput, job.wall_seconds / DAY, hours, None if price is None else (hours - now) * price, note)

    def _figures(self, energy: list[RunFigure]) -> Iterator[RunFigure]:
        known, storage = figures(), self.storages[self.run.storage]
        used = dict(self.faults.figures)
        if "detection" in used:
            for name in ("hangs", "crash_detection_seconds", "hang_timeout_seconds", "hang_margin_seconds"):
                used.pop(name)
        yield self.rate.figure
        if self.rate.figure.basis is Basis.FITTED:
            yield from (known[name] for name in ("sustained_low", "sustained_high"))
        yield from used.values()
        yield from (known[name] for name in ("compile_seconds", "copy_bytes_per_second", "save_seconds"))
        if self.spec.host.kind.trained:
            yield known["sum_bytes_per_second"]
        yield storage.node_bandwidth
        if storage.total_bandwidth is not None:
            yield storage.total_bandwidth
        if self.run.price is not None:
            yield given("price", self.run.price, "a device hour")
        yield from energy


def scaled(spread: Spread | None, factor: float) -> Spread | None:
    """The spread times a factor."""
    return None if spread is None else Spread(spread.value * factor, spread.low * factor, spread.high * factor)


def _enough_spares(faults: Faults) -> int:
    """The smallest number of spare nodes with which a spare is available for a broken node in nearly all cases."""
    return next((count for count in range(1, MOST_SPARES) if faults.has_spare(count) >= ENOUGH_SPARES), MOST_SPARES)
