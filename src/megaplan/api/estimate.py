"""`megaplan.estimate`: the memory that every rank of a job will hold, and the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megaplan.api.load import FilePath, LoadedJob, Source, load, override_texts
from megaplan.api.size import JobSize, load_sized
from megaplan.budget.fit import (
    DOES_NOT_FIT,
    NarrowFit,
    RoutingRange,
    Verdict,
    largest_micro_batch,
    low_headroom,
    narrow_fit,
    padding_diagnostics,
    routing_range,
)
from megaplan.budget.peaks import build_budget
from megaplan.budget.serving import serving_budget
from megaplan.budget.values import Budget, Cells, RankBudget, ServingBudget
from megaplan.columns import Column, Phase
from megaplan.errors import Diagnostic
from megaplan.layout.ranks import runs_label, runs_of
from megaplan.layout.step_time import PlannedTime, planned_time, time_text
from megaplan.results import Picture, Result, Row, verdict_text

if TYPE_CHECKING:
    from megaplan.advice.faster import Advice
    from megaplan.api.parts import JobParts
    from megaplan.budget.serving import ServingTimes


@dataclass(frozen=True, repr=False)
class Estimate(Result):
    """The memory of every rank and the time of a step. All sizes are bytes of one device.

    Attributes:
        job: The estimated job, with its layout.
        budget: Distinct ranks with their cells, the device, the stages.
        serving: The model in one serving process; None where the spec has no `serving`.
        routing: The budget under balanced and under uneven routing; None where no row can move between ranks.
        step_time: The time of a step with its interval in seconds, or the reason (text) why none is stated.
    """

    job: LoadedJob
    budget: Budget
    serving: ServingBudget | None
    routing: RoutingRange | None
    step_time: PlannedTime | str

    def _summary(self) -> Sequence[str]:
        budget, worst = self.budget, self.worst
        label = runs_label(runs_of(worst.ranks))
        verdict = verdict_text(budget.fits, worst.peak_bytes, worst.headroom_bytes, label, narrowly=self.narrow is not None)
        return (self.job.spec.described(budget.parameters), verdict, time_text(self.step_time))

    def _rows(self) -> Sequence[Row]:
        return [
            {
                "ranks": runs_label(runs_of(rank.ranks)),
                **{column.key: size for column, size in rank.columns.items()},
                "peak_bytes": rank.peak_bytes,
                "headroom_bytes": rank.headroom_bytes,
                "fits": rank.fits,
            }
            for rank in self.ranks
        ]

    def to_dict(self) -> dict[str, Any]:
        """The document that `megaplan estimate --json` prints: plain values, sizes in bytes."""
        from megaplan.api.estimate_json import estimate_document  # noqa: PLC0415

        return estimate_document(self, self.ranks)

    def plot(self) -> Picture:
        """The timeline of a step with the memory of every pipeline rank over time.

        Raises:
            MegaplanError: MP481, the step has more actions than a picture can show.
        """
        from megaplan.plan.timeline_svg import timeline_svg  # noqa: PLC0415

        return Picture(timeline_svg(self.job.spec, self.job.spans))

    @cached_property
    def serving_times(self) -> ServingTimes | None:
        """Times of decoding and prefill; None where the spec has no `serving`."""
        from megaplan.post_training.engines import serving_times  # noqa: PLC0415  (most specs have no such section)

        return serving_times(self.job.spec, self.job.inventory) if self.serving is not None else None

    @property
    def fits(self) -> bool:
        """True if every rank fits its device."""
        return self.budget.fits

    @cached_property
    def narrow(self) -> NarrowFit | None:
        """The ranks that fit narrowly, with the largest reserved bytes that measured runs of the host suggest; None if it is not."""
        return narrow_fit(self.budget, self.job.spec)

    @property
    def verdict(self) -> Verdict:
        """`fits narrowly` counts as a fit for exit codes and searches; with the reserved memory of measured runs the job would not fit."""
        return "does not fit" if not self.fits else "fits" if self.narrow is None else "fits narrowly"

    @property
    def ranks(self) -> tuple[RankBudget, ...]:
        """Distinct budgets, largest peak first; together their `ranks` name every rank once."""
        return self.budget.ranks

    @property
    def worst(self) -> RankBudget:
        """The ranks with the largest peak."""
        return self.budget.worst

    @property
    def peak_bytes(self) -> int:
        """The largest peak of any rank: reserved by torch's allocator, overhead included."""
        return self.worst.peak_bytes

    @property
    def peak_phase(self) -> Phase:
        """The phase of the largest peak."""
        return self.worst.peak_phase

    @property
    def where(self) -> str:
        """Phase, layer and microbatches in flight at the largest peak: `backward of layers.15, 3, 2 microbatches in flight by chunk`."""
        return self.worst.peak_places[self.worst.peak_phase]

    @property
    def columns(self) -> dict[Column, int]:
        """Bytes by column at the largest peak; they sum to `peak_bytes`. Keys are columns or their names: `columns["activations"]`."""
        return self.worst.columns

    @property
    def cells(self) -> Cells:
        """Bytes by phase and column of the ranks with the largest peak."""
        return self.worst.cells

    @property
    def headroom_bytes(self) -> int:
        """Usable bytes less the largest peak; negative if it does not fit."""
        return self.worst.headroom_bytes

    @property
    def parameters(self) -> int:
        """Unique parameters of the model."""
        return self.budget.parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that take part in the computation of one token."""
        return self.budget.active_parameters

    @property
    def step_seconds(self) -> float | None:
        """Predicted seconds of an optimizer step; None where none is stated (see `step_time`)."""
        return self.step_time.seconds if isinstance(self.step_time, PlannedTime) else None

    @cached_property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Warnings and notes: from reading, from the cuts, about memory that is exceeded or almost (MP501, MP502), and padding (MP505)."""
        job, budget = self.job, self.budget
        others = [item for item in job.diagnostics if item.code != DOES_NOT_FIT]
        padding = padding_diagnostics(job.spec, job.inventory, job.layout, budget)
        if budget.fits:
            return (*others, *low_headroom(budget.worst, job.spec), *padding)
        from megaplan.api.advice import advised  # noqa: PLC0415  (what fits needs none)

        return (*others, advised(job, job.layout, budget, job.diagnostics), *padding)

    @cached_property
    def faster(self) -> Advice:
        """Changes that shorten the step on the same number of GPUs, fastest first, each with the cuts, peak and step of its own estimate.

        Empty if the job does not fit, its step is not timed, or no tried change gains 1 %.
        """
        from megaplan.advice.faster import Advice  # noqa: PLC0415  (only where it is asked for)
        from megaplan.api.advice import faster_changes  # noqa: PLC0415

        return faster_changes(self.job, self.step_time) if self.fits and isinstance(self.step_time, PlannedTime) else Advice()

    @cached_property
    def largest_micro_batch(self) -> int | None:
        """The largest `batch.micro_batch_size` that fits every rank with everything else unchanged, cuts included; None if 1 does not."""
        return largest_micro_batch(self.job.spec, self.job.inventory, self.job.layout)

    def of_rank(self, rank: int) -> RankBudget:
        """The budget of one rank.

        Raises:
            KeyError: The job has no such rank.
        """
        return self.budget.of_rank(rank)

    @cached_property
    def parts(self) -> JobParts:
        """Traffic of a step by axis and link; the whole run and the post-training plan if the spec has these sections."""
        from megaplan.api.parts import parts_of  # noqa: PLC0415  (only where it is asked for)

        return parts_of(self.job.spec, self.job.inventory, self.job.layout, self.step_time, self.budget)

    @property
    def host_bytes_per_node(self) -> int:
        """Most bytes of a node's memory that its ranks offload to, and keep copies in; the processes' own are not counted."""
        per_node = min(self.job.spec.device.per_node, self.job.spec.mesh.world_size)
        return per_node * max(rank.host.total for rank in self.ranks) + self.memory_copies_bytes

    @cached_property
    def memory_copies_bytes(self) -> int:
        """Largest number of bytes that the in-memory copies of each step take on a node (`run.save: memory`), else 0."""
        if self.job.spec.run is None or self.job.spec.run.save != "memory":
            return 0
        from megaplan.goodput.checkpoints import checkpoint_sizes  # noqa: PLC0415  (most specs have no such section)

        return checkpoint_sizes(self.job.spec, self.job.inventory, self.job.layout, self.budget).memory_copies_bytes

    def device_bytes(self, rank: RankBudget) -> int:
        """Memory use that the device's own tools show at the peak of these ranks: context, NCCL and driver included."""
        return rank.peak_bytes + self.budget.device_of_rank(rank.ranks[0]).reserve_bytes


def estimate(
    source: Source,
    /,
    *changes: str,
    costs: FilePath | None = None,
    gpus: int | None = None,
    device: str | None = None,
    global_batch: int | None = None,
    seq_length: int | None = None,
    **overrides: Any,
) -> Estimate:
    """Estimate the memory of every rank by phase and column, and the time of a step.

    Args:
        source: A spec, plan or Hugging Face config as for `megaplan.load`, or a job that was loaded.
        *changes: `KEY=VALUE` texts.
        costs: A costs file by which a spec is cut.
        gpus: GPUs of the job. If nothing states the mesh, a quick search chooses it; otherwise `mesh.dp_shard` follows.
        device: Name of the device: `h100`.
        global_batch: Sequences of one optimizer step, from which the microbatches follow.
        seq_length: Tokens of a sequence.
        **overrides: Changes as keywords: `mesh__dp_shard=8`.

    Raises:
        MegaplanError: Every error of the source, the changes and the costs file; no split is feasible.
        TypeError: The same as for `megaplan.load`.

    Examples:
        >>> import megaplan
        >>> found = megaplan.estimate("plans/nam56r-8xh200.yaml")
        >>> found.fits, found.worst.ranks, found.peak_bytes == sum(found.columns.values())
        (True, (0, 1), True)
        >>> [str(column) for column, size in found.columns.items() if size > 15 * 2**30]
        ['activations']
        >>> smaller = megaplan.estimate(found.job, batch__micro_batch_size=1)
        >>> smaller.peak_bytes < found.peak_bytes
        True
    """
    size = JobSize(gpus, device, global_batch, seq_length)
    texts = (*changes, *override_texts(overrides))
    job = load_sized(source, texts, size, costs=costs) if any(part is not None for part in size) else load(source, *texts, costs=costs)
    spec, inventory, layout = subject = job.spec, job.inventory, job.layout
    budget = build_budget(*subject)
    return Estimate(
        job,
        budget,
        serving_budget(spec, inventory),
        routing_range(spec, inventory, layout, budget),
        planned_time(spec, job.spans, inventory),
    )
