"""The `host` section: the framework that runs the plan, and the launch settings that change memory."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from megakernels.libraries import LibraryName
from megaplan.columns import Basis
from megaplan.devices import Device, Figure, canonical_name, load_device
from megaplan.errors import MegaplanError
from megaplan.families.registry import Letter, Rated
from megaplan.hosts.kind import HostKind
from megaplan.hosts.registry import HOSTS, HostName
from megaplan.scalars import (
    Degree,
    MicrobatchCount,
    MomentType,
    Nanoseconds,
    NaturalInt,
    NonNegativeFloat,
    PeakType,
    Percent,
    PositiveFloat,
    PositiveInt,
    Rate,
    RecipeType,
    ReserveName,
    Section,
    Share,
    StepFactor,
    StrictBool,
    Text,
)
from megaplan.spec import host_words as words


class DeviceRef(Section):
    """The device. Every key after `per_node` replaces a figure of the data file (`megaplan devices NAME`).

    Attributes:
        name: Name of a device of the data file.
        per_node: Devices per node, which share its fast fabric.
        efficiency_percent: Percent of peak for a letter's linears, head, a kernel, memory, node, network, host; others as in the data file.
        launch_ns: Launch time of one kernel in addition to its work; null for the data file's value.
        collective_latency_ns: Latency of one send or collective in addition to the transfer of its bytes; null for the data file's.
        recurrence_step_ns: Time of one step of a recurrence; null for the data file's.
        capacity: Bytes that torch reports as the device's total; null for the data file's.
        reserve: Bytes outside torch's allocator, by item; other items as in the data file.
        peak_flops: Dense FLOPs per second by dtype; other dtypes as in the data file.
        memory_bytes_per_second: Bandwidth of device memory; null for the data file's.
        node_bytes_per_second: Bandwidth to the other devices of a node, one direction; null for the data file's.
        network_bytes_per_second: Bandwidth of a device's adapter, one direction; null for the data file's.
        host_bytes_per_second: Bandwidth between a device and host memory, one direction; null for the data file's.
        domain: Devices that reach each other at node_bytes_per_second; null for the data file's.
        reached: Share of the peak that large products reach under training load, by recipe; used for the time of a step.
        step_factor: Measured over modelled seconds of a step, of a host with fitted constants (`megaplan calibrate`); null for 1.
    """

    name: Text = "h200"
    per_node: Degree = 8
    efficiency_percent: dict[Rated, Percent] = Field(default_factory=dict)
    launch_ns: Nanoseconds | None = None
    collective_latency_ns: Nanoseconds | None = None
    recurrence_step_ns: Nanoseconds | None = None
    capacity: PositiveInt | None = None
    reserve: dict[ReserveName, NaturalInt] = Field(default_factory=dict)
    peak_flops: dict[PeakType, Rate] = Field(default_factory=dict)
    memory_bytes_per_second: Rate | None = None
    node_bytes_per_second: Rate | None = None
    network_bytes_per_second: Rate | None = None
    host_bytes_per_second: Rate | None = None
    domain: Degree | None = None
    reached: dict[RecipeType, Share] = Field(default_factory=dict)
    step_factor: StepFactor | None = None

    @field_validator("name")
    @classmethod
    def _of_data_file(cls, name: str) -> str:
        """The data file's name: `H100` is h100-sxm."""
        return canonical_name(name)

    @model_serializer(mode="wrap")
    def _given_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Writes only figures that are given, so that a key of a later version changes no plan's digest."""
        return {key: value for key, value in handler(self).items() if key in _ALWAYS or value not in (None, {})}


class Pool(Section):
    """Devices of another type, on which the next stages of the pipeline lie.

    Attributes:
        count: Number of devices, a multiple of a stage's.
        device: The device.
    """

    count: PositiveInt
    device: DeviceRef


_ALWAYS = frozenset({"name", "per_node", "efficiency_percent", "launch_ns", "collective_latency_ns", "recurrence_step_ns"})
_FIGURES = {
    "capacity": "capacity",
    "memory_bytes_per_second": "memory_bandwidth",
    "node_bytes_per_second": "node_bandwidth",
    "network_bytes_per_second": "network_bandwidth",
    "host_bytes_per_second": "host_bandwidth",
    "domain": "domain",
}
"""Key of the section to the field of `Device`."""


NODE = 8
"""Devices of a node: a domain up to this size is inside a node, a larger one joins nodes."""


def fabric_size(section: DeviceRef) -> int:
    """Devices that reach each other over the fast fabric: a domain that joins nodes, such as NVL72's, or the devices of a node."""
    if section.domain is not None:
        return section.domain
    try:
        domain = load_device(section.name).domain.value
    except MegaplanError:  # another rule reports it
        return section.per_node
    return domain if domain > NODE else section.per_node


def device_of(section: DeviceRef) -> Device:
    """The device of the data file with the section's figures, which have the basis `given`.

    Raises:
        MegaplanError: MP504 if the data file has no such device.
    """
    device = load_device(section.name)
    found: dict[str, Any] = {field: _given(key, value) for key, field in _FIGURES.items() if (value := getattr(section, key)) is not None}
    if found:
        device = device._replace(**found)
    if section.reserve:
        device = device.with_reserve({item: _given(f"reserve.{item}", value) for item, value in section.reserve.items()})
    if section.peak_flops:
        device = device.with_peaks({dtype: _given(f"peak_flops.{dtype}", value) for dtype, value in section.peak_flops.items()})
    return device


def _given(key: str, value: int) -> Figure:
    return Figure(value, Basis.GIVEN, f"device.{key} of the spec")


RESERVED_PERCENT = 10
"""Percentage that torch reserves above the pools of torchtitan's streams; fitted, see docs/reference/accuracy-torchtitan.md."""
FRAGMENTATION_PERCENT = 5
"""Percent that Megatron reserves above allocated, fitted: on average 4.7 of seven runs whose segments grow (2.4 to 10.9), 5.1 of three with
graphs of layers as well (2.8 to 7.8), and 4.5 of 152 ranks whose segments do not grow (0.7 to 9.3); docs/reference/public-reports.md lists
the runs."""
RELEASED = ("megatron-bridge", "nemo")
"""Frameworks with releases whose measured step times differ."""


class Host(Section):
    """The framework that runs the plan.

    `kernels` and `libraries` belong to megarun; keys from compile_model on to torchtitan, then to MaxText.
    Every key has the host's own default. megarun and Megatron-Core have `cuda_graphs`, `optimizer_offload`, and `expandable_segments`.

    Attributes:
        name: megarun, megatron for Megatron-Core with Transformer Engine, torchtitan, or maxtext.
        kernels: Triton's kernels, or plain torch (reference). On a CPU plain torch computes both, and keeps what the kernels keep.
        libraries: Optional packages that replace megarun's kernels for supported cases on Hopper, with their memory and time.
        expandable_segments: torch's allocator grows a stream's memory in place; null for the host's default: on, for Megatron off.
        model: hybrid is Megatron's HybridModel, one operator per letter; gpt its GPTModel, whose layer is an A followed by a D or E.
        attention_backend: Kernel of attention: fused is cuDNN's, unfused keeps the probabilities; auto is Transformer Engine's choice.
        cross_entropy: unfused (Megatron's default), native, te (Transformer Engine before 2.18) or te_fp32 (2.18, fp32 gradient).
        wgrad_fusion: Weight gradients accumulate in the GEMM; Transformer Engine then keeps one dummy gradient per weight shape.
        attention_mask: The data loader makes a mask of seq_length² bytes per sequence (Megatron's default).
        hidden_dropout: Above 0, each operator keeps a mask of one byte an element; Megatron's default is 0.1.
        attention_dropout: Above 0, unfused attention keeps a mask and dropped probabilities, fused takes longer; Megatron's default is 0.1.
        cublas_workspace_kib: CUBLAS_WORKSPACE_CONFIG, KiB of each of two handles; null for torch's default (Hopper: 32,768).
        distributed_optimizer: Optimizer state is sharded over dp_shard · cp; if off, it is replicated.
        precision_aware_optimizer: Adam with the dtypes of precision.moments; of fp32 masters in its kernel, only the lower 16 bits.
        exp_avg_sq_dtype: Dtype of the optimizer's second moment; null for the first moment's, precision.moments.
        optimizer: Optimizer where optimizer.matrix is adamw: adam, or lion or sgd, which keep one moment.
        optimizer_recipe: fp8 recipe of the optimizer's configuration; null for precision.recipe's, or delayed without one.
        layer_wise_layout: Muon's matrices are unsharded, assigned by a padded buffer (Megatron's default since 2026-05); off, by size.
        optimizer_offload: Fraction of the optimizer's state that is in host memory, under Megatron with its step; null for none.
        activation_offload: Letters of layers whose kept tensors are in host memory between forward and backward; never the last layer.
        recompute_modules: Modules of selective recompute in addition to core_attn, which is recompute A: selective.
        recompute_method: Layers of full recompute: uniform groups of all layers, or block: each of a stage's first layers by itself.
        recompute_num_layers: Layers of a group of the uniform method, or layers of the block method; null for no full recompute.
        moe_dispatcher: alltoall (megarun's default), allgather (Megatron's) or, of Megatron alone, flex; null for the host's default.
        moe_flex_backend: Library of the flex dispatcher: deepep (Megatron's default) or hybridep.
        moe_grouped_gemm: One GEMM for all experts of a rank.
        moe_permute_fusion: Transformer Engine sorts rows to experts and back.
        moe_shared_overlap: The shared expert overlaps the dispatch; it then keeps its input gathered over tp.
        moe_overlap: Expert communication overlaps computation; under megarun in a schedule's pairs, which take turns.
        fused_squared_relu: Weighting and squared ReLU of experts in one kernel.
        tp_comm_overlap: User buffers for tensor-parallel communication.
        microbatch_group_size: Consecutive microbatches of a virtual stage; null for pp.
        transformer_impl: Transformer Engine's modules (Megatron's default), or Megatron's own: attention is not fused or, in 2023, flash.
        flash_version: Generation of FlashAttention in Megatron's own modules; null for the first.
        rope_fusion: One kernel rotates in Megatron's own modules; null for the framework's: all except gpt-neox.
        distribute_saved_activations: Tensor ranks shard the checkpoints of full recompute, if sequence_parallel is off.
        all_reduce_gradients: Own modules in DeepSpeed's bf16 pipelines: 16-bit gradients stay as well as the sums, which are all-reduced.
        sequence_parallel: Norms and the residual stream are sharded over tokens if mesh.tp > 1; off, every rank has all tokens.
        moe_router_dtype: Dtype of routing probabilities; null for the residual stream's.
        moe_load_balancing: The router's balancing, weighted by model.moe.balance_loss_coefficient; Megatron's own default is aux_loss.
        deterministic_mode: Deterministic kernels; without moe_permute_fusion the combination of experts' rows then saves the rows.
        mtp_repeated: All prediction depths share one module's parameters.
        cuda_graphs: Work of graphs: microbatch (megarun's default), step (microbatches and the update), layers, iteration; null: default.
        cuda_graph_modules: Modules in the graphs of layers; empty for all modules of a layer.
        offload_modules: Modules whose inputs are offloaded to host memory while other layers run.
        delayed_wgrad: Weight gradients of a layer are computed after all of its input gradients.
        deferred_head_microbatches: Microbatches whose head weight gradients are computed at the end of the step; null for none.
        moe_rank_capacity: Rows per rank relative to the even share for which expert buffers are allocated; null for no limit.
        moe_paged_stash: Rows relative to the even share in the buffer that holds experts' inputs until backward; null for none.
        offloaded_layers: Number of first layers whose activations are all on the host between forward and backward; null for none.
        fsdp_unit_elements: Elements that Megatron-FSDP gathers and reduces at once; null for its default, 1,000 million.
        fsdp_double_buffer: Megatron-FSDP gathers and reduces in two permanent buffers, each of one layer.
        fsdp_max_pool: Double buffers of Megatron-FSDP have the largest layer's size and serve all layers, not only layers of one size.
        fsdp_persistent_buffers: Everything else has permanent buffers too where Megatron-FSDP has double buffers.
        fsdp_keeps_transposes: Megatron-FSDP keeps the transposes of FP8 weights of all layers.
        fragmentation_percent: Percent reserved above allocated; a fitted figure. Published: 0 to 39.
        features: Launch features that are listed and not priced.
        framework: Framework whose efficiencies and step constants time the step; several frameworks run Megatron-Core, gpt-neox its own.
        release: Release of megatron-bridge or nemo, such as 26.04, which has its own constant for MoE layers; null for none.
        dp_comm_overlap: Gradient reduction and parameter gathering overlap computation; null for the framework's default.
        compile_model: torch.compile of every transformer block.
        compile_loss: torch.compile of the loss, which then keeps only the logits.
        eager_combine: Outputs of routed experts are scaled outside torch.compile, as from November 2025 to torchtitan's files in Python.
        checkpoint_every: Every n-th transformer block follows the recompute policy.
        checkpoints: halves makes attention, and MLP or experts, separate selective checkpoints; eager attention is then fully recomputed.
        repeat_kv: Keys and values are repeated for every query head before attention, as in torchtitan until 2025.
        fsdp_ends: separate: embedding, and norm with head, are two FSDP groups; root, until July 2025: one group, never resharded.
        async_tensor_parallel: TP gathers and reductions overlap TP products.
        keep_pipeline_outputs: The last stage keeps all logits until the step ends and concatenates them, as torch's schedules until 2.9.
        foreach_optimizer: AdamW with torch's foreach kernels instead of the fused one; roots of the second moments are temporary tensors.
        remat_policy: Policy that names the tensors MaxText saves if recompute.default is selective; custom for remat_tensors.
        remat_tensors: Place of each tensor that custom saves: device, or offload for host memory.
        layers_per_block: Decoder layers of MaxText that one iteration of its scan runs, and backward runs again together.
        num_vocab_tiling: Parts of the tokens for which logits and loss are computed one after another.
        int8: Linears of blocks multiply in int8.
        fsdp_transpose: Part of dp_shard that shards the other dimension of MaxText's MLPs.
        reserved_percent: Percent reserved above allocated; fitted to six published runs of one model, see the accuracy page.
    """

    name: HostName = "megarun"
    kernels: Literal["reference", "triton"] = "triton"
    libraries: tuple[LibraryName, ...] = ()
    expandable_segments: StrictBool | None = None
    model: Literal["hybrid", "gpt"] = "hybrid"
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    cross_entropy: Literal["unfused", "native", "te", "te_fp32"] = "unfused"
    wgrad_fusion: StrictBool = True
    attention_mask: StrictBool = True
    hidden_dropout: NonNegativeFloat = 0.1
    attention_dropout: NonNegativeFloat = 0.1
    cublas_workspace_kib: NaturalInt | None = None
    distributed_optimizer: StrictBool = True
    precision_aware_optimizer: StrictBool = False
    exp_avg_sq_dtype: MomentType | None = None
    optimizer: Literal["adam", "lion", "sgd"] = "adam"
    optimizer_recipe: words.OptimizerRecipe | None = None
    layer_wise_layout: StrictBool = False
    optimizer_offload: Share | None = None
    activation_offload: tuple[Letter, ...] = ()
    recompute_modules: tuple[words.RecomputeModule, ...] = ()
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: PositiveInt | None = None
    moe_dispatcher: Literal["allgather", "alltoall", "flex"] | None = None
    moe_flex_backend: Literal["deepep", "hybridep"] = "deepep"
    moe_grouped_gemm: StrictBool = False
    moe_permute_fusion: StrictBool = False
    moe_shared_overlap: StrictBool = False
    moe_overlap: StrictBool = False
    fused_squared_relu: StrictBool = False
    tp_comm_overlap: StrictBool = False
    microbatch_group_size: MicrobatchCount | None = None
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"
    flash_version: Annotated[int, Field(ge=1, le=2, strict=True)] | None = None
    rope_fusion: StrictBool | None = None
    distribute_saved_activations: StrictBool = False
    all_reduce_gradients: StrictBool = False
    sequence_parallel: StrictBool = True
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    moe_load_balancing: words.LoadBalancing = "seq_aux_loss"
    deterministic_mode: StrictBool = False
    mtp_repeated: StrictBool = False
    cuda_graphs: Literal["none", "microbatch", "step", "layers", "iteration"] | None = None
    cuda_graph_modules: tuple[words.GraphModule, ...] = ()
    offload_modules: tuple[words.OffloadModule, ...] = ()
    delayed_wgrad: StrictBool = False
    deferred_head_microbatches: PositiveInt | None = None
    moe_rank_capacity: PositiveFloat | None = None
    moe_paged_stash: PositiveFloat | None = None
    offloaded_layers: PositiveInt | None = None
    fsdp_unit_elements: PositiveInt | None = None
    fsdp_double_buffer: StrictBool = False
    fsdp_max_pool: StrictBool = False
    fsdp_persistent_buffers: StrictBool = False
    fsdp_keeps_transposes: StrictBool = False
    fragmentation_percent: Annotated[int, Field(ge=0, le=100, strict=True)] = FRAGMENTATION_PERCENT
    features: tuple[words.Unpriced, ...] = ()
    framework: words.FrameworkName = "megatron-lm"
    release: Annotated[str, Field(pattern=r"^\d\d\.\d\d$")] | None = None
    dp_comm_overlap: StrictBool | None = None
    compile_model: StrictBool = False
    compile_loss: StrictBool = False
    eager_combine: StrictBool = False
    checkpoint_every: PositiveInt = 1
    checkpoints: Literal["blocks", "halves"] = "blocks"
    repeat_kv: StrictBool = False
    fsdp_ends: Literal["separate", "root"] = "separate"
    async_tensor_parallel: StrictBool = False
    keep_pipeline_outputs: StrictBool = False
    foreach_optimizer: StrictBool = False
    remat_policy: words.RematPolicy = "minimal"
    remat_tensors: dict[words.RematTensor, Literal["device", "offload"]] = Field(default_factory=dict)
    layers_per_block: PositiveInt = 1
    num_vocab_tiling: PositiveInt = 1
    int8: StrictBool = False
    fsdp_transpose: Degree = 1
    reserved_percent: Annotated[int, Field(ge=0, le=100, strict=True)] = RESERVED_PERCENT

    @model_validator(mode="before")
    @classmethod
    def _of_usual_dispatcher(cls, given: Any) -> Any:
        """Replaces the host's default dispatcher by null, so that stating the default changes no digest."""
        if isinstance(given, dict) and "moe_dispatcher" in given:
            kind = HOSTS.get(str(given.get("name", cls.model_fields["name"].default)))
            if kind is not None and given["moe_dispatcher"] == kind.dispatchers[0]:
                return {**given, "moe_dispatcher": None}
        return given

    @property
    def kind(self) -> HostKind:
        """The value of the host: its keys, facts and functions."""
        return HOSTS[self.name]

    @property
    def block_layers(self) -> int:
        """Number of layers in a block of the host, which no cut separates; two for Megatron's GPTModel."""
        return 2 if self.model == "gpt" else self.kind.block_layers

    @property
    def expands_segments(self) -> bool:
        """True if torch's allocator has expandable segments; null is the host's default."""
        return self.kind.expandable if self.expandable_segments is None else self.expandable_segments

    @property
    def graphs(self) -> str:
        """Work of which CUDA graphs are made; null is the host's default, and none with activations in host memory."""
        return self.cuda_graphs or ("none" if self.activation_offload else self.kind.graphs[0])

    @property
    def dispatcher(self) -> str:
        """The exchange by which tokens reach experts of other ranks; null is the host's default."""
        return self.kind.dispatchers[0] if self.moe_dispatcher is None else self.moe_dispatcher

    @property
    def gathers_tokens(self) -> bool:
        """True if megarun gathers the tokens of all ranks instead of sending rows to their experts."""
        return self.kind.trained and self.dispatcher == "allgather"

    @property
    def has_kernels(self) -> bool:
        """True if the kernels of megakernels, or their plain-torch counterparts, run the operations."""
        return "kernels" in self.kind.keys

    @property
    def uses_triton(self) -> bool:
        """True if Triton's kernels of megakernels run the operations."""
        return self.kernels == "triton" and self.has_kernels

    def uses(self, library: LibraryName) -> bool:
        """True if an optional package runs the cases that it supports."""
        return library in self.libraries and self.uses_triton

    @model_serializer(mode="wrap")
    def _own_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Writes only the host's own keys, and later keys only if given, so that a new key changes no plan's digest."""
        usual = {
            "cuda_graphs": self.graphs == self.kind.graphs[0],
            "moe_dispatcher": self.kind.trained and self.dispatcher == self.kind.dispatchers[0],
            "moe_overlap": self.kind.trained and not self.moe_overlap,
        }  # Megatron's plans have always included the last two fields
        own, fields = self.kind.keys - {key for key, is_usual in usual.items() if is_usual} | {"name"}, type(self).model_fields
        left_out = {key for key in _LATER if getattr(self, key) == fields[key].default}
        values = {**handler(self), "moe_dispatcher": self.dispatcher}
        return {key: value for key, value in values.items() if key in own and key not in left_out}


_LATER = frozenset({
    "libraries", "expandable_segments", "framework", "release", "dp_comm_overlap", "recompute_method", "transformer_impl",
    "sequence_parallel", "moe_router_dtype", "moe_load_balancing", "cuda_graphs", "cuda_graph_modules", "offload_modules", "delayed_wgrad",
    "deferred_head_microbatches", "moe_rank_capacity", "moe_paged_stash", "offloaded_layers", "fsdp_unit_elements", "fsdp_double_buffer",
    "exp_avg_sq_dtype", "optimizer_recipe", "optimizer_offload", "activation_offload", "moe_shared_overlap", "optimizer",
    "layer_wise_layout", "remat_policy", "remat_tensors", "layers_per_block", "num_vocab_tiling", "int8", "fsdp_transpose", "checkpoints",
    "flash_version", "rope_fusion", "distribute_saved_activations", "all_reduce_gradients", "fsdp_max_pool", "fsdp_persistent_buffers",
    "fsdp_keeps_transposes", "eager_combine",
})  # fmt: skip
