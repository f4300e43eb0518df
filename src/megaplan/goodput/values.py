"""The values of a whole run in the output and JSON of `megaplan run`."""

from collections.abc import Sequence
from dataclasses import dataclass

from megaplan.results import Result, Row
from megaplan.units import format_figure


@dataclass(frozen=True)
class Spread:
    """A number with the ends that follow from the 80 % intervals of the step and of the rate that a run sustains.

    Attributes:
        value: Number for the predicted or measured step.
        low: Number for the lower end.
        high: Number for the upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class NamedFigure:
    """A figure that the run depends on.

    Attributes:
        name: Name of the figure: its key of the section `run`, if any.
        value: Number.
        unit: Unit of the number.
        basis: published, measured, modelled, exact or given.
        source: Document, table or measurement.
    """

    name: str
    value: float
    unit: str
    basis: str
    source: str


@dataclass(frozen=True)
class Losses:
    """Shares of the wall-clock time of the run, which sum to 1 with the goodput.

    Attributes:
        start: First start of the job, and its first step minus a later one.
        evaluations: Training waits for evaluations.
        stalls: Training waits for saves.
        repeated: Steps that are made again after interruptions.
        detection: Time from interruptions to the end of the job.
        replacement: The job waits in the queue because a node is broken.
        restart: Processes start and connect.
        compile: Seconds of first steps minus later ones.
        read: Checkpoints are read.
    """

    start: float
    evaluations: float
    stalls: float
    repeated: float
    detection: float
    replacement: float
    restart: float
    compile: float
    read: float


@dataclass(frozen=True)
class RunDays:
    """Days of the run by cause, which sum to its days.

    Attributes:
        steps: All tokens in full batches, at the step's time.
        ramp: Smaller batches at the beginning.
        sustained: Steps of a long run take longer than the step.
        evaluations: Training waits for evaluations.
        saves: Training waits for saves.
        interruptions: Steps are made again, and the job recovers.
        start: First start of the job.
    """

    steps: float
    ramp: float
    sustained: float
    evaluations: float
    saves: float
    interruptions: float
    start: float


@dataclass(frozen=True)
class SaveInterval:
    """Interval of the saves of a run.

    Attributes:
        steps: Steps between two saves.
        seconds: Seconds of training between two saves.
        chosen: True if it is the one with the best goodput; False if it is given.
        young_seconds: Young's interval, from the stall and the interruptions alone; null if no save stops training.
        goodput_at_half: Goodput of the job, its start left out, with half the interval.
        goodput: The same with the interval.
        goodput_at_double: The same with twice the interval.
    """

    steps: int
    seconds: float
    chosen: bool
    young_seconds: float
    goodput_at_half: float
    goodput: float
    goodput_at_double: float


@dataclass(frozen=True)
class RankShare:
    """Bytes that the ranks of a pipeline rank write.

    Attributes:
        pp_rank: Pipeline rank.
        num_ranks: Ranks, which share the writing about evenly.
        bytes: Bytes of all of them.
        largest_rank_bytes: Most bytes that one rank writes.
    """

    pp_rank: int
    num_ranks: int
    bytes: int
    largest_rank_bytes: int


@dataclass(frozen=True)
class StorageSeconds:
    """A class of storage.

    Attributes:
        name: local, parallel or s3.
        node_bytes_per_second: Bandwidth of one node.
        total_bytes_per_second: Total bandwidth of the storage; null if each node has its own.
        write_seconds: Seconds until a save is complete, while training continues.
        read_seconds: Seconds to read it at a restart.
        survives_a_node: False if a checkpoint is lost with a broken node.
        goodput: Goodput of the job with its checkpoints in this storage; null if they would not survive a broken node.
    """

    name: str
    node_bytes_per_second: float
    total_bytes_per_second: float | None
    write_seconds: float
    read_seconds: float
    survives_a_node: bool
    goodput: float | None


@dataclass(frozen=True)
class Checkpoints:
    """The run's checkpoints.

    Attributes:
        whole_bytes: One checkpoint.
        ranks: Bytes that each pipeline rank writes.
        rank_host_bytes: Most bytes of a rank's copy in host memory.
        node_host_bytes: The most that the copies of a node's ranks take.
        stall_seconds: Time that a save stops training.
        stall_share: The same as a share of the time between saves.
        storage: Class that the run uses.
        classes: Every class of storage.
    """

    whole_bytes: int
    ranks: tuple[RankShare, ...]
    rank_host_bytes: int
    node_host_bytes: int
    stall_seconds: float
    stall_share: float
    storage: str
    classes: tuple[StorageSeconds, ...]


@dataclass(frozen=True)
class RunChange:
    """The gain of a change of the run.

    Attributes:
        name: Change.
        goodput: Goodput with it.
        days: Days of the run with this change.
        device_hours: Device hours with this change, spare nodes included.
        cost_change: Change of the cost; null without a price.
        note: Requirement of the change.
    """

    name: str
    goodput: float
    days: float
    device_hours: float
    cost_change: float | None
    note: str


@dataclass(frozen=True, repr=False)
class RunEstimate(Result):
    """A whole training run.

    Attributes:
        format: Format of the JSON document.
        name: Name of the spec or plan.
        device: Device.
        num_devices: Devices that train.
        num_spare_devices: Devices of spare nodes.
        fits: True if every rank fits its device.
        rollouts_left_out: True if the spec has a post-training plan, whose rollouts are not counted; `megaplan rl` has its iterations.
        tokens: Tokens of the run.
        steps: Optimizer steps.
        tokens_of_step: Tokens of one step.
        step_seconds: Seconds of a step.
        step_basis: Basis of the step's time, and the source of its interval.
        mean_step_seconds: Mean seconds of the run's steps: the step, at the rate that a long run sustains, and with smaller first batches.
        days: Days from the first start to the last step.
        days_by_cause: Days by cause.
        device_hours: Device hours, spare nodes included.
        cost: Cost, in the unit of run.price; null without a price.
        cost_per_million_tokens: Cost of a million tokens; null without a price.
        energy_kwh: Energy with the data centre's overhead; null for a device of unknown power.
        joules_per_token: Energy of a token; null for a device of unknown power.
        carbon_kg: Kilograms of CO2 equivalent; null for a device of unknown power.
        carbon_grams_per_million_tokens: Grams of CO2 equivalent of a million tokens; null for a device of unknown power.
        goodput: Share of wall-clock time in steps that are kept.
        losses: Shares of everything else.
        interruptions: Expected interruptions of the run.
        mtbf_hours: Mean hours between interruptions of the job.
        recovery_seconds: Mean seconds of a recovery.
        interval: Interval of the saves.
        checkpoints: Bytes and times of its checkpoints.
        gains: Gains of changes, the largest first.
        figures: Every figure that the result depends on, with basis and source.
    """

    format: str
    name: str
    device: str
    num_devices: int
    num_spare_devices: int
    fits: bool
    rollouts_left_out: bool
    tokens: int
    steps: int
    tokens_of_step: int
    step_seconds: Spread
    step_basis: str
    mean_step_seconds: Spread
    days: Spread
    days_by_cause: RunDays
    device_hours: Spread
    cost: Spread | None
    cost_per_million_tokens: Spread | None
    energy_kwh: Spread | None
    joules_per_token: Spread | None
    carbon_kg: Spread | None
    carbon_grams_per_million_tokens: Spread | None
    goodput: float
    losses: Losses
    interruptions: float
    mtbf_hours: float
    recovery_seconds: float
    interval: SaveInterval
    checkpoints: Checkpoints
    gains: tuple[RunChange, ...]
    figures: tuple[NamedFigure, ...]

    def _summary(self) -> Sequence[str]:
        cost = "" if self.cost is None else f", cost {self.cost.value:,.0f}"
        size = f"{self.tokens:,} tokens in {self.steps:,} steps of {format_figure(self.step_seconds.value)} s"
        run = f"{self.days.value:.1f} days ({self.days.low:.1f} to {self.days.high:.1f}), goodput {100 * self.goodput:.1f} %{cost}"
        fits = "fits" if self.fits else "DOES NOT FIT"
        return (f"{self.name}: {self.num_devices:,} x {self.device}, {fits}", size, run)

    def _rows(self) -> Sequence[Row]:
        spreads = (
            ("step, s", self.step_seconds),
            ("days", self.days),
            ("device hours", self.device_hours),
            ("cost", self.cost),
            ("cost per million tokens", self.cost_per_million_tokens),
            ("energy, kWh", self.energy_kwh),
            ("energy per token, J", self.joules_per_token),
            ("carbon, kg CO2e", self.carbon_kg),
            ("carbon per million tokens, g CO2e", self.carbon_grams_per_million_tokens),
        )
        return [{"quantity": name, "value": each.value, "low": each.low, "high": each.high} for name, each in spreads if each is not None]
