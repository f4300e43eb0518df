"""Host megarun: memory of its modules, FSDP2 wrappers, pipeline stages and optimizers.

`ledger.py` is the entry for activations: it replays the operations that a family (`megaplan/families`) or a part outside the layers states
(`embedding.py`, `features.py`). Saved sets and working sets are replayed from the operations (`program.py`), never estimated. `storage.py`,
`optimizer.py` and `buffers.py` have the memory outside the blocks.
"""

from megaplan.columns import Column
from megaplan.hosts.kind import HostKind, Later

MORE_RESERVED = 0.06
"""Largest excess of measured reserved memory over the modelled peak, as a share of it: docs/reference/measured.md."""

OWN_KEYS = frozenset({
    "kernels", "libraries", "expandable_segments", "cuda_graphs", "moe_dispatcher", "moe_overlap", "optimizer_offload",
    "activation_offload",
})  # fmt: skip

HOST = HostKind(
    name="megarun",
    keys=OWN_KEYS,
    holds={
        Column.REPLICATED_PARAMS: "the only copy, sharded over the data ranks, in precision.master",
        Column.TENSOR_PARALLEL_PARAMS: "the only copy, sharded over the data ranks, in precision.master",
        Column.EXPERT_PARALLEL_PARAMS: "the only copy, sharded over the ranks of the same experts, in precision.master",
        Column.GRADIENTS: "unsharded while a pipeline accumulates, then shards; and gradients of the running block",
        Column.MATRIX_OPTIMIZER: "sharded moments, except for those in host memory; the parameters are the masters",
        Column.OTHER_OPTIMIZER: "sharded moments, except for those in host memory; the parameters are the masters",
        Column.ACTIVATIONS: "the saved tensors of megarun's operations, flash attention, no dropout",
        Column.FEATURE_ACTIVATIONS: "side embeddings and relation bias",
        Column.ROUTING: "sorted rows that an all-to-all sends and receives, or that are copied from the gathered tokens of all ranks",
        Column.COMMUNICATION: "a receive buffer for each microbatch and gathered parameters",
        Column.WORKSPACE: "torch's cuBLAS workspaces, Newton-Schulz, the device buffer for optimizer state in host memory",
        Column.OVERHEAD: "reserved minus allocated bytes: pools of FSDP2's streams, partly used pages, free pieces that no tensor fits",
    },
    describe=lambda host: f"{host.kernels} kernels",
    budget=Later("megaplan.budget.megarun:megarun_budget"),
    kept=Later("megaplan.budget.megarun:megarun_kept_bytes"),
    layer_kept=Later("megaplan.hosts.megarun.ledger:layer_kept_bytes"),
    limits=Later("megaplan.hosts.megarun.limits:megarun_rules"),
    peaks=Later("megaplan.budget.megarun:MegarunPeaks"),
    sums=Later("megaplan.partition.layer_bytes:necessary_limits"),
    floors=Later("megaplan.exploration.floors:Floors"),
    trained=True,
    carries_values=True,
    graphs=("microbatch", "step", "none"),
    dispatchers=("alltoall", "allgather"),
    more_reserved=lambda _: MORE_RESERVED,
)
