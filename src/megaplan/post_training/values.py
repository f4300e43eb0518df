"""The values of a post-training plan, as `megaplan rl` prints them and its JSON has them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megaplan.goodput.values import NamedFigure, Spread
from megaplan.results import Result, Row, verdict_text
from megaplan.units import format_figure


@dataclass(frozen=True)
class MemoryPhase:
    """Memory of one phase of an iteration.

    Attributes:
        name: Name of the phase.
        pool: Devices that work: all, training or rollout.
        columns: Bytes of the fullest device by column; columns without bytes are absent.
        total_bytes: Sum of the columns.
        headroom_bytes: Capacity of the device less the sum; negative if the phase does not fit.
        host_columns: Bytes in the memory of the fullest node by column.
        host_total_bytes: Sum of the columns.
    """

    name: str
    pool: str
    columns: dict[str, int]
    total_bytes: int
    headroom_bytes: int
    host_columns: dict[str, int]
    host_total_bytes: int


@dataclass(frozen=True)
class TimePhase:
    """Time of one phase of an iteration.

    Attributes:
        name: Name of the phase.
        pool: Devices that work: all, training or rollout.
        seconds: Seconds, with the ends of the interval.
        basis: Source of the time.
    """

    name: str
    pool: str
    seconds: Spread
    basis: str


@dataclass(frozen=True)
class PoolIdle:
    """Devices of a pool.

    Attributes:
        name: all, training or rollout.
        num_devices: Devices.
        busy_seconds: Seconds of an iteration in which they work.
        idle_share: Share of the iteration in which they wait for the other pool.
        empty_share: Share of the sequence slots that no sequence uses during the rollout, because of its longest responses; null for the
            pool that trains.
    """

    name: str
    num_devices: int
    busy_seconds: float
    idle_share: float
    empty_share: float | None


@dataclass(frozen=True)
class ResponseShape:
    """Lengths of the responses.

    Attributes:
        mean: Mean tokens.
        p50: Median.
        p90: 90th percentile.
        p99: 99th percentile.
        longest: The median of an iteration's longest response.
        limit: Tokens at which a response is cut.
        cut_share: Share of responses that are cut.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    longest: float
    limit: int
    cut_share: float


@dataclass(frozen=True)
class EngineShape:
    """The inference engine on its devices.

    Attributes:
        name: vllm or sglang.
        num_groups: Tensor groups that generate independently.
        tp: Ranks of a tensor group.
        pp: Stages.
        ep: Ranks over which experts are distributed.
        sequences_of_group: Sequences of an iteration for each group.
        slots: Sequences that a group generates at a time.
        limited_by: sequences, if all run at once; else max_sequences or kv_cache.
        cache_tokens: Tokens for which a group has cache.
        steps: Decoding steps of an iteration.
        decode_seconds: Seconds of a decoding step with all slots used, at the mean context.
        prefill_seconds: Seconds of a group's prefill in an iteration.
        tokens_per_second: Tokens that all groups generate per second of the rollout.
    """

    name: str
    num_groups: int
    tp: int
    pp: int
    ep: int
    sequences_of_group: float
    slots: int
    limited_by: str
    cache_tokens: int
    steps: float
    decode_seconds: float
    prefill_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, repr=False)
class RlEstimate(Result):
    """A post-training plan: memory by phase, time of an iteration, and idle devices.

    Attributes:
        format: Format of the JSON document.
        name: Name of the spec or plan.
        device: Device.
        num_devices: Devices of all pools.
        placement: colocated or split.
        fits: True if every phase fits the devices and, if its memory is given, the host.
        peak_bytes: The largest phase of a device.
        peak_phase: Name of that phase.
        peak_column: Column with the most bytes of the peak.
        host_peak_bytes: The largest phase of a node's host memory.
        host_peak_phase: Name of that phase.
        host_capacity_bytes: Memory of a node, if the spec gives it.
        memory: Memory by phase, in the order of an iteration.
        iteration_seconds: Seconds of an iteration.
        tokens: Tokens of an iteration, prompts and responses.
        tokens_per_second_per_device: Tokens over seconds and all devices.
        times: Time by phase.
        pools: Devices that wait.
        lengths: Lengths of the responses.
        engine: The engine.
        microbatches: Microbatches of each optimizer step on a data rank.
        sync_bytes: Bytes of the parameters that the engine gets.
        figures: Every figure that the result depends on, with basis and source.
    """

    format: str
    name: str
    device: str
    num_devices: int
    placement: str
    fits: bool
    peak_bytes: int
    peak_phase: str
    peak_column: str
    host_peak_bytes: int
    host_peak_phase: str
    host_capacity_bytes: int | None
    memory: tuple[MemoryPhase, ...]
    iteration_seconds: Spread
    tokens: float
    tokens_per_second_per_device: float
    times: tuple[TimePhase, ...]
    pools: tuple[PoolIdle, ...]
    lengths: ResponseShape
    engine: EngineShape
    microbatches: int
    sync_bytes: int
    figures: tuple[NamedFigure, ...]

    def _summary(self) -> Sequence[str]:
        fullest = max(self.memory, key=lambda phase: phase.total_bytes)
        seconds = self.iteration_seconds
        return (
            f"{self.name}: {self.num_devices:,} x {self.device}, {self.placement}",
            verdict_text(self.fits, fullest.total_bytes, fullest.headroom_bytes, self.peak_phase),
            f"iteration {format_figure(seconds.value)} s ({format_figure(seconds.low)} to {format_figure(seconds.high)}), "
            f"{self.tokens_per_second_per_device:,.0f} tokens/s per device",
        )

    def _rows(self) -> Sequence[Row]:
        seconds = {(each.pool, each.name): each.seconds.value for each in self.times}
        return [
            {
                "phase": each.name,
                "pool": each.pool,
                "seconds": seconds.get((each.pool, each.name)),
                "device_bytes": each.total_bytes,
                "headroom_bytes": each.headroom_bytes,
                "host_bytes": each.host_total_bytes,
            }
            for each in self.memory
        ]
