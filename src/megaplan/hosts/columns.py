"""What each host keeps in each column: why two hosts of one spec differ there."""

from __future__ import annotations

from collections.abc import Mapping

from megaplan.columns import Column

HOLDS: Mapping[str, Mapping[Column, str]] = {
    "megarun": {
        Column.REPLICATED_PARAMS: "the only copy, sharded over the data ranks, in precision.master",
        Column.TENSOR_PARALLEL_PARAMS: "the only copy, sharded over the data ranks, in precision.master",
        Column.EXPERT_PARALLEL_PARAMS: "the only copy, sharded over the ranks of the same experts, in precision.master",
        Column.GRADIENTS: "whole while a pipeline accumulates, then shards; those of the block that runs",
        Column.MATRIX_OPTIMIZER: "sharded moments; the parameters are the masters",
        Column.OTHER_OPTIMIZER: "sharded moments; the parameters are the masters",
        Column.ACTIVATIONS: "the saved tensors of megarun's operations, flash attention, no dropout",
        Column.FEATURE_ACTIVATIONS: "side embeddings and relation bias",
        Column.ROUTING: "sorted rows, sent and received by an all-to-all",
        Column.COMMUNICATION: "a receive buffer for each microbatch and gathered parameters",
        Column.WORKSPACE: "torch's cuBLAS workspaces, Newton-Schulz",
        Column.OVERHEAD: "what torch's allocator reserves beyond: pools of FSDP2's streams, pages and pieces that nothing fits",
    },
    "megatron": {
        Column.REPLICATED_PARAMS: "a whole 16-bit copy on every data rank",
        Column.TENSOR_PARALLEL_PARAMS: "a whole 16-bit copy on every data rank; the vocabulary is cut too",
        Column.EXPERT_PARALLEL_PARAMS: "a whole 16-bit copy on every rank of the same experts",
        Column.GRADIENTS: "a whole buffer for the whole run; fp32 copies of 16-bit ones after the optimizer's step",
        Column.MATRIX_OPTIMIZER: "masters and moments, sharded by the distributed optimizer alone; Muon's by whole matrices",
        Column.OTHER_OPTIMIZER: "masters and moments, sharded by the distributed optimizer alone",
        Column.ACTIVATIONS: "the saved tensors of Megatron-Core and Transformer Engine: by attention backend, dropout, mask, loss",
        Column.FEATURE_ACTIVATIONS: "nothing: it has no side embeddings",
        Column.ROUTING: "rows, maps and router scores, by the dispatcher",
        Column.COMMUNICATION: "one buffer that all gathers share; what the last microbatch left; parameters are whole",
        Column.WORKSPACE: "cuBLAS, Transformer Engine and grouped GEMM workspaces, gradients for hooks of fused weight gradients, angles",
        Column.OVERHEAD: "host.fragmentation_percent of all else",
    },
    "torchtitan": {
        Column.REPLICATED_PARAMS: "the only copy, sharded over dp_shard · cp, in precision.master",
        Column.TENSOR_PARALLEL_PARAMS: "the only copy, sharded over dp_shard · cp, in precision.master; the vocabulary is cut too",
        Column.EXPERT_PARALLEL_PARAMS: "nothing: experts are not priced",
        Column.GRADIENTS: "shards, in the reduce-scatter stream's pool for the whole run; whole fp32 ones while a pipeline accumulates",
        Column.MATRIX_OPTIMIZER: "AdamW's moments of block matrices, sharded; the parameters are the masters",
        Column.OTHER_OPTIMIZER: "AdamW's moments of all else, sharded; the parameters are the masters",
        Column.ACTIVATIONS: "what transformer blocks keep by activation checkpointing and torch.compile; logits, and the loss in fp32",
        Column.FEATURE_ACTIVATIONS: "nothing: it has no side embeddings",
        Column.ROUTING: "nothing: experts are not priced",
        Column.COMMUNICATION: "gathered parameters, the pool of two all-gathers' outputs, receive buffers; inputs gathered over tp",
        Column.WORKSPACE: "torch's cuBLAS workspaces, 8-bit copies of operands, roots of the second moments of a foreach AdamW",
        Column.OVERHEAD: "host.reserved_percent of all else",
    },
}
"""By host, one line a column."""
