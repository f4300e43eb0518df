"""The time of a spec's step under given cuts, with its interval; or the reason that none is stated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from megaplan.columns import Basis
from megaplan.cost.replay import ReplayTimer
from megaplan.layout.build import Spans
from megaplan.measured.constants import measured
from megaplan.schedules import MAX_REPLAYED, placement, slot_owner
from megaplan.spec.models import Spec
from megaplan.spec.step_graphs import replays_graphs, replays_update
from megaplan.units import format_figure

if TYPE_CHECKING:
    from megaplan.cost.step.workload import TimedStep
    from megaplan.inventory.tensors import Inventory


UNCALIBRATED = "uncalibrated"
GIVEN = ("efficiency_percent", "launch_ns", "recurrence_step_ns", "reached", "memory_bytes_per_second", "peak_flops")
"""Keys of the device by which a spec replaces measured rates."""


class TimeBasis(NamedTuple):
    """Basis of a step's time.

    Attributes:
        basis: Measured, or modelled.
        calibration: The measurement: device, dtype, host, mode and ranks; or `uncalibrated`.
        interval: Ratios of the time: a tenth of steps is below the first, a tenth above the second; None without profiled steps.
        reason: Reason that it is not measured, for a device that has constants.
    """

    basis: Basis
    calibration: str
    interval: tuple[float, float] | None
    reason: str | None = None


def time_basis(spec: Spec, timer: ReplayTimer) -> TimeBasis:
    """The basis of the time of a step."""
    found = measured(spec.device.name) if spec.host.uses_triton else None
    if found is None:
        return TimeBasis(Basis.MODELLED, UNCALIBRATED, None)
    reason = _reason(spec, timer)
    if reason is not None:
        return TimeBasis(Basis.MODELLED, UNCALIBRATED, None, reason)
    return TimeBasis(Basis.MEASURED, f"{found.device}, {dtype_of(spec)}, megarun, {mode_of(spec)}, one rank", found.interval)


def dtype_of(spec: Spec) -> str:
    """Dtype in which linears multiply: the recipe, or the dtype of the parameters."""
    return spec.precision.params.value if spec.precision.recipe is None else spec.precision.recipe.name


def mode_of(spec: Spec) -> str:
    """The way in which the host launches the kernels of a step."""
    if replays_update(spec):
        return "CUDA graphs of the update, too"
    return "CUDA graphs" if replays_graphs(spec) else "eager"


def _reason(spec: Spec, timer: ReplayTimer) -> str | None:
    """Reason that a step of a device with constants is not measured; None if it is."""
    found, section = measured(spec.device.name), spec.device
    assert found is not None
    if spec.mesh.world_size > 1:
        return "one rank was measured"
    if dtype_of(spec) not in found.dtypes:
        return f"{', '.join(found.dtypes)} were measured"
    if any(getattr(section, key) not in (None, {}) for key in GIVEN):
        return "the spec gives its own rates"
    if mode_of(spec) not in found.modes:
        return f"{' and '.join(found.modes)} steps were measured"
    kinds, known = timer.kinds_seen(spec), {*found.shares, *found.steps_ns}
    if kinds - known:
        return f"{_names(kinds - known)} not measured"
    from megaplan.cost.kinds import changed_kinds  # noqa: PLC0415  (it counts reference specs)

    later = kinds & changed_kinds(spec.device.name)
    return f"{_names(later)} changed since measured" if later else None


def _names(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds))


NS = 1e-9
REPLAYED = "replayed"
"""The interval of times that depend only on a device's rates."""


class TurnTimes(NamedTuple):
    """Exchanges of experts' rows at which the microbatches of a pair take turns, in a step of an average pipeline rank.

    Attributes:
        seconds: Seconds of all these exchanges.
        hidden: Seconds in which the other microbatch of a pair computes.
    """

    seconds: float
    hidden: float

    def as_document(self) -> dict[str, float]:
        """The times as JSON."""
        return {"seconds": round(self.seconds, 6), "hidden_seconds": round(self.hidden, 6)}


class PlannedTime(NamedTuple):
    """Predicted time of a step.

    Attributes:
        seconds: Seconds of the step.
        low: Lower end: a tenth of cross-validated rows of this class would be below it.
        high: Upper end: a tenth would be above it.
        tokens_per_second_per_device: Tokens of the step over seconds and devices.
        mfu: Model FLOPs over the peak of the dtype.
        terms: Seconds by term, which sum to `seconds`: of the busiest stage, or for megarun of a mean pipeline rank.
        basis: fitted if steps of this device and dtype were measured, else modelled; for megarun measured if everything in the step was.
        calibration: Class of measured steps that gives the interval: dense, moe, hybrid, or uncalibrated; for megarun the measurement.
        unmeasured: Reason that a step of megarun is modelled on a device with measured constants.
        missing: Parts of the step that no step of the fit has together with the other parts; empty for megarun.
        traffic: Bytes of all gradients that data ranks reduce, and of all parameters that they gather, in a step.
        turns: Exchanges at which pairs take turns; None without turns.
    """

    seconds: float
    low: float
    high: float
    tokens_per_second_per_device: float
    mfu: float
    terms: dict[str, float]
    basis: Basis
    calibration: str
    unmeasured: str | None = None
    missing: tuple[str, ...] = ()
    traffic: tuple[int, int] = (0, 0)
    turns: TurnTimes | None = None

    @property
    def counts_launches(self) -> bool:
        """True if the time includes launches and copies measured on the device."""
        return self.basis is Basis.MEASURED or self.unmeasured is not None

    @property
    def text(self) -> str:
        """`step 0.955 s, 17,158 tokens/s per device, MFU 40.0 %`."""
        rate = f"{self.tokens_per_second_per_device:,.0f} tokens/s per device"
        return f"step {format_figure(self.seconds)} s, {rate}, MFU {100 * self.mfu:.1f} %"

    def as_document(self) -> dict[str, Any]:
        """The time as JSON; seconds to the microsecond."""
        return {
            "step_seconds": round(self.seconds, 6),
            "interval": [round(self.low, 6), round(self.high, 6)],
            "tokens_per_second_per_device": round(self.tokens_per_second_per_device, 1),
            "mfu": round(self.mfu, 4),
            "terms": {name.replace(" ", "_"): round(seconds, 6) for name, seconds in self.terms.items()},
            "basis": str(self.basis),
            "calibration": self.calibration,
            **({} if self.unmeasured is None else {"unmeasured": self.unmeasured}),
            **({} if self.turns is None else {"exchanges_in_turns": self.turns.as_document()}),
            **({"missing": list(self.missing)} if self.missing else {}),
            **({"data_traffic": dict(zip(("reduced_bytes", "gathered_bytes"), self.traffic, strict=True))} if any(self.traffic) else {}),
        }


def time_text(time: PlannedTime | str) -> str:
    """The time as one line of text, or the statement that there is none."""
    return "step not timed" if isinstance(time, str) else time.text


def time_document(time: PlannedTime | str) -> dict[str, Any]:
    """The time of a step as JSON, or the reason that there is none."""
    return {"reason": time} if isinstance(time, str) else time.as_document()


def planned_time(spec: Spec, spans: Spans, inventory: Inventory | None = None) -> PlannedTime | str:
    """The time of one optimizer step.

    Args:
        spec: A checked spec.
        spans: Cuts of the spec: one half-open span of layers for each slot.
        inventory: Parameter tensors of the spec; built on demand if not given.

    Returns:
        The time, or the reason that this spec has none, for example that an altered plan's cuts do not match its model and mesh.
    """
    num_slots, num_layers = spec.mesh.num_slots, spec.model.num_layers
    if (len(spans), spans[-1][1]) != (num_slots, num_layers):
        return f"the cuts are of {len(spans)} slots and {spans[-1][1]} layers, the inputs of {num_slots} slots and {num_layers} layers"
    if spec.host.kind.trained:
        return _replayed(spec, spans, inventory)
    work = step_to_time(spec, spans, inventory)
    if isinstance(work, str):
        return work
    from megaplan.cost.model import model_costs  # noqa: PLC0415
    from megaplan.cost.step.data import data_traffic  # noqa: PLC0415
    from megaplan.cost.step.fitted import FAR, OTHERS  # noqa: PLC0415
    from megaplan.cost.step.predict import peak_of, predict_step  # noqa: PLC0415

    step = predict_step(work)
    name, missing = interval_of(work)
    low, high = _bounds(name, OTHERS) if name.startswith(FAR) else _bounds(name)
    tokens = step.tokens_per_second_per_device
    mfu = model_costs(spec, work.inventory).model_flops * tokens / peak_of(work.machine, work.software.dtype)
    return PlannedTime(
        *(step.seconds, step.seconds * low, step.seconds * high, tokens, mfu, step.terms),
        basis=Basis.MODELLED if missing else Basis.FITTED,
        calibration="uncalibrated" if missing else name,
        missing=missing,
        traffic=data_traffic(work),
    )


def _bounds(*names: str) -> tuple[float, float]:
    """The lowest and the highest bound of some intervals, relative to the predicted time."""
    from megaplan.cost.step.constants import intervals  # noqa: PLC0415

    ends = [intervals()[name] for name in names]
    return min(low for low, _ in ends), max(high for _, high in ends)


def _replayed(spec: Spec, spans: Spans, inventory: Inventory | None) -> PlannedTime | str:
    """Megarun's step: its schedule replayed with layer times from the device's rates."""
    from megaplan.cost.data import shard_traffic  # noqa: PLC0415
    from megaplan.cost.model import model_costs  # noqa: PLC0415  (a host with fitted constants needs none of these)
    from megaplan.cost.pools import timer_of  # noqa: PLC0415
    from megaplan.cost.replay import ReplayTimer  # noqa: PLC0415
    from megaplan.cost.step.constants import intervals  # noqa: PLC0415
    from megaplan.inventory.build import build_inventory  # noqa: PLC0415
    from megaplan.layout.step_time import time_basis  # noqa: PLC0415
    from megaplan.spec.pools import peak_flops  # noqa: PLC0415

    if spec.num_actions > MAX_REPLAYED:
        return f"the schedule has {spec.num_actions:,} actions, and at most {MAX_REPLAYED:,} are replayed"
    if spec.emulates_products and spec.precision.recipe is not None:
        return f"products of {spec.precision.recipe.name} are emulated in fp32"
    if spec.precision.recipe is not None and spec.precision.recipe.attention:
        return "attention's products of eight-bit operands are emulated in fp32"
    tensors = build_inventory(spec) if inventory is None else inventory
    timer = ReplayTimer(tensors, spec)
    own = timer_of(spec, tensors) if spec.pools else timer
    terms = own.terms(spec, spans)
    known = time_basis(spec, timer)
    seconds = sum(terms.values()) * NS
    tokens = spec.global_batch_tokens / spec.mesh.world_size / seconds
    peak = peak_flops(spec) / spec.mesh.world_size
    low, high = known.interval or intervals()[REPLAYED]
    return PlannedTime(
        *(seconds, seconds * low, seconds * high, tokens, model_costs(spec, tensors).model_flops * tokens / peak),
        terms={name: value * NS for name, value in terms.items()},
        basis=known.basis,
        calibration=known.calibration,
        unmeasured=known.reason,
        traffic=shard_traffic(spec, tensors),
        turns=TurnTimes(*(each * NS for each in own.turns_ns(spec, spans))) if spec.interleaves_pairs else None,
    )


def step_to_time(spec: Spec, spans: Spans, inventory: Inventory | None = None) -> TimedStep | str:
    """The step for the fitted constants, or the reason that they give no time for it."""
    if spec.host.kind.step is None:
        return f"there are no fitted constants for steps of host {spec.host.kind.name}"
    from megaplan.cost.step.from_spec import step_of, timed_step, unpriced  # noqa: PLC0415  (a host without times loads no model of them)
    from megaplan.inventory.build import build_inventory  # noqa: PLC0415

    missing = unpriced(spec)
    if missing is not None:
        return f"there is no term for {missing}"
    layout, pp = placement(spec.schedule.kind), spec.mesh.pp
    owners = [slot_owner(layout, slot, pp)[0] for slot in range(len(spans))]
    return timed_step(spec, build_inventory(spec) if inventory is None else inventory, spans, owners, step_of(spec))


def interval_of(work: TimedStep) -> tuple[str, tuple[str, ...]]:
    """Name of the interval, and the parts of the step that no fitted step has; none where the device's rate is the user's own."""
    from megaplan.cost.step.fitted import family_of, interval_class  # noqa: PLC0415

    own = work.software.dtype in work.machine.reached or work.machine.step_factor != 1
    return (family_of(work.inventory), ()) if own else interval_class(work)
