"""Columns of memory during post-training, with their formulas: `megaplan rl --explain` and `megaplan explain COLUMN`."""

DEVICE: dict[str, str] = {
    "policy_parameters": "shards of the policy's parameters on a training rank: the same columns as in megaplan estimate",
    "policy_gradients": "gradients of the policy: while it trains, the column of megaplan estimate; else buffers of the whole run",
    "policy_optimizer": "masters and moments of the optimizer, less what host.optimizer_offload keeps on the host",
    "training_activations": "activations, routing and features of the training step, at its peak",
    "training_buffers": "communication and workspaces of the training step, at its peak",
    "training_overhead": "slack of torch's allocator at the peak of the training step",
    "training_context": "CUDA context, NCCL and driver of the trainer's process: device.reserve",
    "forward_activations": (
        "a forward without gradients: log_prob_tokens · (8 · hidden_size + widest MLP / tp) · 2 B, and logits:"
        " log_prob_tokens · vocab_size / tp · 8 B in fp32, twice; with policy.logits chunks of 1,024 tokens; with pp on the last stage"
    ),
    "gathered_parameters": "parameters that a forward without gradients gathers: communication of megaplan estimate",
    "reference_parameters": "reference.parameters · 2 B in the policy's sharding; none with lora: it is the model without adapters",
    "reward_parameters": "reward.parameters · 2 B over the devices of the training pool",
    "critic_state": "parameters, gradients and optimizer of the critic: the policy's times critic.parameters over the policy's",
    "critic_activations": "activations of the critic's step: the policy's, times the same ratio",
    "sync_buckets": "two buckets of gathered parameters, one being filled while the engine reads the other: 2 · sync.bucket_bytes",
    "engine_parameters": "the policy's parameters on an engine's rank, in rollout.dtype: megaplan estimate with the section serving",
    "kv_cache": (
        "vllm: memory_fraction · capacity, less parameters, activations, graphs, states and context; sglang: memory_fraction of the memory"
        " that is free before parameters are loaded, less parameters and states; whole pages of block_size tokens"
    ),
    "recurrent_states": "states of recurrent layers of max_sequences sequences",
    "engine_activations": (
        "the engine's largest forward: batched_tokens · (6 · hidden_size + widest MLP / tp) · 2 B, and"
        " max_sequences · vocab_size · 10 B for sampling"
    ),
    "engine_graphs": "pools of captured graphs: graph_bytes of the engine; 0 without rollout.graphs; they stay while the engine sleeps",
    "engine_context": "CUDA context, driver and, with several ranks, NCCL of the engine's process: device.reserve",
}
"""Columns of a device, and their formulas."""
HOST: dict[str, str] = {
    "host_policy_parameters": (
        "parameters of the trainer's ranks of a node, if offload has parameters and the trainer is away; with pinned each tensor"
        " takes the next power of two"
    ),
    "host_policy_optimizer": "masters and moments of these ranks, on the same condition; gradients are dropped without a copy",
    "host_training": "host memory of the training step: host_bytes of megaplan estimate",
    "host_engine_parameters": "the engine's parameters of a node's ranks, with rollout.sleep 1 while the engine is away",
    "host_reference": "parameters of the reference, if offload has reference and it does not run",
    "host_reward": "parameters of the reward model, on the same condition",
    "host_critic": "parameters and optimizer of the critic, on the same condition",
    "host_processes": "process_bytes for a trainer's rank; engine_process_bytes for an engine's, which has the node's services too",
}
"""Columns of a node's host memory."""
COLUMNS = DEVICE | HOST
