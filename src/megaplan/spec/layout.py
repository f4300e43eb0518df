"""Sections of a spec that define a step's layout: mesh, state sharding, schedule and batch."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from megaplan.scalars import BRANCH, MAX_DEGREE, Degree, MicrobatchCount, OptionsSection, PositiveInt, ScheduleKind, Section, StrictBool


class Mesh(OptionsSection):
    """Parallel degrees. World size = pp · dp_replicate · dp_shard · cp · tp; ep and etp regroup the same ranks.

    Attributes:
        pp: Pipeline ranks.
        vpp: Stage slots of each pipeline rank.
        dp_replicate: Copies of the sharded state (HSDP).
        dp_shard: Ranks over which state is sharded (FSDP2); under `sharding.mode: ddp` data ranks of which ep may borrow.
        cp: Ranks over which every sequence is cut.
        tp: Ranks over which heads and widths are sharded; sequence parallelism is on exactly when it is above 1.
        ep: Ranks over which routed experts are spread; ep · etp divides dp_shard · cp · tp.
        etp: Ranks over which each expert is sharded.
        vocab_parallel: Shard embedding, head and loss over the vocabulary on the tp axis.
        context_exchange: Tensors of latent attention that the ranks of cp gather: keys and values of all heads, or latents to expand.
        towers: Parts of a stated encoder on the ranks of tp: replicated, or split by heads, widths and patches.
    """

    options: ClassVar[frozenset[str]] = frozenset({"context_exchange", "towers"})

    pp: Degree = 1
    vpp: Degree = 1
    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    cp: Degree = 1
    tp: Degree = 1
    ep: Degree = 1
    etp: Degree = 1
    vocab_parallel: StrictBool = False
    context_exchange: Literal["heads", "latents"] = "heads"
    towers: Literal["whole", "split"] = "whole"

    @property
    def gathers_latents(self) -> bool:
        """True if a context group gathers the latents of latent attention."""
        return self.context_exchange == "latents" and self.cp > 1

    @property
    def tower_tp(self) -> int:
        """Ranks that share an encoder's heads, widths and patches."""
        return self.tp if self.towers == "split" else 1

    @property
    def cuts_streams(self) -> bool:
        """True if a rank has a part of the positions of the stream of text."""
        return self.tp * self.cp > 1

    @property
    def degrees_text(self) -> str:
        """Degrees above 1: `pp 2 tp 8`; empty for one rank."""
        axes = ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
        return " ".join(f"{axis} {degree}" for axis in axes if (degree := getattr(self, axis)) > 1)

    @property
    def num_slots(self) -> int:
        """Stage slots of all ranks together."""
        return self.pp * self.vpp

    @property
    def is_pipelined(self) -> bool:
        """True if torch's pipeline schedule runs the step; otherwise megarun's own loop over the microbatches does."""
        return self.num_slots > 1

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that read different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Ranks in the job."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def experts_travel(self) -> bool:
        """True if rows are sent to experts, or slices of experts, on other ranks."""
        return self.ep * self.etp > 1

    @property
    def efsdp(self) -> int:
        """Shard degree of expert banks: dp_shard · cp · tp / (ep · etp)."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)


def _without_default(schema: dict[str, Any]) -> None:
    """Drop the default of a key that follows from other sections (`Spec.with_own_resharding`)."""
    del schema["default"]


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


Unit = Annotated[
    Annotated[Literal["block", "stage"], Tag(f"{BRANCH}name")] | Annotated[int, Field(ge=1, le=1024, strict=True), Tag(f"{BRANCH}number")],
    Discriminator(lambda value: f"{BRANCH}{'number' if _is_number(value) else 'name'}"),
]


def _block_of_one(value: object) -> object:
    """A unit of one layer has one form."""
    return "block" if _is_number(value) and value == 1 else value


class Sharding(OptionsSection):
    """Parameters, gradients and optimizer state on data ranks.

    Attributes:
        mode: `fsdp` shards state over dp_shard; `ddp` replicates it on all data ranks and all-reduces gradients once per step.
        reshard_after_forward: Free gathered parameters after forward, gather them for backward; FSDP2's default: true if sharded, pp 1.
        reshard_size: Neighbouring ranks that keep parts of a unit's gathered parameters for its backward; null for stored shards alone.
        prefetch: Number of units gathered ahead, in forward and in backward; null for 1, in forward only with ep or etp.
        wrap: Unit that FSDP2 gathers and reduces together: a layer, so many consecutive layers of a stage, or a stage with all its layers.
    """

    options: ClassVar[frozenset[str]] = frozenset({"mode", "reshard_size", "prefetch", "wrap"})

    mode: Literal["fsdp", "ddp"] = "fsdp"
    reshard_after_forward: Annotated[StrictBool, Field(json_schema_extra=_without_default)] = False
    reshard_size: Annotated[int, Field(ge=2, le=MAX_DEGREE, strict=True)] | None = None
    prefetch: Annotated[int, Field(ge=1, le=64, strict=True)] | None = None
    wrap: Annotated[Unit, BeforeValidator(_block_of_one)] = "block"

    @property
    def copies(self) -> bool:
        """True if no data rank shares its state with another one."""
        return self.mode == "ddp"

    @property
    def wraps_stages(self) -> bool:
        """True if a stage is one unit of FSDP2."""
        return self.wrap == "stage"

    @property
    def unit_layers(self) -> int:
        """Consecutive layers of a stage that form a unit of FSDP2; 0 if the stage is one unit."""
        return self.wrap if isinstance(self.wrap, int) else int(self.wrap == "block")

    @property
    def kept_over(self) -> int:
        """`reshard_size`, if parameters are freed after forward; else 0."""
        return (self.reshard_size or 0) if self.reshard_after_forward else 0

    def with_own_resharding(self, *, frees: bool) -> "Sharding":
        """The section with this value of `reshard_after_forward` if it is not given; it still counts as not given."""
        key = "reshard_after_forward"
        if key in self.model_fields_set or frees == self.reshard_after_forward:
            return self
        return Sharding.model_construct(self.model_fields_set, **(dict(self) | {key: frees}))


def keepers_of(size: int, degree: int) -> int:
    """Ranks over which a group of this size shards parameters between forward and backward: a part of the group, or all."""
    return size if 0 < size < degree and degree % size == 0 else degree


class ScheduleSection(Section):
    """The pipeline schedule; pp 1 with `1f1b` accumulates gradients over the microbatches.

    Attributes:
        kind: Order of forwards and backwards.
        num_microbatches: Microbatches of one schedule step on every data rank.
        steps_per_update: Schedule steps whose gradients accumulate before the optimizer's step.
    """

    kind: ScheduleKind = "1f1b"
    num_microbatches: MicrobatchCount = 1
    steps_per_update: MicrobatchCount = 1

    @property
    def microbatches_per_update(self) -> int:
        """Microbatches of one optimizer step on every data rank."""
        return self.num_microbatches * self.steps_per_update

    @property
    def distinct_steps(self) -> int:
        """Number of schedule steps of an update with different memory: the first, the last, and one that represents all between.

        The first finds no gradients, and only the last reduces them.
        """
        return min(self.steps_per_update, 3)


class Batch(OptionsSection):
    """The rows of one microbatch on one data rank.

    Attributes:
        micro_batch_size: Sequences of a microbatch.
        seq_length: Tokens of a sequence, before context parallelism.
        images: Images of a sequence, each of `model.towers.vision.encoder.patches` patches; for a model with a stated encoder.
    """

    options: ClassVar[frozenset[str]] = frozenset({"images"})

    micro_batch_size: PositiveInt
    seq_length: PositiveInt
    images: PositiveInt = 1
