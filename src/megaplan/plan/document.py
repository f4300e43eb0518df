"""The plan document: the contents of a plan file, as pydantic models (`format: megaplan.plan/1`).

It has three parts. `inputs`: the request, the spec with every default written out. `decisions`: the choices that
the runtime must follow. `estimates`: their expected cost. Decisions and inputs are digested, estimates are not.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from megaplan.budget.fit import Verdict, is_narrow
from megaplan.columns import Phase
from megaplan.inventory.tensors import Inventory
from megaplan.layout.ranks import Layout, Placement, runs_label
from megaplan.layout.step_time import planned_time, time_text
from megaplan.plan.canonical import dumps, normalise
from megaplan.plan.inputs import spec_values
from megaplan.results import Picture, Result, Row, verdict_text
from megaplan.spec.models import Spec

FORMAT = "megaplan.plan/1"
FORMAT_MINOR = 0

Count = Annotated[int, Field(ge=0, strict=True)]
Integer = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
SpanField = tuple[Count, Count]
Sha256 = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class Part(BaseModel):
    """Base of every part: immutable, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Digests(Part):
    """`model`: the architecture, equal for every way to run it. `plan`: inputs (without `training` and `run`) and decisions."""

    model: Sha256
    plan: Sha256


class PatternDecision(Part):
    """The pattern as the user wrote it, and one letter per layer."""

    written: str
    expanded: str


class Stage(Part):
    """One pipeline slot: `layers` is half-open over global layer indices, `owns` lists the blocks outside the layers.

    `copies` are the blocks of `owns` that another slot holds too.
    """

    slot: Count
    pp_rank: Count
    chunk: Count
    layers: SpanField
    letters: str
    owns: tuple[str, ...]
    copies: tuple[str, ...]


class MeshDecision(Part):
    """Degrees, and the ranks of both meshes that follow from them."""

    pp: Count
    vpp: Count
    dp_replicate: Count
    dp_shard: Count
    cp: Count
    tp: Count
    ep: Count
    etp: Count
    efsdp: Count
    vocab_parallel: Flag
    sequence_parallel: Flag
    reshard_after_forward: Flag
    world_size: Count


class ScheduleDecision(Part):
    """The pipeline schedule and its batch, in sequences and tokens of one optimizer step."""

    kind: str
    placement: Placement
    num_microbatches: Count
    steps_per_update: Count
    micro_batch_size: Count
    seq_length: Count
    global_batch_size: Count
    global_batch_tokens: Count


class CertificateRecord(Part):
    """Quality of the cuts for `objective`: their value, a lower bound over all cuts under the same constraints, each slot's cost.

    `measures` is the part that `value` is the cost of: the largest slot, the largest pp rank (V placement), or the step.
    """

    objective: Literal["bottleneck", "step_time"]
    value: Count
    lower_bound: Count
    gap: Count
    optimal: Flag
    costs: tuple[Count, ...]
    unit: str
    measures: Literal["slot", "rank", "step"]


class SplitDecision(Part):
    """Reason for the cuts; `decided_against` holds a digest of each fact that a manual split may depend on (R-25).

    `costs` is the digest of the costs file that weighed the layers, null for FLOPs.
    """

    mode: Literal["equal", "weighted", "manual"]
    objective: Literal["bottleneck", "step_time"] | None
    reason: str | None
    protects: tuple[str, ...]
    decided_against: dict[str, Sha256]
    costs: Sha256 | None = None
    certificate: CertificateRecord


class Decisions(Part):
    """Everything the runtime must follow."""

    pattern: PatternDecision
    stages: tuple[Stage, ...]
    mesh: MeshDecision
    schedule: ScheduleDecision
    split: SplitDecision
    precision: dict[str, Any]
    optimizer: dict[str, Any]
    recompute: dict[str, str]
    ownership_order: tuple[str, ...]
    code_order: tuple[str, ...]
    wrap_order: tuple[str, ...]
    host: dict[str, Any]


class DeviceFigures(Part):
    """A device's memory; `reserve` itemises memory outside torch's allocator."""

    name: str
    capacity_bytes: Count
    reserve_bytes: Count
    reserve: dict[str, Count]
    usable_bytes: Integer


class PoolEstimate(DeviceFigures):
    """The device of the ranks [start, stop)."""

    ranks: SpanField


class DeviceEstimate(DeviceFigures):
    """The device of every rank; with pools the first stages' device, and `pools` has each type of device."""

    pools: tuple[PoolEstimate, ...] = ()

    @model_serializer(mode="wrap")
    def _given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key != "pools" or value}

    def of_rank(self, rank: int) -> DeviceFigures:
        """The device of one rank."""
        return next((pool for pool in self.pools if pool.ranks[0] <= rank < pool.ranks[1]), self)


class StageEstimate(Part):
    """Parameters of a slot: full tensors, shared copies included."""

    slot: Count
    parameters: Count


class RankEstimate(Part):
    """The budget of all ranks in `ranks` (half-open runs), at the phase of its peak. Σ columns = peak_bytes = phases[peak_phase]."""

    ranks: tuple[SpanField, ...]
    coordinate: dict[str, Count]
    parameters: Count
    columns: dict[str, Count]
    phases: dict[Phase, Count]
    peak_phase: Phase
    peak_bytes: Count
    headroom_bytes: Integer
    fits: Flag

    @property
    def label(self) -> str:
        """`rank 3`, `ranks 0-3, 8-11`."""
        return runs_label(self.ranks)


class Totals(Part):
    """Unique parameters of the model, and the number that one token uses."""

    parameters: Count
    active_parameters: Count


class Estimates(Part):
    """Cost of the decisions; `estimate` and `check` recompute it, and no command relies on the stored values."""

    device: DeviceEstimate
    fits: Flag
    totals: Totals
    stages: tuple[StageEstimate, ...]
    ranks: tuple[RankEstimate, ...]
    serving: dict[str, Any] | None


class PlanDocument(Result, Part):
    """A plan file; `read_plan` reads one, and `make_plan` makes one."""

    format: Literal["megaplan.plan/1"]
    format_minor: Count
    digests: Digests
    overrides: tuple[str, ...]
    inputs: dict[str, Any]
    decisions: Decisions
    estimates: Estimates

    @property
    def verdict(self) -> Verdict:
        """`fits narrowly` is a fit; with the reserved memory of the host's measured runs the job would not fit."""
        if not self.estimates.fits:
            return "does not fit"
        narrow = any(is_narrow(rank.peak_bytes, rank.headroom_bytes, self.spec) for rank in self.estimates.ranks)
        return "fits narrowly" if narrow else "fits"

    @property
    def fit_text(self) -> str:
        """The verdict with the fullest ranks' peak and headroom."""
        worst = self.estimates.ranks[0]
        narrowly = self.verdict == "fits narrowly"
        return verdict_text(self.estimates.fits, worst.peak_bytes, worst.headroom_bytes, worst.label, narrowly=narrowly)

    def _summary(self) -> Sequence[str]:
        decided, parameters = self.decisions, self.estimates.totals.parameters
        cuts = f"{len(decided.stages)} stages, {decided.split.mode} split; " if len(decided.stages) > 1 else ""
        return (self.spec.described(parameters), self.fit_text, f"{cuts}{time_text(planned_time(self.spec, self.spans, self.inventory))}")

    def _rows(self) -> Sequence[Row]:
        return [
            {
                "ranks": rank.label,
                **rank.columns,
                "peak_bytes": rank.peak_bytes,
                "headroom_bytes": rank.headroom_bytes,
                "fits": rank.fits,
            }
            for rank in self.estimates.ranks
        ]

    def to_dict(self) -> dict[str, Any]:
        """The document of the plan file, as `megaplan show --json` prints it."""
        found: dict[str, Any] = json.loads(dumps(normalise(self.model_dump(mode="json"))))
        return found

    def plot(self) -> Picture:
        """The timeline of a step with the memory of every pipeline rank over time.

        Raises:
            MegaplanError: MP481, the step has more actions than a picture can show.
        """
        from megaplan.plan.timeline_svg import timeline_svg  # noqa: PLC0415

        return Picture(timeline_svg(self.spec, self.spans))

    @cached_property
    def spec(self) -> Spec:
        """The planned spec."""
        return Spec.model_validate(spec_values(self.inputs))

    @cached_property
    def inventory(self) -> Inventory:
        """Every parameter tensor of the planned model."""
        from megaplan.inventory.build import build_inventory  # noqa: PLC0415  (reading a plan needs none of it)

        return build_inventory(self.spec)

    @property
    def spans(self) -> tuple[SpanField, ...]:
        """Layers of each part of the model, half-open, in model order."""
        return tuple(stage.layers for stage in self.decisions.stages[: self.spec.mesh.num_slots])

    def layout(self) -> Layout:
        """Slots, owners and placement, from the plan's own cuts."""
        from megaplan.layout.build import build_layout  # noqa: PLC0415

        return build_layout(self.spec, self.inventory, self.spans)
