"""What a step-time prediction is made of: model, mesh, batch, software and machine. A spec and a published row both give one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megaplan.devices import Device


class AttentionShape(NamedTuple):
    """Attention of every A block.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        key_dim: Width of a query or key head, its rotary part included.
        value_dim: Width of a value head.
        q_lora: Rank of the query's latent under MLA; 0 for a full projection.
        kv_lora: Rank of the key-value latent; 0 for grouped-query attention.
        rope_dim: Width of MLA's shared rotary key.
        window: Keys that a windowed layer sees; 0 for none.
        window_share: Part of the layers that have the window.
        sinks: Attention sinks, and experts with biases and a clamped activation: kernels of their own, unfused in older releases.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    window: int = 0
    window_share: float = 0.0
    sinks: bool = False


class ExpertShape(NamedTuple):
    """Routed experts of every E block.

    Attributes:
        num: Experts.
        top_k: Experts of a token.
        width: Of one expert.
        shared: Width of the shared expert; 0 for none.
        latent: Width that tokens have on their way through the experts; 0 for the hidden width.
        padding: Rows that experts compute over routed rows: a fixed capacity is filled up.
    """

    num: int
    top_k: int
    width: int
    shared: int = 0
    latent: int = 0
    padding: float = 1.0


class MambaShape(NamedTuple):
    """Mamba-2 of every M block."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int


class AdapterShape(NamedTuple):
    """Low-rank adapters beside linears of a model whose every other weight is frozen.

    Attributes:
        rank: Width between their two products.
        linears: Which linears have one, by the names of `low_rank.LINEARS`.
    """

    rank: int
    linears: frozenset[str]


class ModelShape(NamedTuple):
    """The model's dimensions.

    Attributes:
        hidden: Width of the residual stream.
        vocab: Rows of embedding and head.
        tied: One table for both.
        gated: MLPs and experts multiply a gate: three matrices instead of two.
        ffn: Width of a D block.
        counts: Blocks by letter.
        mtp: Multi-token prediction depths, each an A and a D or E block and a head.
        adapters: Low-rank adapters, which alone are trained; None to train the model.
    """

    hidden: int
    vocab: int
    tied: bool
    gated: bool
    ffn: int
    counts: Mapping[str, float]
    attention: AttentionShape | None = None
    experts: ExpertShape | None = None
    mamba: MambaShape | None = None
    mtp: int = 0
    adapters: AdapterShape | None = None


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
        count: How many.
        blocks: Blocks by letter on one of them, all of its chunks together.
        embedding: It has the embedding.
        head: It has the head, and the prediction depths.
    """

    count: float
    blocks: Mapping[str, float]
    embedding: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True)
class StepWorkload:
    """One step of training, ready to be timed."""

    model: ModelShape
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
