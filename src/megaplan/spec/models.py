"""The spec's sections as pydantic models: what the user writes, typed, with every default.

Cross-field rules (degrees that must divide, letters that need sections) live in `rules.py`, not here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megaplan.dtypes import DType

# Bounds keep a slip of the keyboard from becoming a list of 2^40 layers or ranks; they are far above any real model.
MAX_INT = 2**48
MAX_LAYERS = 2**16
MAX_DEGREE = 2**20
MAX_MICROBATCHES = 2**16

PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT, strict=True)]
NaturalInt = Annotated[int, Field(ge=0, le=MAX_INT, strict=True)]
LayerCount = Annotated[int, Field(gt=0, le=MAX_LAYERS, strict=True)]
Degree = Annotated[int, Field(gt=0, le=MAX_DEGREE, strict=True)]
MicrobatchCount = Annotated[int, Field(gt=0, le=MAX_MICROBATCHES, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Text = Annotated[str, Field(strict=True)]
StrictBool = Annotated[bool, Field(strict=True)]
Letter = Literal["A", "M", "E", "R", "D"]
Policy = Literal["none", "selective", "full"]
Activation = Literal["swiglu", "relu2", "gelu"]
FloatType = Literal[DType.FP32, DType.BF16, DType.FP16]
ParamType = Literal[DType.FP32, DType.BF16, DType.FP16, DType.FP8]
ScheduleKind = Literal["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]


class Section(BaseModel):
    """Base of every section: immutable, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Indexer(Section):
    """Sparse-attention indexer of MLA on the named layers (0-based global indices)."""

    num_heads: PositiveInt
    head_dim: PositiveInt
    layers: tuple[NaturalInt, ...]


class GroupedQueryAttention(Section):
    """MHA, GQA and MQA: `num_kv_heads` equal to, below, or 1 of `num_heads`."""

    kind: Literal["gqa"]
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    qk_norm: StrictBool = False
    bias: StrictBool = False
    window_size: PositiveInt | None = None
    rope_theta: PositiveFloat = 10_000.0
    nope_layers: tuple[NaturalInt, ...] = ()


class LatentAttention(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). `q_lora_rank: null` projects queries directly."""

    kind: Literal["mla"]
    num_heads: PositiveInt
    q_lora_rank: PositiveInt | None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    rope_theta: PositiveFloat = 10_000.0
    window_size: PositiveInt | None = None
    nope_layers: tuple[NaturalInt, ...] = ()
    indexer: Indexer | None = None


class Mamba2(Section):
    """Mamba-2 (arXiv:2405.21060). Heads = expand · hidden_size / head_dim unless `num_heads` is given."""

    kind: Literal["mamba2"]
    expand: PositiveInt = 2
    head_dim: PositiveInt = 64
    num_heads: PositiveInt | None = None
    state_dim: PositiveInt = 128
    num_groups: PositiveInt = 1
    conv_kernel: PositiveInt = 4
    conv_bias: StrictBool = True
    chunk_size: PositiveInt = 256


class Mamba3(Section):
    """Mamba-3 MIMO; priced, not yet built by megarun."""

    kind: Literal["mamba3"]
    expand: PositiveInt = 2
    head_dim: PositiveInt = 64
    state_dim: PositiveInt = 128
    num_groups: PositiveInt = 1
    mimo_rank: PositiveInt = 1
    num_angles: NaturalInt = 0
    chunk_size: PositiveInt = 256


class MixtureOfExperts(Section):
    """Token-choice top-k experts with an optional shared expert."""

    num_experts: PositiveInt
    top_k: PositiveInt
    ffn_hidden_size: PositiveInt
    shared_ffn_hidden_size: NaturalInt = 0
    activation: Activation = "swiglu"
    normalize_top_k: StrictBool = True
    capacity_factor: PositiveFloat | None = None
    routing_skew: Annotated[float, Field(ge=1, allow_inf_nan=False, strict=True)] = 1.0


class MatrixRecurrence(Section):
    """M²RNN (arXiv:2603.14360): a non-linear recurrence over a matrix state per head."""

    kind: Literal["m2rnn"]
    num_heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    conv_kernel: PositiveInt = 4
    save_every: PositiveInt = 64


class Mlp(Section):
    """The dense MLP of a D block."""

    ffn_hidden_size: PositiveInt
    activation: Activation = "swiglu"


class Ngram(Section):
    """Hashed n-gram embeddings: `num_rows` over all tables, each row `dim` wide, concatenated and projected to hidden."""

    num_tables: PositiveInt
    num_rows: PositiveInt
    dim: PositiveInt


class CategoryEmbedding(Section):
    """A side embedding of category ids through a bottleneck (structure, platform)."""

    num_categories: PositiveInt
    bottleneck: PositiveInt


class RelationBias(Section):
    """One table num_relations × num_heads added to attention scores, shared by all A layers."""

    num_relations: PositiveInt


class MultiTokenPrediction(Section):
    """`depth` extra prediction modules on the last stage: an A block, an ungated MLP, a projection and norms each."""

    depth: Annotated[int, Field(gt=0, le=64, strict=True)]
    ffn_hidden_size: PositiveInt


class Features(Section):
    """Optional features; null means absent."""

    ngram: Ngram | None = None
    structure: CategoryEmbedding | None = None
    platform: CategoryEmbedding | None = None
    relation_bias: RelationBias | None = None
    mtp: MultiTokenPrediction | None = None


Attention = Annotated[GroupedQueryAttention | LatentAttention, Field(discriminator="kind")]
Mamba = Annotated[Mamba2 | Mamba3, Field(discriminator="kind")]


class Model(Section):
    """The architecture. `pattern` is as written; see `pattern.py` for its meaning."""

    pattern: Text
    num_layers: LayerCount
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    tie_embeddings: StrictBool = False
    norm_eps: PositiveFloat = 1e-5
    attention: Attention | None = None
    mamba: Mamba | None = None
    moe: MixtureOfExperts | None = None
    recurrent: MatrixRecurrence | None = None
    mlp: Mlp | None = None
    features: Features = Features()


class Mesh(Section):
    """Parallel degrees. World size = pp · dp_replicate · dp_shard · cp · tp; ep and etp re-read the same ranks."""

    pp: Degree = 1
    vpp: Degree = 1
    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    cp: Degree = 1
    tp: Degree = 1
    ep: Degree = 1
    etp: Degree = 1
    vocab_parallel: StrictBool = False

    @property
    def world_size(self) -> int:
        """Ranks in the job."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """Shard degree of expert banks: dp_shard · cp · tp / (ep · etp)."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)


class Sharding(Section):
    """FSDP2's policy: free gathered parameters after forward (and gather again in backward), or keep them."""

    reshard_after_forward: StrictBool = False


class Schedule(Section):
    """The pipeline schedule; pp 1 with `1f1b` accumulates gradients over the microbatches."""

    kind: ScheduleKind = "1f1b"
    num_microbatches: MicrobatchCount = 1


class Batch(Section):
    """Sequences per data rank and microbatch, and tokens per sequence before context parallelism."""

    micro_batch_size: PositiveInt
    seq_length: PositiveInt


class Precision(Section):
    """Dtype of each tensor role: gathered params, accumulating grads, resident master, optimizer moments, reduction."""

    params: ParamType = DType.BF16
    grads: FloatType = DType.FP32
    master: FloatType = DType.FP32
    moments: FloatType = DType.FP32
    reduce: FloatType = DType.FP32
    families: dict[Letter, ParamType] = {}


class Optimizer(Section):
    """Which optimizer each group uses. `newton_schulz_dtype: null` means fp32 where params are fp32, else bf16."""

    matrix: Literal["muon", "adamw"] = "muon"
    other: Literal["adamw"] = "adamw"
    newton_schulz_dtype: FloatType | None = None
    newton_schulz_steps: Annotated[int, Field(gt=0, le=100, strict=True)] = 5


class Recompute(Section):
    """Activation recompute: one policy for all blocks, and other ones per letter."""

    default: Policy = "none"
    blocks: dict[Letter, Policy] = {}


class Split(Section):
    """How the stack is cut. Cuts and spans are 0-based global layer indices; a cut c separates layers c−1 and c."""

    mode: Literal["equal", "weighted", "manual"] = "weighted"
    objective: Literal["bottleneck", "step_time"] = "bottleneck"
    spans: tuple[tuple[NaturalInt, NaturalInt], ...] | None = None
    reason: Text | None = None
    protects: tuple[Text, ...] = ()
    forbid: tuple[NaturalInt, ...] = ()
    pin: tuple[NaturalInt, ...] = ()
    together: tuple[tuple[NaturalInt, NaturalInt], ...] = ()


class Host(Section):
    """The framework that will run the plan."""

    name: Literal["megarun"] = "megarun"
    kernels: Literal["reference", "triton"] = "reference"


class DeviceRef(Section):
    """A device of the data file by name, and how many share a node's fast fabric."""

    name: Text = "h200"
    per_node: Degree = 8


class Serving(Section):
    """An inference pool priced beside training, never added to it."""

    batch_size: PositiveInt
    context_length: PositiveInt
    kv_dtype: ParamType = DType.BF16
    cache: Literal["contiguous", "paged"] = "contiguous"
    block_size: PositiveInt = 256


class Training(Section):
    """How long and how fast to train; outside the plan's digest."""

    steps: PositiveInt = 1000
    seed: NaturalInt = 0
    learning_rate: PositiveFloat = 3.0e-4
    weight_decay: NonNegativeFloat = 0.1
    gradient_clip: PositiveFloat | None = 1.0
    muon_learning_rate: PositiveFloat | None = None


class Spec(Section):
    """A whole spec file (`format: megaplan.spec/1`)."""

    format: Literal["megaplan.spec/1"]
    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", strict=True)]
    model: Model
    mesh: Mesh = Mesh()
    sharding: Sharding = Sharding()
    schedule: Schedule = Schedule()
    batch: Batch
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    recompute: Recompute = Recompute()
    split: Split = Split()
    host: Host = Host()
    device: DeviceRef = DeviceRef()
    serving: Serving | None = None
    training: Training = Training()

    def as_document(self) -> dict[str, Any]:
        """The spec as plain JSON values, every default written out."""
        return self.model_dump(mode="json")
