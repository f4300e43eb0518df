"""MaxText: one program for all devices, whose memory XLA plans before it runs."""

from megaplan.columns import Column
from megaplan.hosts.kind import HostKind, Later

HOST = HostKind(
    name="maxtext",
    keys=frozenset({
        "remat_policy", "remat_tensors", "layers_per_block", "num_vocab_tiling", "int8", "fsdp_transpose", "attention_backend",
        "optimizer_offload",
    }),
    holds={
        Column.REPLICATED_PARAMS: "the only copy, in precision.master, sharded over dp_shard · cp; norms are whole",
        Column.TENSOR_PARALLEL_PARAMS: "the only copy, in precision.master, sharded over dp_shard · cp; the vocabulary is cut too",
        Column.EXPERT_PARALLEL_PARAMS: "the only copy, in precision.master, sharded over the data ranks that ep leaves",
        Column.GRADIENTS: "gradients of all parameters, sharded like them; in addition the unreduced gradients of one block, in "
            "precision.params",
        Column.MATRIX_OPTIMIZER: "AdamW's moments of block matrices: the first in precision.moments, the second in precision.master",
        Column.OTHER_OPTIMIZER: "AdamW's moments of everything else",
        Column.ACTIVATIONS: "inputs of scanned blocks, tensors that the remat policy saves, one block that backward recomputes, logits",
        Column.FEATURE_ACTIVATIONS: "nothing: it has no side embeddings",
        Column.ROUTING: "scores and choices of the router, and the rows that experts read, in the block that is recomputed",
        Column.COMMUNICATION: "gathered parameters of one layer; without sharding.reshard_after_forward those of a whole stage",
        Column.WORKSPACE: "nothing: kernels work in the vector memory",
        Column.OVERHEAD: "nothing: XLA places all buffers before the program runs",
    },
    describe=lambda host: f"{host.remat_policy} where recompute is selective",
    budget=Later("megaplan.budget.maxtext:maxtext_budget"),
    kept=Later("megaplan.budget.maxtext:maxtext_kept_bytes"),
    explain=Later("megaplan.budget.maxtext:explain"),
    limits=Later("megaplan.hosts.maxtext.limits:maxtext_rules"),
    step=Later("megaplan.hosts.maxtext.software:step_of"),
    import_=Later("megaplan.cli.import_maxtext:import_maxtext"),
    export=Later("megaplan.exporters.maxtext:export_maxtext"),
    topic=Later("megaplan.hosts.maxtext.topic:TOPIC"),
    schedules=("gpipe", "interleaved_1f1b"),
    vocab_with_tp=True,
    expandable=False,
    xla=True,
    block_layers=2,
)  # fmt: skip
