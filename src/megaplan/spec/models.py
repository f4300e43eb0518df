"""The spec: the user's input, typed, with every default.

Cross-field rules (degrees that must divide, letters that need sections) live in `rules.py`, not here.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from megakernels.ops.packed_weight.facts import Packing
from megaplan.dtypes import DType
from megaplan.families.attention.scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from megaplan.families.attention.section import GroupedQueryAttention, Indexer, LatentAttention, LayerHeads, LayerLatents, LayerWindow
from megaplan.families.dense.section import Mlp
from megaplan.families.linear_attention.section import GatedDeltaNet, KimiDeltaAttention, LightningAttention, MatrixLstm
from megaplan.families.mamba.section import Mamba1, Mamba2, Mamba3
from megaplan.families.moe.section import LayerSkew, MixtureOfExperts
from megaplan.families.recurrent.section import MatrixRecurrence
from megaplan.families.registry import Letter
from megaplan.families.short_convolution.section import ShortConvolution
from megaplan.low_precision import EMULATED
from megaplan.scalars import (
    MAX_LAYERS,
    Activation,
    FloatType,
    MomentType,
    NaturalInt,
    OptionsSection,
    ParamType,
    RecomputePolicy,
    ScheduleKind,
    Section,
    Text,
)
from megaplan.schedules import num_actions, num_copies, placement
from megaplan.spec.architecture import (
    SIDES,
    Attention,
    CategoryEmbedding,
    Features,
    HeadLayer,
    Mamba,
    Model,
    MultiTokenPrediction,
    Ngram,
    RelationBias,
)
from megaplan.spec.host import DeviceRef, Host, Pool
from megaplan.spec.later import LaterPostTraining
from megaplan.spec.layout import Batch, Mesh, ScheduleSection, Sharding, keepers_of
from megaplan.spec.lora import Lora
from megaplan.spec.low_precision import LowPrecision, keeps_plain
from megaplan.spec.run import Run
from megaplan.spec.serving import Serving
from megaplan.spec.towers import Encoder, Projection, Projector, Tower, Towers, VisionTower
from megaplan.spec.training import BadSteps, ConstantRate, CosineRate, Data, LossSpike, RateSchedule, StableRate, Training
from megaplan.units import short_count

if TYPE_CHECKING:
    from megaplan.spec.post_training import PostTraining
else:
    PostTraining = LaterPostTraining

__all__ = [
    "MAX_LAYERS",
    "SIDES",
    "Activation",
    "Attention",
    "BadSteps",
    "Batch",
    "CategoryEmbedding",
    "ConstantRate",
    "CosineRate",
    "Data",
    "DeviceRef",
    "Encoder",
    "Features",
    "FloatType",
    "GatedDeltaNet",
    "GroupedQueryAttention",
    "HeadLayer",
    "Host",
    "Indexer",
    "KimiDeltaAttention",
    "LatentAttention",
    "LayerHeads",
    "LayerLatents",
    "LayerSkew",
    "LayerWindow",
    "Letter",
    "LightningAttention",
    "LinearScaling",
    "Llama3Scaling",
    "Lora",
    "LossSpike",
    "LowPrecision",
    "Mamba",
    "Mamba1",
    "Mamba2",
    "Mamba3",
    "MatrixLstm",
    "MatrixRecurrence",
    "Mesh",
    "MixtureOfExperts",
    "Mlp",
    "Model",
    "MultiTokenPrediction",
    "Ngram",
    "Optimizer",
    "ParamType",
    "Pool",
    "Precision",
    "Projection",
    "Projector",
    "RateSchedule",
    "Recompute",
    "RecomputePolicy",
    "RelationBias",
    "RopeScaling",
    "Run",
    "ScheduleKind",
    "ScheduleSection",
    "Section",
    "Serving",
    "Sharding",
    "ShortConvolution",
    "Spec",
    "SplitSection",
    "StableRate",
    "Tower",
    "Towers",
    "Training",
    "VisionTower",
    "YarnScaling",
]


class Precision(OptionsSection):
    """Dtype of each tensor role.

    Attributes:
        params: Dtype of gathered parameters and activations.
        grads: Dtype of accumulating gradients.
        master: Dtype of resident, sharded parameters.
        moments: Dtype of optimizer moments.
        reduce: Dtype of gradient reduction.
        families: Dtype of gathered parameters and activations for the layers of a letter, instead of params.
        recipe: Recipe of linears in 8 or 4 bits; null for `params`.
    """

    options: ClassVar[frozenset[str]] = frozenset({"recipe"})

    params: ParamType = DType.BF16
    grads: FloatType = DType.FP32
    master: FloatType = DType.FP32
    moments: MomentType = DType.FP32
    reduce: FloatType = DType.FP32
    families: dict[Letter, ParamType] = Field(default_factory=dict)
    recipe: LowPrecision | None = None

    def of(self, letter: str) -> DType:
        """Dtype of the gathered parameters of a letter's layers; `params` for everything else."""
        return self.families.get(letter, self.params) if self.families else self.params

    def is_low(self, letter: str, layer: int, num_layers: int) -> bool:
        """True if the recipe covers a layer of this letter (global index), see `keeps_plain`."""
        return self.recipe is not None and self.recipe.covers(letter, layer, num_layers) and not keeps_plain(self.of(letter), self.params)

    @property
    def scales_losses(self) -> bool:
        """True if some gradients are made in fp16, whose range is too small without loss scaling."""
        return DType.FP16 in (self.params, *self.families.values())

    @property
    def activations(self) -> DType:
        """Dtype of the activations of a letter's layers."""
        return self.params.of_products


class Optimizer(Section):
    """Optimizer of each group of parameters.

    Attributes:
        matrix: Optimizer of the matrices of blocks.
        other: Optimizer of everything else: embeddings, head, norms, routers, biases, convolutions, Mamba's in_proj.
        newton_schulz_dtype: Dtype of Muon's iteration; null for fp32 where params are fp32, else bf16.
        newton_schulz_steps: Newton-Schulz iterations of Muon.
    """

    matrix: Literal["muon", "adamw"] = "muon"
    other: Literal["adamw"] = "adamw"
    newton_schulz_dtype: FloatType | None = None
    newton_schulz_steps: Annotated[int, Field(gt=0, le=100, strict=True)] = 5

    @property
    def uses_muon(self) -> bool:
        """True if Muon updates the matrix group."""
        return self.matrix == "muon"


class Recompute(OptionsSection):
    """Activation recompute (checkpointing) by family. The last layer is never recomputed.

    Attributes:
        default: Policy of all blocks.
        blocks: Policy for the layers of a letter, instead of default.
        towers: Policy of the blocks of a trained encoder, its last ones included.
    """

    options: ClassVar[frozenset[str]] = frozenset({"towers"})

    default: RecomputePolicy = "none"
    blocks: dict[Letter, RecomputePolicy] = Field(default_factory=dict)
    towers: RecomputePolicy = "none"

    def of(self, letter: str) -> RecomputePolicy:
        """The policy of a letter's layers; the model's last layer is an exception."""
        return self.blocks.get(letter, self.default)


class SplitSection(Section):
    """Cuts of the stack. Layers are 0-based global indices, spans half-open; a cut c separates layers c − 1 and c.

    Attributes:
        mode: equal counts, weighted by cost, or manual.
        objective: Quantity that a weighted split minimises; by default step_time for a pipeline of megarun and bottleneck otherwise.
        spans: [start, stop] of each slot, for a manual split.
        reason: Reason for a manual split.
        protects: Invariants that a manual split protects.
        forbid: Cuts that no split may make, rising.
        pin: Cuts that every split must make, rising.
        together: Spans that no cut may separate.
    """

    mode: Literal["equal", "weighted", "manual"] = "weighted"
    objective: Literal["bottleneck", "step_time"] | None = None
    spans: tuple[tuple[NaturalInt, NaturalInt], ...] | None = None
    reason: Text | None = None
    protects: tuple[Text, ...] = ()
    forbid: tuple[NaturalInt, ...] = ()
    pin: tuple[NaturalInt, ...] = ()
    together: tuple[tuple[NaturalInt, NaturalInt], ...] = ()


class Spec(OptionsSection):
    """A whole spec file.

    Attributes:
        format: megaplan.spec/1.
        name: Name in plan files, reports and checkpoints.
        model: The architecture.
        mesh: Parallel degrees.
        sharding: State sharding.
        schedule: Pipeline schedule.
        batch: Microbatch and sequence.
        data: Rows and their source.
        precision: Dtypes.
        optimizer: Optimizer of each group.
        recompute: Activation recompute.
        split: Cuts of the stack.
        host: The framework that runs the plan.
        device: The device; with `pools` the device of the first stages, which run on all devices outside the pools.
        pools: Further stages on other types of devices, in the order of the pipeline.
        serving: An inference pool; null for none.
        training: Length and learning rates of training.
        lora: Trained adapters at a frozen model; null to train the model.
        run: The whole run, for `megaplan run`; null for defaults.
        post_training: Reinforcement learning of the model, for `megaplan rl`; null for none.
    """

    options: ClassVar[frozenset[str]] = frozenset({"pools", "lora", "run", "post_training"})

    format: Literal["megaplan.spec/1"]
    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", strict=True)]
    model: Model
    mesh: Mesh = Mesh.plain()
    sharding: Sharding = Sharding.plain()
    schedule: ScheduleSection = ScheduleSection.plain()
    batch: Batch
    data: Data = Data.plain()
    precision: Precision = Precision.plain()
    optimizer: Optimizer = Optimizer.plain()
    recompute: Recompute = Recompute.plain()
    split: SplitSection = SplitSection.plain()
    host: Host = Host.plain()
    device: DeviceRef = DeviceRef.plain()
    pools: tuple[Pool, ...] = ()
    serving: Serving | None = None
    training: Training = Training.plain()
    lora: Lora | None = None
    run: Run | None = None
    post_training: PostTraining | None = None

    @model_validator(mode="after")
    def _with_defaults(self) -> Self:
        return self.with_own_resharding()

    def with_own_resharding(self) -> Self:
        """The spec with `sharding.reshard_after_forward`, if it is not given, as FSDP2 has it: true where one pipeline rank shards."""
        shares = max(self.shard_degrees[: 1 + (self.model.moe is not None)]) > 1
        sharding = self.sharding.with_own_resharding(
            frees=shares and not self.mesh.is_pipelined and self.host.kind.reshards and not self.sharding.wraps_stages
        )
        return self if sharding is self.sharding else self.model_copy(update={"sharding": sharding})

    def policy(self, layer: int, letter: str) -> RecomputePolicy:
        """The recompute policy of layer `layer` (global index), which has this letter; the last layer is never recomputed (R-67)."""
        return "none" if layer == self.model.num_layers - 1 else self.recompute.of(letter)

    def offloads(self, layer: int, letter: str) -> bool:
        """True if the saved tensors of layer `layer` (global index, with this letter) are in host memory until its backward."""
        return letter in self.host.activation_offload and layer != self.model.num_layers - 1

    def multiplies_in_eight_bits(self, layer: int, letter: str) -> bool:
        """True if megarun multiplies the linears and banks of layer `layer` (global index, with this letter) in eight bits."""
        return self.host.kind.trained and self.precision.is_low(letter, layer, self.model.num_layers)

    @property
    def emulates_products(self) -> bool:
        """True if megarun makes the products of the recipe in fp32."""
        return self.host.kind.trained and (recipe := self.precision.recipe) is not None and recipe.name in EMULATED

    @property
    def packing(self) -> Packing | None:
        """Form of the weights of frozen linears in fewer bits; None without."""
        return None if self.lora is None else self.lora.packing

    @property
    def newton_schulz_dtype(self) -> DType:
        """Dtype of Muon's iteration: as given, else fp32 if params are fp32, else bf16."""
        if self.optimizer.newton_schulz_dtype is not None:
            return self.optimizer.newton_schulz_dtype
        return DType.FP32 if self.precision.params is DType.FP32 else DType.BF16

    @property
    def has_whole_state(self) -> bool:
        """True if parameters are not sharded over data ranks, so that FSDP2 is not needed."""
        mesh = self.mesh
        return self.sharding.copies or (mesh.dp_shard == mesh.dp_replicate == 1 and (mesh.efsdp == 1 or self.model.moe is None))

    @property
    def interleaves_pairs(self) -> bool:
        """True if megarun's pairs of a forward and a backward take turns at the experts' exchanges."""
        return self.host.kind.trained and self.host.moe_overlap

    @property
    def num_copies(self) -> int:
        """Copies of the model's parts that the ranks of a pipeline hold."""
        return num_copies(placement(self.schedule.kind))

    @property
    def pp_shares(self) -> int:
        """Pipeline ranks that one copy of the model's parameters is divided over."""
        return self.mesh.pp // self.num_copies

    @property
    def shard_degrees(self) -> tuple[int, int]:
        """Numbers of ranks that share dense tensors, and that share expert banks."""
        return (1, 1) if self.sharding.copies else (self.mesh.dp_shard, self.mesh.efsdp)

    @property
    def shard_keepers(self) -> tuple[int, int]:
        """Numbers of ranks that share dense tensors, and that share expert banks, between forward and backward."""
        dense, banks = self.shard_degrees
        return keepers_of(self.sharding.kept_over, dense), keepers_of(self.sharding.kept_over, banks)

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step, over all microbatches and data ranks."""
        return self.batch.micro_batch_size * self.schedule.microbatches_per_update * self.mesh.data_ranks

    @property
    def global_batch_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch_size * self.batch.seq_length

    @property
    def num_actions(self) -> int:
        """Upper bound on the actions of all ranks in one run of the schedule; 0 without a pipeline."""
        mesh = self.mesh
        return num_actions(mesh.pp, mesh.vpp, self.schedule.num_microbatches) if mesh.is_pipelined else 0

    @property
    def devices_text(self) -> str:
        """`8 x h200`, `4 x h200 + 4 x a100-80gb`."""
        first = self.mesh.world_size - sum(pool.count for pool in self.pools)
        devices = [(first, self.device.name), *((pool.count, pool.device.name) for pool in self.pools)]
        return " + ".join(f"{count:,} x {name}" for count, name in devices)

    def described(self, parameters: int) -> str:
        """`nam56r, 4.73 B parameters: 8 x h200, pp 2 tp 4`."""
        degrees = self.mesh.degrees_text
        size = self.devices_text
        return f"{self.name}, {short_count(parameters)} parameters: {size}{f', {degrees}' if degrees else ''}"

    def as_document(self) -> dict[str, Any]:
        """The spec as plain JSON values with all defaults."""
        return self.model_dump(mode="json")
