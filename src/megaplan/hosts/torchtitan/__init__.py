"""torchtitan: FSDP2 of transformer blocks, described by the families and by megarun's replay."""

from typing import Any

from megaplan.columns import Column
from megaplan.hosts.kind import HostKind, Later, share_above

MOST_PERCENT = 31
"""Most that published runs have reserved above live tensors and pools: docs/reference/accuracy-torchtitan.md."""


def _compiled(host: Any) -> str:
    """Parts that torch.compile runs."""
    parts = [name for name, compiled in (("blocks", host.compile_model), ("loss", host.compile_loss)) if compiled]
    return f"{' and '.join(parts)} compiled" if parts else "eager"


HOST = HostKind(
    name="torchtitan",
    keys=frozenset({
        "compile_model", "compile_loss", "checkpoint_every", "checkpoints", "repeat_kv", "fsdp_ends", "async_tensor_parallel",
        "keep_pipeline_outputs", "foreach_optimizer", "eager_combine", "reserved_percent",
    }),
    holds={
        Column.REPLICATED_PARAMS: "the only copy, sharded over dp_shard · cp, in precision.master",
        Column.TENSOR_PARALLEL_PARAMS: "the only copy, sharded over dp_shard · cp, in precision.master; the vocabulary is cut too",
        Column.EXPERT_PARALLEL_PARAMS: "the only copy, sharded over the data ranks that ep leaves, in precision.master",
        Column.GRADIENTS: "shards, in the reduce-scatter stream's pool for the whole run; with a pipeline also unsharded ones in fp32",
        Column.MATRIX_OPTIMIZER: "AdamW's moments of block matrices, sharded; the parameters are the masters",
        Column.OTHER_OPTIMIZER: "AdamW's moments of everything else, sharded; the parameters are the masters",
        Column.ACTIVATIONS: "tensors that blocks save under activation checkpointing and torch.compile; logits, and the loss in fp32",
        Column.FEATURE_ACTIVATIONS: "nothing: it has no side embeddings",
        Column.ROUTING: "scores and choices of the router, and the rows that experts read",
        Column.COMMUNICATION: "gathered parameters, the pool of two all-gathers' outputs, receive buffers; inputs gathered over tp",
        Column.WORKSPACE: "torch's cuBLAS workspaces, 8-bit copies of operands, roots of the second moments of a foreach AdamW",
        Column.OVERHEAD: "host.reserved_percent of everything else",
    },
    describe=_compiled,
    budget=Later("megaplan.budget.torchtitan:torchtitan_budget"),
    kept=Later("megaplan.budget.torchtitan:torchtitan_kept_bytes"),
    explain=Later("megaplan.hosts.torchtitan.explain:explain"),
    limits=Later("megaplan.hosts.torchtitan.limits:torchtitan_rules"),
    sums=Later("megaplan.partition.torchtitan_bytes:torchtitan_limits"),
    floors=Later("megaplan.exploration.torchtitan_floors:TorchtitanFloors"),
    step=Later("megaplan.hosts.torchtitan.software:step_of"),
    import_=Later("megaplan.cli.import_torchtitan:import_torchtitan"),
    export=Later("megaplan.exporters.torchtitan:export_torchtitan"),
    topic=Later("megaplan.hosts.torchtitan.topic:TOPIC"),
    vocab_with_tp=True,
    block_layers=2,
    more_reserved=lambda host: share_above(host.reserved_percent, MOST_PERCENT),
)  # fmt: skip
