"""`megaplan explain torchtitan`: the terms of torchtitan's memory."""

from megaplan.spec.host import RESERVED_PERCENT

TOPIC = (
    "State: 16 bytes per parameter over dp_shard · cp ranks, 8 where training.dtype is bfloat16: parameter, gradient and the two states of "
    "AdamW. If the reduction has another dtype, its output is cast: one more output, or all outputs with replicas.",
    "Gathered parameters: 2 bytes each, 1 with float8 gathers: of one transformer block while it runs, of norm and head throughout; "
    "of all blocks without sharding.reshard_after_forward, as in pipelines by default. host.fsdp_ends: root keeps the embedding too, "
    "and the last block while head and loss run.",
    "Pools: FSDP2 allocates the outputs of reductions and of all-gathers on their own streams, and torch's allocator never "
    "gives memory of one stream to another. So gradient shards, which zero_grad frees, and two gathers' outputs count all through a step.",
    "A pipeline accumulates unsharded gradients in the reduction's dtype until its last microbatch: in fp32 4 bytes per parameter.",
    "Blocks keep, of each microbatch: recompute full, the input; selective, also attention and the first, third, fifth and seventh "
    "product, eager even those that backward never reads; none, all that autograd saves; compiled code recomputes cheap tensors instead.",
    "host.checkpoints: halves, selective: of eager attention its input and output; the products of MLP or experts by their own count.",
    "Experts, with k rows per token and R rows on the rank: eager keeps the router's input and the experts' outputs in fp32, 4 bytes each, "
    "and of the rows their inputs and three inner tensors, 2 bytes each; recompute selective keeps the rows that both all-to-alls "
    "received. Experts that a separate group reduces before their block has ended count until then.",
    "Loss, with L = tokens · vocab_size / tp: eager 2 L bytes of logits, 4 L each for their fp32 copy and the log-probabilities in "
    "forward, 12 L in backward; over a cut vocabulary 16 L in backward; compiled 4 L.",
    "host.keep_pipeline_outputs: 2 L of every microbatch on the last stage until the step has ended, 4 L while they are joined.",
    f"host.reserved_percent: {RESERVED_PERCENT} of all that, fitted; docs/reference/accuracy-torchtitan.md has its spread.",
)
"""Paragraphs of the topic."""
