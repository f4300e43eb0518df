"""A configuration of NeMo-RL's GRPO with the policy, the engine and the pools of a plan.

Source: `examples/configs/grpo_math_1B.yaml` of NeMo-RL 0.7; its values hold for every key that is not written.
"""

from collections.abc import Iterator
from typing import Any

import yaml

from megaplan.exporters.modules import TORCH_DTYPES
from megaplan.exporters.post_training import CARRIED, Job, ends_of, job_of, losses_of, recompute_of, recomputes_all
from megaplan.exporters.values import Exported, Loss, Source, complete


def export_nemo_rl(source: Source) -> Exported:
    """YAML for NeMo-RL's `examples/run_grpo_math.py`, next to its `grpo_math_1B.yaml`, whose other values hold.

    Raises:
        MegaplanError: MP851, the spec has no section post_training.
    """
    job = job_of(source)
    spec, plan = job.spec, job.plan
    mesh, training, split = spec.mesh, spec.training, plan.placement == "split"
    cluster, resources = _cluster(job)
    packing: dict[str, Any] = {"enabled": plan.policy.packing}
    if plan.policy.packing:
        packing |= {"train_mb_tokens": job.row_tokens, "logprob_mb_tokens": job.log_prob_tokens}
    document: dict[str, Any] = {
        "defaults": "grpo_math_1B.yaml",
        "grpo": {
            "num_prompts_per_step": plan.prompts,
            "num_generations_per_prompt": plan.samples,
            "max_num_steps": training.steps,
            "seed": training.seed,
            "async_grpo": {"enabled": plan.staleness > 0, "max_trajectory_age_steps": max(1, plan.staleness)},
        },
        "loss_fn": {
            "use_importance_sampling_correction": plan.staleness > 0,
            "force_on_policy_ratio": not plan.policy.log_probs and plan.policy.updates == 1,
        },
        "policy": {
            "model_name": "MODEL",
            "train_global_batch_size": plan.prompts * plan.samples // plan.policy.updates,
            "train_micro_batch_size": spec.batch.micro_batch_size,
            "logprob_batch_size": max(1, job.log_prob_tokens // spec.batch.seq_length),
            "max_total_sequence_length": spec.batch.seq_length,
            "precision": TORCH_DTYPES[str(spec.precision.params)],
            "logprob_chunk_size": 1024 if plan.policy.logits == "chunks" else None,
            "max_grad_norm": training.gradient_clip,
            "make_sequence_length_divisible_by": mesh.tp * (2 * mesh.cp if mesh.cp > 1 else 1),
            "sequence_packing": packing,
            **(_nemo_megatron(job) if job.on_megatron else _nemo_dtensor(job)),
            "generation": {
                "backend": plan.rollout.engine,
                "max_new_tokens": job.longest,
                **_nemo_engine(job),
                "colocated": {"enabled": not split, "resources": resources},
            },
        },
        "cluster": cluster,
    }
    if plan.reference is None:
        document["loss_fn"]["reference_policy_kl_penalty"] = 0
    text = f"# {spec.name}, by megaplan export; model_name, data and environment are yours to set\n"
    return complete(
        source,
        text + yaml.safe_dump(document, sort_keys=False),
        CARRIED | {"training.seed", *(("precision.reduce",) if job.on_megatron else ())},
        [*losses_of(job), *_nemo_losses(job)],
    )


def _cluster(job: Job) -> tuple[dict[str, int], dict[str, int | None]]:
    """Nodes and GPUs of the job, and of a separate rollout pool: a part of one node, or whole nodes."""
    (nodes, per_node), (rollout_nodes, rollout_per_node) = job.pools
    if job.plan.placement != "split":
        return {"gpus_per_node": per_node, "num_nodes": nodes}, {"gpus_per_node": None, "num_nodes": None}
    if nodes == rollout_nodes == 1 and per_node + rollout_per_node <= job.spec.device.per_node:
        return {"gpus_per_node": per_node + rollout_per_node, "num_nodes": 1}, {"gpus_per_node": rollout_per_node, "num_nodes": None}
    whole = {"gpus_per_node": per_node, "num_nodes": nodes + rollout_nodes}
    return whole, {"gpus_per_node": rollout_per_node, "num_nodes": rollout_nodes}


def _nemo_megatron(job: Job) -> dict[str, Any]:
    spec, mesh = job.spec, job.spec.mesh
    rates = {"lr": spec.training.learning_rate, "min_lr": spec.training.learning_rate, "weight_decay": spec.training.weight_decay}
    return {
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {
            "enabled": True,
            "activation_checkpointing": spec.host.recompute_num_layers is not None or recomputes_all(job),
            "tensor_model_parallel_size": mesh.tp,
            "expert_tensor_parallel_size": mesh.etp or mesh.tp,
            "expert_model_parallel_size": mesh.ep,
            "pipeline_model_parallel_size": mesh.pp,
            "context_parallel_size": mesh.cp,
            "sequence_parallel": mesh.tp > 1 and spec.host.sequence_parallel,
            **ends_of(job),
            "distributed_data_parallel_config": {"grad_reduce_in_fp32": job.reduces_in_fp32},
            "optimizer": {
                **rates,
                "use_distributed_optimizer": spec.host.distributed_optimizer,
                "use_precision_aware_optimizer": spec.host.precision_aware_optimizer,
            },
        },
    }


def _nemo_dtensor(job: Job) -> dict[str, Any]:
    mesh, training = job.spec.mesh, job.spec.training
    return {
        "dtensor_cfg": {
            "enabled": True,
            "sequence_parallel": mesh.tp > 1,
            "activation_checkpointing": recomputes_all(job),
            "tensor_parallel_size": mesh.tp,
            "context_parallel_size": mesh.cp,
        },
        "megatron_cfg": {"enabled": False},
        "optimizer": {"kwargs": {"lr": training.learning_rate, "weight_decay": training.weight_decay}},
    }


def _nemo_engine(job: Job) -> dict[str, Any]:
    rollout = job.plan.rollout
    settings = {
        "max_num_seqs": rollout.max_sequences,
        "max_num_batched_tokens": rollout.batched_tokens,
        "block_size": rollout.block_size,
        "enable_prefix_caching": rollout.prefix_cache,
    }
    config: dict[str, Any] = {
        "async_engine": job.plan.staleness > 0 or rollout.pp > 1,
        "precision": TORCH_DTYPES[str(rollout.dtype or job.spec.precision.params)],
        "tensor_parallel_size": rollout.tp,
        "pipeline_parallel_size": rollout.pp,
        "expert_parallel_size": rollout.ep or 1,
        "max_model_len": job.spec.batch.seq_length,
        "enforce_eager": not rollout.graphs,
    }
    if rollout.memory_fraction is not None:
        config["gpu_memory_utilization"] = rollout.memory_fraction
    return {"vllm_cfg": config, "vllm_kwargs": {key: value for key, value in settings.items() if value is not None}}


def _nemo_losses(job: Job) -> Iterator[Loss]:
    spec, plan = job.spec, job.plan
    if plan.rollout.engine != "vllm":
        yield Loss("post_training.rollout.engine", f"rollout.engine = {plan.rollout.engine}: settings of vLLM are written", "engine: vllm")
    if plan.critic is not None:
        yield Loss("post_training.critic", "post_training.critic: NeMo-RL's GRPO trains no value model", "critic: null")
    if plan.reward is not None and plan.reward.seconds is None:
        yield Loss("post_training.reward", "post_training.reward: a reward model is a separate environment in NeMo-RL, which you must add")
    if not plan.policy.log_probs and plan.policy.updates > 1:
        detail = f"policy.log_probs = false with {plan.policy.updates} updates: NeMo-RL computes log-probabilities before the first"
        yield Loss("post_training.policy.log_probs", detail, "updates: 1")
    (_, per_node), (_, rollout_per_node) = job.pools
    if plan.placement == "split" and per_node != rollout_per_node and _cluster(job)[0]["num_nodes"] > 1:
        detail = f"{per_node} GPUs of a node train and {rollout_per_node} generate: NeMo-RL uses the same number on every node"
        yield Loss("post_training.rollout.gpus", detail)
    if job.on_megatron and spec.mesh.vpp > 1:
        yield Loss("mesh.vpp", f"mesh.vpp = {spec.mesh.vpp}: NeMo-RL runs one stage on a rank", "vpp: 1")
    if job.is_megatrons and recompute_of(job).get("recompute_granularity") == "selective":
        yield Loss("recompute", "modules of selective recompute: NeMo-RL recomputes every layer or none; the config is written with none")
    moved = {"parameters", "gradients", "optimizer"}
    if plan.placement == "colocated" and not moved <= set(plan.offload):
        missing = ", ".join(sorted(moved - set(plan.offload)))
        yield Loss("post_training.offload", f"offload lacks {missing}: NeMo-RL moves all of the trainer away", f"offload: {sorted(moved)}")
    if plan.sync.bucket_bytes != 2**29:
        detail = f"post_training.sync.bucket_bytes = {plan.sync.bucket_bytes}: NeMo-RL takes a share of the free memory"
        yield Loss("post_training.sync.bucket_bytes", detail, strict=False)
