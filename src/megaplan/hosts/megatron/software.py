"""Megatron-Core as described by the fields of the step-time model."""

from collections import Counter
from typing import get_args

from megaplan.cost.step.from_spec import letters_of, low_dtype
from megaplan.cost.step.workload import OPTIMIZER_BYTES, SUM_BYTES, Recomputed, Sharded, Software
from megaplan.hosts.megatron.setting import attention_kernel
from megaplan.spec.host import Host
from megaplan.spec.host_words import GraphModule
from megaplan.spec.models import Spec

MOMENT_BYTES = 8
"""An fp32 moment of an element, read and written."""


def step_of(spec: Spec) -> tuple[Software, Recomputed]:
    """Software of the step, and the operations that backward runs again."""
    return _software(spec), _recomputed(spec)


def _software(spec: Spec) -> Software:
    """Megatron-Core and Transformer Engine by the keys of `host`.

    Megatron-Core with Transformer Engine, as `host.framework` and `host.release` run it, with the overlap that the host's keys turn on; the
    constants of Megatron-LM are from MooreThreads/SimuMax's runs.
    """
    host = spec.host
    flex, unfused = host.dispatcher == "flex", spec.model.attention is not None and attention_kernel(spec) == "unfused"
    local = host.transformer_impl == "local"
    return Software(
        name=_framework(host),
        release=host.release,
        dtype=low_dtype(spec),
        dispatcher=host.moe_flex_backend if flex else "alltoall",
        tp_overlap=host.tp_comm_overlap,
        exchange_overlap=host.moe_overlap,
        graphs=_graphs(host),
        fp8_attention=spec.precision.recipe is not None and spec.precision.recipe.attention,
        low_head=spec.precision.recipe is not None and spec.precision.recipe.head,
        token_drop=spec.model.moe is not None and spec.model.moe.capacity_factor is not None,
        optimizer_bytes=OPTIMIZER_BYTES - (0 if host.optimizer == "adam" else MOMENT_BYTES),
        zero=host.distributed_optimizer,
        sharded=Sharded("megatron", reduce_bytes=spec.precision.reduce.bytes) if spec.sharding.reshard_after_forward else None,
        data_overlap=host.dp_comm_overlap,
        fused_accumulation=host.wgrad_fusion,
        sum_bytes=SUM_BYTES if host.wgrad_fusion else spec.precision.grads.bytes,
        unfused_attention=unfused,
        attention_dropout=host.attention_dropout > 0,
        flash=host.flash_version,
        modules=("gpt-neox" if host.framework == "gpt-neox" else "megatron") if local and not host.deterministic_mode else None,
        fused_rotation=host.rope_fusion,
        fused_loss=host.cross_entropy != "unfused",
        all_reduces=host.all_reduce_gradients,
        shares_saved=host.distribute_saved_activations,
        reduce_bytes=spec.precision.reduce.bytes if local else None,
        sequence_parallel=host.sequence_parallel,
    )


def _framework(host: Host) -> str:
    """Framework in the step model: Megatron's deterministic kernels and its own modules have their own constants."""
    if host.deterministic_mode:
        return "megatron-lm-deterministic"
    return "megatron-local" if host.transformer_impl == "local" else host.framework


def _graphs(host: Host) -> frozenset[str]:
    """The parts that run from CUDA graphs, by their names in the step model."""
    if host.cuda_graphs == "iteration":
        return frozenset({"full"})
    return frozenset(host.cuda_graph_modules or get_args(GraphModule)) if host.cuda_graphs == "layers" else frozenset()


def _recomputed(spec: Spec) -> Recomputed:
    letters = letters_of(spec.model.pattern, spec.model.num_layers)
    modules, counts = set(spec.host.recompute_modules), Counter(letters)
    if "A" in counts and spec.recompute.of("A") == "selective":
        modules.add("core_attn")
    again = sum(number for letter, number in counts.items() if spec.recompute.of(letter) == "full")
    full, layers = again / len(letters), spec.host.recompute_num_layers
    if layers is not None:
        block = spec.host.recompute_method == "block"  # only the first layers of every virtual stage
        full = min(1.0, layers * spec.host.block_layers * spec.mesh.num_slots / len(letters)) if block else 1.0
    return Recomputed(full, modules=frozenset(modules))
