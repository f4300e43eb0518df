"""Inputs of a step-time prediction: the model of a spec, degrees, batch, software and machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megaplan.devices import Device

if TYPE_CHECKING:
    from megaplan.inventory.tensors import Inventory
    from megaplan.spec.models import Spec


class MeshShape(NamedTuple):
    """Parallel degrees; `dp` is the number of data ranks without context ranks."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1


class BatchShape(NamedTuple):
    """The batch of a data rank.

    Attributes:
        micro: Sequences of a microbatch.
        seq: Tokens of a sequence.
        num_microbatches: Microbatches of a step.
        document: Mean tokens of the documents packed into a sequence, which attend to themselves only; 0 for one document per sequence.
    """

    micro: int
    seq: int
    num_microbatches: int
    document: float = 0.0


class Recomputed(NamedTuple):
    """Operations that backward computes again.

    Attributes:
        full: Share of the blocks that run again completely.
        per_op: True if half of the products run again, and all memory-bound operations (torchtitan's selective policy).
        modules: Megatron's names: core_attn, layernorm, mla_up_proj, mlp, moe, moe_act; and attention, all its products.
        kept: Operations of these blocks, by part and name, that do not run again.
    """

    full: float = 0.0
    per_op: bool = False
    modules: frozenset[str] = frozenset()
    kept: frozenset[tuple[str, str]] = frozenset()


class Sharded(NamedTuple):
    """Sharding of parameters over data ranks, which gather them before use.

    Attributes:
        kind: fsdp1, fsdp2 or megatron.
        regather: True if backward gathers the parameters again.
        reduce_bytes: Bytes of an element of the reduced gradients.
        gather_bytes: Bytes of a gathered element.
        inside: True if parameters are sharded over the ranks of one domain, with a copy in each domain (HSDP).
    """

    kind: str
    regather: bool = True
    reduce_bytes: int = 4
    gather_bytes: int = 2
    inside: bool = False


SUM_BYTES = 4
"""Bytes of an element of summed gradients, fp32."""
OPTIMIZER_BYTES = 30.0
"""Bytes of an element that Adam reads and writes: gradient, master, both moments and the parameter."""


class Software(NamedTuple):
    """A framework and its launch options.

    Attributes:
        name: A framework of `frameworks.json`.
        release: Release of the framework, such as `26.04`; None if it is not known.
        dtype: Dtype of experts and of the linears of blocks: bf16, fp8 (one scale per tensor), mxfp8 or nvfp4.
        linear_dtype: Dtype of the linears of blocks if it differs from `dtype`.
        dispatcher: alltoall, deepep or hybridep.
        tp_overlap: True if tensor-parallel transfers overlap with products.
        exchange_overlap: True if exchanges of one microbatch overlap with the work of another.
        graphs: Parts that run in CUDA graphs: full, attn, mlp, mamba, moe, moe_router, moe_preprocess.
        compiled: True if elementwise operations are fused, by hand or by torch.compile.
        fp8_attention: True if the attention core multiplies in fp8.
        low_head: True if the head multiplies in the recipe's dtype.
        token_drop: True if experts have a fixed capacity: the host never waits for token counts.
        padded_rows: True if each rank pads the rows of an expert to the multiple that products of the dtype need.
        neighbours: True if the experts of a token are consecutive (benchmarks that balance the load without a router).
        zero: True if optimizer state is sharded over data ranks.
        sharded: Sharding of parameters over data ranks; None without.
        data_overlap: True if reductions of gradients and gathers of parameters overlap with computation; None for the framework's default.
        fused_accumulation: True if products of weight gradients accumulate, if the framework can; False for a separate operation.
        sum_bytes: Bytes of an element of the gradients that a separate operation adds up.
        optimizer_bytes: Bytes of an element that Adam reads and writes.
        unfused_attention: True if scores go through memory, between products, softmax and dropout.
        attention_dropout: True if attention drops probabilities.
        flash: Generation of FlashAttention if it is not the framework's own; None for that.
        modules: Modules whose copies and rotations are counted (`own_modules.MODULES`); None if a fitted factor includes their bytes.
        fused_rotation: True if one kernel rotates; None for the modules' default.
        fused_loss: True if one kernel makes the loss, where `modules` are counted.
        all_reduces: True if data ranks gather the reduced gradients, too.
        shares_saved: True if tensor ranks share what a checkpoint keeps, and gather it before it runs again.
        reduce_bytes: Bytes of an element of the reduced gradients; None for the framework's.
        sequence_parallel: False if every rank of a tensor group has the norms and the residual stream of all tokens.
    """

    name: str
    release: str | None = None
    dtype: str = "bf16"
    linear_dtype: str | None = None
    dispatcher: str = "alltoall"
    tp_overlap: bool = False
    exchange_overlap: bool = False
    graphs: frozenset[str] = frozenset()
    compiled: bool = True
    fp8_attention: bool = False
    low_head: bool = False
    token_drop: bool = False
    padded_rows: bool = False
    neighbours: bool = False
    zero: bool = True
    sharded: Sharded | None = None
    data_overlap: bool | None = None
    fused_accumulation: bool = True
    sum_bytes: int = SUM_BYTES
    optimizer_bytes: float = OPTIMIZER_BYTES
    unfused_attention: bool = False
    attention_dropout: bool = False
    flash: int | None = None
    modules: str | None = None
    fused_rotation: bool | None = None
    fused_loss: bool = False
    all_reduces: bool = False
    shares_saved: bool = False
    reduce_bytes: int | None = None
    sequence_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """Data-sheet figures of a device and its links.

    Attributes:
        peaks: FLOPs per second by dtype; fp8 also applies to mxfp8, fp4 to nvfp4.
        memory: Bytes per second of memory.
        node: Bytes per second to devices of the domain, one direction.
        network: Bytes per second of a device's adapter.
        domain: Devices that share `node`.
        reached: Given shares of the peak that large products reach, by dtype; they replace those of the constants.
        step_factor: Given factor of whole steps.
    """

    name: str
    generation: str
    num_sms: int
    peaks: Mapping[str, float]
    memory: float
    node: float
    network: float
    domain: int
    reached: Mapping[str, float] = field(default_factory=dict)
    step_factor: float = 1.0

    @classmethod
    def of(cls, device: Device) -> Machine:
        """Figures of a device."""
        return cls(
            name=device.name,
            generation=device.generation,
            num_sms=device.num_sms.value,
            peaks={dtype: float(figure.value) for dtype, figure in device.peak_flops.items()},
            memory=float(device.memory_bandwidth.value),
            node=float(device.node_bandwidth.value),
            network=float(device.network_bandwidth.value),
            domain=device.domain.value,
        )


@dataclass(frozen=True, slots=True)
class StageShape:
    """A group of equal pipeline stages.

    Attributes:
        count: Number of these stages.
        blocks: Number of blocks per stage, all chunks together, by kind (`blocks.kinds_in`).
        embedding: True if the stage has the embedding.
        head: True if the stage has the head and the prediction depths.
    """

    count: float
    blocks: Mapping[str, float]
    embedding: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One training step, with all that its time depends on.

    Attributes:
        spec: Spec with the model, its precision and its adapters. Degrees and batch are those of `mesh` and `batch`: a search uses one spec
            per policy for many of them.
        inventory: Parameters of the spec's model.
        mesh: Parallel degrees.
        batch: Batch of the step.
        software: Framework and launch options.
        machine: Device and links.
        stages: Stages of the pipeline.
        recomputed: Operations that backward computes again.
    """

    spec: Spec
    inventory: Inventory
    mesh: MeshShape
    batch: BatchShape
    software: Software
    machine: Machine
    stages: tuple[StageShape, ...]
    recomputed: Recomputed = field(default_factory=Recomputed)

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one rank, before sequence parallelism divides them."""
        return self.batch.micro * self.batch.seq / self.mesh.cp

    @property
    def step_tokens(self) -> int:
        """Tokens of the whole step."""
        return self.batch.micro * self.batch.seq * self.batch.num_microbatches * self.mesh.dp
