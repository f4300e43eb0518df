"""torchtitan's software for the step-time model."""

from megaplan.cost.step.from_spec import low_dtype
from megaplan.cost.step.workload import OPTIMIZER_BYTES, Recomputed, Sharded, Software
from megaplan.dtypes import DType
from megaplan.spec.models import Spec


def step_of(spec: Spec) -> tuple[Software, Recomputed]:
    """Software of the host, and the operations that backward runs again."""
    policy, share = spec.recompute.default, 1 / spec.host.checkpoint_every
    per_op = policy == "selective" and share == 1
    whole = ("attention", "core_attn") if per_op and spec.host.checkpoints == "halves" and not spec.host.compile_model else ()
    return _software(spec), Recomputed(share if policy == "full" else 0.0, per_op=per_op, modules=frozenset(whole))


def _software(spec: Spec) -> Software:
    """Kernels of the host, FSDP2's transfers, of one byte per element if float8 weights are gathered, and AdamW's own reads and writes."""
    recipe, mesh = spec.precision.recipe, spec.mesh
    gathered = 1 if recipe is not None and recipe.param_gather else spec.precision.params.bytes
    sharded = Sharded("fsdp2", spec.sharding.reshard_after_forward, spec.precision.reduce.bytes, gathered)
    return Software(
        name=spec.host.kind.name,
        dtype=low_dtype(spec),
        tp_overlap=spec.host.async_tensor_parallel,
        compiled=spec.host.compile_model,
        sharded=sharded if mesh.dp_shard * mesh.cp > 1 else None,
        optimizer_bytes=OPTIMIZER_BYTES * spec.precision.master.bytes / DType.FP32.bytes,
    )
