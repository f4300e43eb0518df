"""Megatron-Core: the allocations of its pipeline ranks, tensor by tensor."""

from megaplan.columns import Column
from megaplan.hosts.kind import HostKind, Later, share_above

GROWING_MOST_PERCENT, MOST_PERCENT = 11, 29
"""Largest percentage by which published runs have reserved more than they allocated, with expandable segments and without:
docs/reference/public-reports.md and docs/guides/hosts.md list them.
"""

KEYS = frozenset({
    "expandable_segments", "model", "attention_backend", "cross_entropy", "wgrad_fusion", "attention_mask", "hidden_dropout",
    "attention_dropout", "cublas_workspace_kib", "distributed_optimizer", "precision_aware_optimizer", "recompute_modules",
    "recompute_method", "recompute_num_layers", "moe_dispatcher", "moe_flex_backend", "moe_grouped_gemm", "moe_permute_fusion",
    "moe_overlap", "fused_squared_relu", "tp_comm_overlap", "microbatch_group_size", "transformer_impl", "sequence_parallel",
    "moe_router_dtype", "moe_load_balancing", "deterministic_mode", "mtp_repeated", "cuda_graphs", "cuda_graph_modules",
    "offload_modules", "delayed_wgrad", "deferred_head_microbatches", "moe_rank_capacity", "moe_paged_stash", "offloaded_layers",
    "fsdp_unit_elements", "fsdp_double_buffer", "fsdp_max_pool", "fsdp_persistent_buffers", "fsdp_keeps_transposes",
    "fragmentation_percent", "features", "framework", "release", "dp_comm_overlap",
    "exp_avg_sq_dtype", "optimizer_recipe", "optimizer_offload", "moe_shared_overlap", "optimizer", "layer_wise_layout",
    "flash_version", "rope_fusion", "distribute_saved_activations", "all_reduce_gradients",
})  # fmt: skip

HOST = HostKind(
    name="megatron",
    keys=KEYS,
    holds={
        Column.REPLICATED_PARAMS: "a full 16-bit copy on every data rank",
        Column.TENSOR_PARALLEL_PARAMS: "a full 16-bit copy on every data rank; tp shards the vocabulary too",
        Column.EXPERT_PARALLEL_PARAMS: "a full 16-bit copy on every rank with the same experts",
        Column.GRADIENTS: "an unsharded buffer for the whole run; fp32 copies of 16-bit ones after the optimizer's step",
        Column.MATRIX_OPTIMIZER: "masters and moments, sharded by the distributed optimizer alone; with Muon whole matrices per rank",
        Column.OTHER_OPTIMIZER: "masters and moments, sharded by the distributed optimizer alone",
        Column.ACTIVATIONS: "the saved tensors of Megatron-Core and Transformer Engine: by attention backend, dropout, mask, loss",
        Column.FEATURE_ACTIVATIONS: "nothing: it has no side embeddings",
        Column.ROUTING: "rows, maps and router scores, by the dispatcher",
        Column.COMMUNICATION: "one buffer that all gathers share; parameters are not sharded, so nothing is gathered",
        Column.WORKSPACE: "cuBLAS, Transformer Engine and grouped GEMM workspaces, gradients for hooks of fused weight gradients, angles",
        Column.OVERHEAD: "host.fragmentation_percent of everything else; a CUDA graph of the step has a separate pool",
    },
    describe=lambda host: f"{host.model} model",
    budget=Later("megaplan.budget.megatron:megatron_budget"),
    kept=Later("megaplan.budget.megatron:megatron_kept_bytes"),
    tensors=Later("megaplan.budget.megatron:tensor_bytes"),
    explain=Later("megaplan.hosts.megatron.explain:explain"),
    limits=Later("megaplan.hosts.megatron.limits:megatron_rules"),
    peaks=Later("megaplan.budget.megatron:MegatronPeaks"),
    sums=Later("megaplan.partition.megatron_bytes:megatron_limits"),
    floors=Later("megaplan.exploration.megatron_floors:MegatronFloors"),
    reserve=Later("megaplan.budget.megatron:megatron_reserve"),
    step=Later("megaplan.hosts.megatron.software:step_of"),
    import_=Later("megaplan.cli.import_megatron:import_megatron"),
    export=Later("megaplan.exporters.megatron:export_megatron"),
    schedules=("1f1b", "interleaved_1f1b"),
    saves_working_copy=True,
    own_layers=True,
    vocab_with_tp=True,
    reshards=False,
    expandable=False,
    graphs=("none", "layers", "iteration"),
    dispatchers=("allgather", "alltoall", "flex"),
    empty_slots=True,
    few_microbatches=True,
    more_reserved=lambda host: share_above(host.fragmentation_percent, GROWING_MOST_PERCENT if host.expands_segments else MOST_PERCENT),
)
