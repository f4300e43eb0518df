"""MaxText's software for the step-time model: one compiled program, which the host starts once a step."""

from collections.abc import Iterator

from megaplan.cost.step.from_spec import low_dtype
from megaplan.cost.step.workload import Recomputed, Sharded, Software
from megaplan.hosts.maxtext.policies import saved_places
from megaplan.spec.host import fabric_size
from megaplan.spec.models import Spec

OPERATIONS = {
    ("A", "q_proj"): "query_proj", ("A", "k_proj"): "key_proj", ("A", "v_proj"): "value_proj", ("attention", "attention"): "context",
    ("A", "o_proj"): "out_proj", ("A", "q_down"): "query_wa_proj", ("A", "kv_down"): "kv_wa_proj", ("A", "q_up"): "query_proj",
    ("A", "kv_up"): "key_proj", ("D", "gate_proj"): "mlpwi_0", ("D", "up_proj"): "mlpwi_1", ("experts", "experts"): "mlpwi_0",
}  # fmt: skip
"""Tensor that an operation makes, by the operation's part and name in the cost model; if the tensor is saved, the operation is not
recomputed.
"""
NEVER_AGAIN = ("D", "down_proj")
"""Product whose result is added to the stream: no gradient needs it, so XLA removes it from the recomputation."""


def step_of(spec: Spec) -> tuple[Software, Recomputed]:
    """Software of the host, and the operations that backward runs again."""
    again = Recomputed() if spec.recompute.default == "none" else Recomputed(1.0, kept=frozenset(_kept(spec)))
    return _software(spec), again


def _software(spec: Spec) -> Software:
    """One graph of all kernels; gradients are reduced in the dtype of the products, first inside a slice if several slices have copies.

    AdamW reads the gradient, the parameter and both moments, and writes all except the gradient.
    """
    mesh, precision = spec.mesh, spec.precision
    size = precision.params.of_products.bytes
    inside = mesh.dp_replicate > 1 and mesh.world_size > fabric_size(spec.device)
    return Software(
        name=spec.host.kind.name,
        dtype="int8" if spec.host.int8 else low_dtype(spec),
        tp_overlap=True,
        graphs=frozenset({"full"}),
        token_drop=spec.model.moe is not None and spec.model.moe.capacity_factor is not None,
        sharded=Sharded("fsdp2", reduce_bytes=size, gather_bytes=size, inside=inside) if mesh.dp_shard * mesh.cp > 1 else None,
        optimizer_bytes=float(precision.grads.bytes + 4 * precision.master.bytes + 2 * precision.moments.bytes),
    )


def _kept(spec: Spec) -> Iterator[tuple[str, str]]:
    places = saved_places(spec)
    yield NEVER_AGAIN
    yield from (operation for operation, name in OPERATIONS.items() if name in places or f"moe_{name}" in places)
