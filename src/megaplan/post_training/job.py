"""The training step of a post-training plan: the spec's own, with the microbatches that its responses fill."""

from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from math import ceil

from megaplan.budget.peaks import build_budget
from megaplan.budget.values import Budget
from megaplan.cost.forward import ONCE, forward_seconds, recomputes_all
from megaplan.diagnostics import refuse
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import Spans, build_layout
from megaplan.layout.step_time import PlannedTime, planned_time, step_to_time
from megaplan.post_training.lengths import Lengths
from megaplan.schedules import MAX_REPLAYED, runnable_microbatches
from megaplan.spec.models import Spec
from megaplan.spec.post_training import PostTraining

MOST_MICROBATCHES = 2**16


MOST_PACKED = 2048
"""Responses of an update that are packed individually; any others are assumed to pack in the same way."""


def packed_rows(sizes: list[float], room: float) -> int:
    """Rows that sequences fill, the longest first, each in the row with the least room that is left for it."""
    left: list[float] = []
    for size in sorted(sizes, reverse=True):
        place = bisect_left(left, size)
        insort(left, (left.pop(place) if place < len(left) else room) - size)
    return len(left)


@dataclass(frozen=True)
class TrainingJob:
    """The step that an iteration's responses make.

    Attributes:
        spec: Spec with the microbatches of one optimizer step.
        inventory: Parameter tensors.
        plan: The section.
        lengths: Response lengths.
        spans: Cuts.
    """

    spec: Spec
    inventory: Inventory
    plan: PostTraining
    lengths: Lengths
    spans: Spans

    @property
    def rollout_spec(self) -> Spec:
        """The spec with the rollout's device."""
        device = self.plan.rollout.device
        return self.spec if device is None else self.spec.model_copy(update={"device": device})

    @property
    def num_responses(self) -> int:
        """Responses of an iteration."""
        return self.plan.prompts * self.plan.samples

    @property
    def tokens(self) -> float:
        """Tokens of an iteration, prompts included."""
        return self.num_responses * (self.plan.rollout.prompt + self.lengths.mean)

    @property
    def rows(self) -> float:
        """Rows of batch.seq_length that the responses of an iteration take; each update packs its own, and no response is divided."""
        if not self.plan.policy.packing:
            return float(self.num_responses)
        responses = self.num_responses / self.plan.policy.updates
        sample = max(1, min(ceil(responses), MOST_PACKED))
        sizes = [self.plan.rollout.prompt + length for length in self.lengths.quantiles(sample)]
        return self.plan.policy.updates * responses / sample * packed_rows(sizes, self.spec.batch.seq_length)

    @property
    def filled(self) -> float:
        """Share of its microbatches' time that a rank works: with stages and experts each waits for the fullest, else for no padding."""
        mesh, batch = self.spec.mesh, self.spec.batch
        if not self.plan.policy.packing or mesh.pp > 1 or mesh.ep > 1:
            return 1.0
        room = self.spec.schedule.num_microbatches * self.plan.policy.updates * mesh.data_ranks * batch.micro_batch_size * batch.seq_length
        return min(1.0, self.tokens / room)

    def budget(self) -> Budget:
        """Memory of the training step."""
        return build_budget(self.spec, self.inventory, build_layout(self.spec, self.inventory, self.spans))

    def step(self) -> PlannedTime:
        """Time of one optimizer step; packed sequences attend to themselves alone.

        Raises:
            MegaplanError: MP471, the step has no time.
        """
        time = planned_time(self.spec, self.spans, self.inventory)
        if isinstance(time, str):
            fewer = self.plan.policy.updates * ceil(self.spec.num_actions / MAX_REPLAYED)
            hint = f"--set post_training.policy.updates={fewer}" if self.spec.num_actions > MAX_REPLAYED else "megaplan estimate SPEC"
            raise refuse("MP471", f"the step of {self.spec.name} is not timed: {time}", hint)
        once = sum(time.terms.get(name, 0.0) for name in ONCE)
        share = (once + max(time.seconds - once, 0.0) * self.filled) / time.seconds
        time = time._replace(seconds=time.seconds * share, low=time.low * share, high=time.high * share)
        sequence = self.plan.rollout.prompt + self.lengths.mean
        if self.spec.host.kind.trained or sequence >= self.spec.batch.seq_length:
            return time
        work = step_to_time(self.spec, self.spans, self.inventory)
        if isinstance(work, str):
            return time
        from megaplan.cost.step.predict import predict_step  # noqa: PLC0415  (megarun's step needs none of it)

        change = predict_step(replace(work, batch=work.batch._replace(document=sequence))).seconds / predict_step(work).seconds
        return time._replace(seconds=time.seconds * change, low=time.low * change, high=time.high * change)

    def forward_seconds(self, step: PlannedTime) -> float:
        """Seconds of a forward without gradients over all responses."""
        return self.plan.policy.updates * forward_seconds(self.spec, self.inventory, step.seconds, step.terms)

    @property
    def expert_layers(self) -> float:
        """MoE layers that the host launches one after another in a forward over all responses.

        It is a stage's time for each microbatch, and for the microbatches that fill the pipeline.
        """
        mesh = self.spec.mesh
        of_stage = sum(block.family == "E" for block in self.inventory.layers) / mesh.pp
        return self.plan.policy.updates * of_stage * (self.spec.schedule.num_microbatches + (mesh.pp - 1) * mesh.pp / mesh.num_slots)

    @property
    def training_passes(self) -> int:
        """Host launches of training, in forwards: a backward counts as two, recompute as one more."""
        return 3 + recomputes_all(self.spec)


EXAMPLE = "megaplan new llama-3.1-8b-rl -o spec.yaml"


def smallest(spec: Spec) -> str:
    """A section that fits a spec's length, as a text of `--set`: a quarter for the prompt, and responses of half their maximum."""
    prompt = max(1, spec.batch.seq_length // 4)
    most = max(1, spec.batch.seq_length - prompt)
    lengths = f"prompt: {prompt}, response: {{mean: {max(1, most // 2)}, max: {most}}}"
    return f"post_training={{kind: rl, prompts: 64, samples: 8, rollout: {{engine: vllm, {lengths}}}}}"


def section_of(spec: Spec) -> PostTraining:
    """The section `post_training` of a spec.

    Raises:
        MegaplanError: MP851: there is no such section.
    """
    if spec.post_training is None:
        raise refuse("MP851", f"{spec.name} has no section post_training", f"--set '{smallest(spec)}'", EXAMPLE)
    return spec.post_training


def response_limit(spec: Spec, plan: PostTraining) -> int:
    """Tokens at which a response is cut."""
    return plan.rollout.response.max or int(spec.batch.seq_length - plan.rollout.prompt)


def training_job(spec: Spec, inventory: Inventory, spans: Spans, plan: PostTraining) -> TrainingJob:
    """The job of a spec with the section.

    Raises:
        MegaplanError: MP850, lengths do not fit batch.seq_length.
    """
    job = TrainingJob(spec, inventory, plan, Lengths(plan.rollout.response, response_limit(spec, plan)), spans)
    per_update = job.rows / plan.policy.updates / spec.mesh.data_ranks / spec.batch.micro_batch_size
    count = runnable_microbatches(spec.schedule.kind, spec.mesh.pp, spec.mesh.vpp, max(1, ceil(per_update)))
    if count > MOST_MICROBATCHES:
        raise refuse(
            "MP850", f"{count:,} microbatches of an update", f"--set post_training.policy.updates={count}", key="post_training.prompts"
        )
    schedule = spec.schedule.model_copy(update={"num_microbatches": count, "steps_per_update": 1})
    return replace(job, spec=spec.model_copy(update={"schedule": schedule}))
