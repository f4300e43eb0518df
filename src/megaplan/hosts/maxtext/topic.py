"""`megaplan explain maxtext`: the terms of MaxText's memory."""

TOPIC = (
    "All devices run one program and have the same bytes. A device of tpu-v7 is one of the two chiplets of a chip.",
    "State: parameters in precision.master (weight_dtype), the first moment in precision.moments (mu_dtype), the second in "
    "precision.master, over dp_shard · cp devices: 12 bytes a parameter in fp32. Norms and biases are not sharded.",
    "Gradients: one per parameter in precision.grads (grad_dtype), sharded like the parameters; twice with gradient accumulation.",
    "Blocks keep their input, or with scanned blocks of several layers (host.layers_per_block) one input for all of them, and the "
    "tensors that the remat policy saves: none (recompute full), all that backward reads (none), or those of host.remat_policy "
    "(selective). Tensors that are offloaded count in host memory.",
    "Backward: one block that is recomputed, with the gathered parameters of one layer and the unreduced gradients of its largest half. "
    "A block's peak is taken from megarun's kernels, which fuse the same operations as XLA.",
    "Loss: 4 bytes per token and word of the vocabulary / tp: logits and their gradient in bf16; / host.num_vocab_tiling.",
    "Pipelines: each of num_microbatches · vpp + pp − 1 iterations keeps the input of a stage, and one stage is recomputed; embedding "
    "and head are on all stages.",
    "Not modelled: copies for layouts, padding to tiles, buffers of collectives that run ahead, and the rematerialisation that XLA "
    "adds where a program does not fit. docs/reference/maxtext.md compares published runs.",
)
"""Paragraphs of the topic."""
