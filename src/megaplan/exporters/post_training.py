"""Configurations of post-training loops: a job's numbers, and the settings that no loop expresses.

Both loops load a checkpoint of Hugging Face, so that its dimensions must be the plan's. A plan of megarun on one stage runs on FSDP2, any
other on Megatron-Core.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from megaplan.dtypes import DType
from megaplan.exporters.megatron import recompute_arguments
from megaplan.exporters.values import Loss, Source, nodes_of
from megaplan.hosts.megatron import HOST as MEGATRON
from megaplan.post_training.job import response_limit, section_of
from megaplan.spec.models import Spec
from megaplan.spec.post_training import PostTraining

CARRIED = frozenset({
    "model", "mesh.pp", "mesh.vpp", "mesh.dp_replicate", "mesh.dp_shard", "mesh.cp", "mesh.tp", "mesh.ep", "mesh.etp", "schedule.kind",
    "batch", "precision.params", "precision.grads", "optimizer.matrix", "optimizer.other", "recompute", "host.name",
    "host.recompute_modules", "host.recompute_method", "host.recompute_num_layers", "host.distribute_saved_activations",
    "host.precision_aware_optimizer",
    "host.distributed_optimizer", "host.hidden_dropout", "host.attention_dropout", "host.model", "training.steps",
    "training.learning_rate", "training.weight_decay", "training.gradient_clip", "post_training",
})  # fmt: skip


class Job(NamedTuple):
    """A plan and the numbers that a loop's configuration needs.

    Attributes:
        spec: The spec.
        plan: The section `post_training`.
        longest: Tokens at which a response is cut.
        row_tokens: Tokens of a training forward.
        log_prob_tokens: Tokens of a forward without gradients.
        layers: Transformer layers by slot; a layer is a mixer and its MLP or experts.
        letters: Letters of the pattern.
        is_megatrons: True if the plan is one of host megatron.
    """

    spec: Spec
    plan: PostTraining
    longest: int
    row_tokens: int
    log_prob_tokens: int
    layers: tuple[int, ...]
    letters: frozenset[str]
    is_megatrons: bool

    @property
    def on_megatron(self) -> bool:
        """True if Megatron-Core trains the policy."""
        mesh = self.spec.mesh
        return self.is_megatrons or mesh.pp > 1 or mesh.ep > 1

    @property
    def reduces_in_fp32(self) -> bool:
        """True if gradients are summed over data ranks in fp32."""
        return self.spec.precision.grads is DType.FP32

    @property
    def pools(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(nodes, GPUs per node) of the training and of the rollout."""
        world = self.spec.mesh.world_size
        per_node = self.spec.device.per_node
        return nodes_of(world, per_node), nodes_of(self.plan.rollout.gpus or world, per_node)

    @property
    def ends(self) -> tuple[int, int] | None:
        """Layers of the first and of the last stage, if not an even split; the stages between them are equal."""
        inner, even = set(self.layers[1:-1]), len(set(self.layers)) == 1
        return None if even or len(inner) > 1 or self.spec.mesh.vpp > 1 else (self.layers[0], self.layers[-1])


def job_of(source: Source) -> Job:
    """The numbers of a plan's loop.

    Raises:
        MegaplanError: MP851, the spec has no section post_training.
    """
    spec = source.spec
    plan = section_of(spec)
    letters = frozenset(source.letters)
    row_tokens = spec.batch.micro_batch_size * spec.batch.seq_length
    layers = tuple(sum(letter not in "DE" for letter in stage) for stage in source.stages)
    return Job(
        spec,
        plan,
        response_limit(spec, plan),
        row_tokens,
        plan.policy.log_prob_tokens or row_tokens,
        layers,
        letters,
        source.is_of(MEGATRON.name),
    )


def losses_of(job: Job) -> Iterator[Loss]:
    """Settings that neither loop expresses."""
    spec, plan = job.spec, job.plan
    yield Loss("model", "model: the loop loads a checkpoint of Hugging Face; its dimensions must equal this plan's", strict=False)
    if spec.optimizer.matrix != "adamw":
        yield Loss("optimizer.matrix", f"optimizer.matrix = {spec.optimizer.matrix}: the loop trains with AdamW", "matrix: adamw")
    count = spec.schedule.microbatches_per_update
    yield Loss("schedule", f"schedule: responses of an iteration fill the microbatches, and these {count} are not written", strict=False)
    if job.on_megatron and spec.schedule.kind not in ("1f1b", "interleaved_1f1b"):
        yield Loss(
            "schedule.kind", f"schedule.kind = {spec.schedule.kind}: Megatron-Core's loop runs 1F1B, plain or interleaved", "kind: 1f1b"
        )
    if spec.mesh.tp > 1 and not spec.mesh.vocab_parallel and not job.is_megatrons:
        yield Loss("mesh.vocab_parallel", "mesh.vocab_parallel = false: the loop divides the vocabulary by tp", "vocab_parallel: true")
    if job.on_megatron and spec.precision.reduce is not spec.precision.grads:
        detail = f"precision.reduce = {spec.precision.reduce}: Megatron-Core reduces gradients in their dtype, {spec.precision.grads}"
        yield Loss("precision.reduce", detail, f"reduce: {spec.precision.grads}")
    if job.on_megatron and job.ends is None and len(set(job.layers)) > 1:
        counts = ", ".join(map(str, job.layers))
        yield Loss(
            "split", f"stages of {counts} layers: only the first and the last stage may differ from the others", "split: {mode: equal}"
        )
    for name in ("hidden_dropout", "attention_dropout") if job.is_megatrons else ():
        if share := getattr(spec.host, name):
            yield Loss(f"host.{name}", f"host.{name} = {share:g}: the loop takes the checkpoint's, which is usually 0", f"{name}: 0.0")
    policies = {spec.recompute.of(letter) for letter in job.letters}
    if not job.is_megatrons and policies not in ({"none"}, {"full"}):
        yield Loss(
            "recompute", "recompute: the loop recomputes every layer or none; the script is written with none", "default: none or full"
        )
    if plan.rollout.kv_dtype is not spec.precision.params:
        yield Loss("post_training.rollout.kv_dtype", f"rollout.kv_dtype = {plan.rollout.kv_dtype}: yours to set in the engine's arguments")


def recomputes_all(job: Job) -> bool:
    """True if every block has full recompute."""
    return all(job.spec.recompute.of(letter) == "full" for letter in job.letters)


def recompute_of(job: Job) -> dict[str, Any]:
    """Recompute of Megatron-Core's transformer configuration."""
    if job.is_megatrons:
        return recompute_arguments(job.spec, job.spec.host)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return full if recomputes_all(job) else {}


def ends_of(job: Job) -> dict[str, Any]:
    """Layers of the first and the last stage by Megatron-Core's names; empty for an even split."""
    names = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
    return dict(zip(names, job.ends, strict=True)) if job.ends is not None else {}
