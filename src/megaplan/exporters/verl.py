"""A start of verl's trainer with the policy, the engine and the pools of a plan.

Source: `verl/trainer/config` of verl 0.9: ppo_trainer.yaml, ppo_megatron_trainer.yaml, rollout, engine/megatron and engine/fsdp; of pools
of their own `verl/experimental/one_step_off_policy/config`.
"""

import shlex
from collections.abc import Iterator
from typing import Any

from megaplan.exporters.post_training import CARRIED, Job, ends_of, job_of, losses_of, recompute_of, recomputes_all
from megaplan.exporters.values import Exported, Loss, Source, complete
from megaplan.spec.post_training import PostTraining

MIB = 2**20
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
REFERENCE = "actor_rollout_ref.ref"
PARTS = {"param": "parameters", "grad": "gradients", "optimizer": "optimizer"}
"""Parts of the trainer by the names that verl gives their offload."""
OF_MEGATRON = frozenset({"precision.reduce"})
OF_FSDP2 = OF_MEGATRON | {"sharding.reshard_after_forward"}
"""Further keys that are written for each trainer."""


def export_verl(source: Source) -> Exported:
    """A shell script that starts `verl.trainer.main_ppo` with overrides of its configuration.

    Raises:
        MegaplanError: MP851, the spec has no section post_training.
    """
    job = job_of(source)
    spec, plan = job.spec, job.plan
    (nodes, per_node), rollout = job.pools
    packed, split = plan.policy.packing, plan.placement == "split"
    values: dict[str, Any] = {
        "algorithm.adv_estimator": "gae" if plan.critic is not None else "grpo",
        "data.train_batch_size": plan.prompts,
        "data.max_prompt_length": spec.batch.seq_length - job.longest,
        "data.max_response_length": job.longest,
        "actor_rollout_ref.model.path": "$MODEL",
        "actor_rollout_ref.model.use_remove_padding": packed,
        f"{ACTOR}.strategy": "megatron" if job.on_megatron else "fsdp2",
        f"{ACTOR}.ppo_mini_batch_size": plan.prompts // plan.policy.updates,
        f"{ACTOR}.use_kl_loss": plan.reference is not None,
        f"{ACTOR}.optim.lr": spec.training.learning_rate,
        f"{ACTOR}.optim.weight_decay": spec.training.weight_decay,
        **_verl_tokens(job),
        **(_verl_megatron(job) if job.on_megatron else _verl_fsdp(job)),
        f"{ROLLOUT}.name": plan.rollout.engine,
        f"{ROLLOUT}.n": plan.samples,
        **{f"{ROLLOUT}.{key}": value for key, value in _engine(plan).items()},
        f"{ROLLOUT}.max_model_len": spec.batch.seq_length,
        f"{ROLLOUT}.free_cache_engine": plan.rollout.sleep != 0 and not split,
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": -(-plan.sync.bucket_bytes // MIB),
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": per_node,
        "trainer.total_training_steps": spec.training.steps,
    }
    if split:
        values |= {"actor_rollout_ref.hybrid_engine": False, "rollout.nnodes": rollout[0], "rollout.n_gpus_per_node": rollout[1]}
    if split or not plan.policy.log_probs:  # without them, and by default with pools, the rollout's are taken
        values |= {"algorithm.rollout_correction.bypass_mode": not plan.policy.log_probs, f"{ROLLOUT}.calculate_log_probs": True}
    if plan.critic is not None:
        values |= {"critic.model.path": "$CRITIC", "critic.strategy": values[f"{ACTOR}.strategy"]}
    if plan.reward is not None and plan.reward.seconds is None:
        values |= {"reward_model.enable": True, "reward_model.model.path": "$REWARD"}
    carried = CARRIED | OF_MEGATRON if job.on_megatron else CARRIED | OF_FSDP2
    return complete(source, _verl_script(job, values), carried, [*losses_of(job), *_verl_losses(job)])


def _verl_script(job: Job, values: dict[str, Any]) -> str:
    split, config = job.plan.placement == "split", "ppo_megatron_trainer" if job.on_megatron else "ppo_trainer"
    program = "verl.experimental.one_step_off_policy.main_ppo" if split else "verl.trainer.main_ppo"
    models = [name for name in ("MODEL", "CRITIC", "REWARD") if f"${name}" in values.values()]
    lines = [f"# {job.spec.name}, by megaplan export; data and rewards are yours to add"]
    lines += [f": ${{{name}:?the path or the name of a checkpoint}}" for name in models]
    overrides = [f"{key}={_word(value)}" for key, value in values.items()]
    return (
        "\n".join(lines)
        + "\n"
        + " \\\n  ".join([f"python3 -m {program} --config-name={'one_step_off_' * split}{config}", *overrides, '"$@"'])
        + "\n"
    )


def _word(value: Any) -> str:
    if isinstance(value, str) and value.startswith("$"):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value)
    text = "[" + ",".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)
    return shlex.quote(text)


def _verl_tokens(job: Job) -> dict[str, Any]:
    """Tokens of a forward on one rank, or rows if sequences are not packed."""
    names = (f"{ROLLOUT}.log_prob", f"{REFERENCE}.log_prob")
    if not job.plan.policy.packing:
        rows = max(1, job.log_prob_tokens // job.spec.batch.seq_length)
        found: dict[str, Any] = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": job.spec.batch.micro_batch_size}
        return found | {f"{name}_micro_batch_size_per_gpu": rows for name in names}
    cp = job.spec.mesh.cp
    found = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": job.row_tokens // cp}
    return found | {f"{name}_max_token_len_per_gpu": job.log_prob_tokens // cp for name in names}


def _verl_megatron(job: Job) -> dict[str, Any]:
    mesh, offload, here = job.spec.mesh, job.plan.offload, f"{ACTOR}.megatron"
    degrees = {
        "tensor_model_parallel_size": mesh.tp,
        "sequence_parallel": mesh.tp > 1 and job.spec.host.sequence_parallel,
        "pipeline_model_parallel_size": mesh.pp,
        "context_parallel_size": mesh.cp,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
    }
    virtual = {"virtual_pipeline_model_parallel_size": mesh.vpp} if mesh.vpp > 1 else {}
    found: dict[str, Any] = {f"{here}.{key}": value for key, value in {**degrees, **virtual}.items()}
    found[f"{here}.use_distributed_optimizer"] = job.spec.host.distributed_optimizer
    found[f"+{here}.override_ddp_config.grad_reduce_in_fp32"] = job.reduces_in_fp32
    found |= {f"{here}.{key}_offload": part in offload for key, part in PARTS.items()}
    override = f"+{here}.override_transformer_config"
    found |= {f"{override}.{key}": value for key, value in {**recompute_of(job), **ends_of(job)}.items()}
    if job.spec.host.precision_aware_optimizer:
        found[f"+{ACTOR}.optim.override_optimizer_config.use_precision_aware_optimizer"] = True
    found[f"{ACTOR}.optim.clip_grad"] = job.spec.training.gradient_clip or 0.0
    if job.plan.reference is not None:
        found |= {f"{REFERENCE}.megatron.{key}": value for key, value in {**degrees, **virtual}.items()}
        found[f"{REFERENCE}.megatron.param_offload"] = "reference" in offload
    return found


def _verl_fsdp(job: Job) -> dict[str, Any]:
    mesh, offload, here = job.spec.mesh, job.plan.offload, f"{ACTOR}.fsdp_config"
    found: dict[str, Any] = {
        f"{here}.fsdp_size": mesh.dp_shard * mesh.cp,
        f"{here}.reshard_after_forward": job.spec.sharding.reshard_after_forward,
        f"+{here}.mixed_precision.reduce_dtype": str(job.spec.precision.reduce),
        f"{here}.param_offload": "parameters" in offload,
        f"{here}.optimizer_offload": "optimizer" in offload,
        f"{ACTOR}.ulysses_sequence_parallel_size": mesh.cp,
        f"{ACTOR}.grad_clip": job.spec.training.gradient_clip or 0.0,
        "actor_rollout_ref.model.enable_gradient_checkpointing": recomputes_all(job),
    }
    if job.plan.reference is not None:
        found |= {f"{REFERENCE}.strategy": "fsdp2", f"{REFERENCE}.fsdp_config.param_offload": "reference" in offload}
    return found


def _engine(plan: PostTraining) -> dict[str, Any]:
    """Settings of verl's engine that the plan gives; the defaults are the engine's or verl's."""
    rollout = plan.rollout
    given = {
        "gpu_memory_utilization": rollout.memory_fraction,
        "max_num_seqs": rollout.max_sequences,
        "max_num_batched_tokens": rollout.batched_tokens,
        "enable_prefix_caching": rollout.prefix_cache,
        "expert_parallel_size": rollout.ep,
    }
    return {
        "tensor_model_parallel_size": rollout.tp,
        "pipeline_model_parallel_size": rollout.pp,
        **{key: value for key, value in given.items() if value is not None},
        "enforce_eager": not rollout.graphs,
    }


def _verl_losses(job: Job) -> Iterator[Loss]:
    spec, plan = job.spec, job.plan
    if plan.prompts % plan.policy.updates:
        detail = f"{plan.prompts} prompts in {plan.policy.updates} updates: a mini-batch of verl has a whole number of prompts"
        yield Loss("post_training.policy.updates", detail)
    if not job.on_megatron and spec.mesh.tp > 1:
        yield Loss("mesh.tp", f"mesh.tp = {spec.mesh.tp}: verl's FSDP2 has no tensor parallelism", "host: {name: megatron}")
    if not job.on_megatron and spec.mesh.cp > 1:
        yield Loss("mesh.cp", f"mesh.cp = {spec.mesh.cp}: verl cuts heads (Ulysses) where this plan cuts the sequence")
    if not job.on_megatron and "gradients" in plan.offload and "parameters" not in plan.offload:
        yield Loss("post_training.offload", "offload has gradients alone: verl's FSDP2 moves them with parameters")
    if plan.placement == "split" and plan.staleness != 1:
        detail = f"post_training.staleness = {plan.staleness}: verl's recipe for split pools runs one step off policy"
        yield Loss("post_training.staleness", detail, "--set post_training.staleness=1")
