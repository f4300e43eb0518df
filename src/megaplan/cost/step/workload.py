"""The values of a step-time prediction: a spec's model, the degrees and batch of one of its steps, what runs it, and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megaplan.devices import Device

if TYPE_CHECKING:
    from megaplan.inventory.tensors import Inventory
    from megaplan.spec.models import Spec


class MeshShape(NamedTuple):
    """Parallel degrees; `dp` is data ranks, without context."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1


class BatchShape(NamedTuple):
    """Rows of a microbatch on every data rank.

    Attributes:
        micro: Sequences of a microbatch.
        seq: Tokens of a sequence.
        num_microbatches: Of a step.
        document: Mean tokens of the documents that are packed into a sequence and attend to themselves alone; 0 for one document.
    """

    micro: int
    seq: int
    num_microbatches: int
    document: float = 0.0


class Recomputed(NamedTuple):
    """What backward computes again.

    Attributes:
        full: Share of the blocks that run again whole.
        per_op: Half of the products run again, and everything cheap (torchtitan's selective policy).
        modules: Megatron's names: core_attn, layernorm, mla_up_proj, mlp, moe, moe_act.
    """

    full: float = 0.0
    per_op: bool = False
    modules: frozenset[str] = frozenset()


class Sharded(NamedTuple):
    """Parameters sharded over data ranks, gathered for use.

    Attributes:
        kind: fsdp1, fsdp2 or megatron.
        regather: Gathered again in backward.
        reduce_bytes: Of an element of the reduced gradients.
        gather_bytes: Of a gathered element.
        inside: Sharded over the ranks of one domain, with a copy in each (HSDP).
    """

    kind: str
    regather: bool = True
    reduce_bytes: int = 4
    gather_bytes: int = 2
    inside: bool = False


class Software(NamedTuple):
    """The framework and how it was launched.

    Attributes:
        name: A framework of `frameworks.json`.
        release: Its release, as `26.04`; None where its table does not say.
        dtype: bf16, fp8 (one scale a tensor), mxfp8 or nvfp4: of experts, and of the linears of blocks.
        linear_dtype: Of the linears of blocks where it is another one.
        dispatcher: alltoall, deepep or hybridep.
        tp_overlap: Tensor-parallel transfers run beside products.
        exchange_overlap: Exchanges of one microbatch run beside the work of another.
        graphs: Parts that run in CUDA graphs: full, attn, mlp, mamba, moe, moe_router, moe_preprocess.
        compiled: Elementwise operations are fused, by hand or by torch.compile.
        fp8_attention: The attention core multiplies in fp8.
        low_head: The head multiplies in the recipe's dtype.
        token_drop: Experts have a fixed capacity, so the host never waits for counts.
        padded_rows: A rank's routed rows of every expert are filled up to a multiple of what its dtype's products need.
        neighbours: A token's experts stand beside one another (benchmarks that balance the load without a router); else anywhere.
        zero: Optimizer state is sharded over data ranks.
        sharded: Parameters are, too; None if not.
        data_overlap: Gradients are reduced and parameters gathered beside computation; None for what the framework does.
        fused_accumulation: Products of weight gradients add to the sums, where the framework's do; else an operation of its own does.
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


@dataclass(frozen=True, slots=True)
class Machine:
    """Data-sheet figures of a device and its links.

    Attributes:
        peaks: FLOPs per second by dtype; fp8 is mxfp8's too, fp4 is nvfp4's.
        memory: Bytes per second.
        node: Bytes per second to devices of the domain, one direction.
        network: Bytes per second of a device's adapter.
        domain: Devices that share `node`.
        reached: Share of the peak that large products reach, by dtype, where it is given and not the constants'.
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

    @classmethod
    def of(cls, device: Device) -> Machine:
        """The figures of a device."""
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
    """Pipeline stages that are alike.

    Attributes:
        count: Number of these stages.
        blocks: Blocks by kind (`blocks.kinds_in`) on one of them, all of its chunks together.
        embedding: True if it has the embedding.
        head: True if it has the head and the prediction depths.
    """

    count: float
    blocks: Mapping[str, float]
    embedding: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step of training, ready to be timed.

    Attributes:
        spec: The model, its precision and its adapters. Degrees and batch are those of `mesh` and `batch`: a search times many with one
            spec of each policy.
        inventory: The parameters of the spec's model.
        mesh: Degrees.
        batch: Rows of the step.
        software: What runs it.
        machine: The device and its links.
        stages: Stages of the pipeline.
        recomputed: What backward computes again.
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
        """Tokens of a microbatch on one rank, before sequence parallelism."""
        return self.batch.micro * self.batch.seq / self.mesh.cp

    @property
    def step_tokens(self) -> int:
        """Tokens of the whole step."""
        return self.batch.micro * self.batch.seq * self.batch.num_microbatches * self.mesh.dp
