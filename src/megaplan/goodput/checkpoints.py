"""Bytes of a checkpoint per rank and in total, and seconds to write and read it in each class of storage."""

from itertools import chain
from typing import NamedTuple

from megakernels.ops.fp8_linear.facts import DELAYED_ROLES, SCALE_BYTES
from megaplan.budget.values import Budget, RankBudget
from megaplan.columns import Column, Phase
from megaplan.goodput.figures import RunFigure, figures, given
from megaplan.hosts.megarun.packed import packed_block
from megaplan.hosts.megarun.storage import STEP_BYTES
from megaplan.inventory.tensors import Group, Inventory, ParamTensor
from megaplan.layout.ranks import Layout
from megaplan.spec.local import delayed_weights
from megaplan.spec.models import Spec

CLASSES = ("local", "parallel", "s3")
STATE = (
    Column.REPLICATED_PARAMS,
    Column.TENSOR_PARALLEL_PARAMS,
    Column.EXPERT_PARALLEL_PARAMS,
    Column.MATRIX_OPTIMIZER,
    Column.OTHER_OPTIMIZER,
)
"""Columns whose bytes a save copies to host memory."""
BIAS_BYTES = 4
STATES_IN_MEMORY = 4
"""States per rank that `save: memory` keeps on a node: two of its own rank and two of the rank whose peer it is."""


class StageBytes(NamedTuple):
    """Bytes written by the ranks of one pipeline rank: a tensor that several of them hold is written once.

    Attributes:
        pp_rank: Pipeline rank.
        num_ranks: Ranks, which share the writing.
        bytes: Bytes of its tensors.
    """

    pp_rank: int
    num_ranks: int
    bytes: int

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """Bytes of each of the ranks, the largest first; they sum to `bytes`."""
        share, rest = divmod(self.bytes, self.num_ranks)
        return (share + 1,) * rest + (share,) * (self.num_ranks - rest)

    @property
    def largest_rank_bytes(self) -> int:
        """The most that one of the ranks writes."""
        return -(-self.bytes // self.num_ranks)


class StorageTime(NamedTuple):
    """Writing and reading in a class of storage.

    Attributes:
        name: Class: local, parallel or s3.
        node_bandwidth: Bytes per second of one node.
        total_bandwidth: Bytes per second of the storage in total; None if each node has its own.
        write_seconds: Time from the copy in host memory to the complete checkpoint.
        read_seconds: Time until every rank has its state.
        survives: True if the checkpoint outlives a broken node.
    """

    name: str
    node_bandwidth: RunFigure
    total_bandwidth: RunFigure | None
    write_seconds: float
    read_seconds: float
    survives: bool


class CheckpointSizes(NamedTuple):
    """Bytes of a checkpoint, and of its copy in host memory.

    Attributes:
        stages: Bytes that each pipeline rank writes.
        rank_host_bytes: Bytes that a save copies to host memory on each rank: its state, replicas on every rank; Megatron-Core copies only
            the tensors that the rank writes.
        per_node: Ranks of a node.
    """

    stages: tuple[StageBytes, ...]
    rank_host_bytes: tuple[int, ...]
    per_node: int

    @property
    def whole_bytes(self) -> int:
        """The whole checkpoint."""
        return sum(stage.bytes for stage in self.stages)

    @property
    def largest_rank_bytes(self) -> int:
        """The most that a rank writes."""
        return max(stage.largest_rank_bytes for stage in self.stages)

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank writes; the pipeline axis is the slowest of the ranks."""
        return tuple(chain.from_iterable(stage.of_ranks for stage in self.stages))

    @property
    def node_host_bytes(self) -> tuple[int, ...]:
        """Host memory that a save takes on each node: the sum of its ranks."""
        return by_node(self.rank_host_bytes, self.per_node)

    @property
    def memory_copies_bytes(self) -> int:
        """Largest host memory that the in-memory copies of each step take on a node."""
        return STATES_IN_MEMORY * max(self.node_host_bytes)


def by_node(of_ranks: tuple[int, ...], per_node: int) -> tuple[int, ...]:
    """Sums of consecutive ranks that share a node."""
    return tuple(sum(of_ranks[first : first + per_node]) for first in range(0, len(of_ranks), per_node))


def checkpoint_sizes(spec: Spec, inventory: Inventory, layout: Layout, budget: Budget) -> CheckpointSizes:
    """Bytes of a checkpoint of this job.

    megarun saves the sharded parameters, optimizer moments and AdamW's step counters; Megatron-Core also its 16-bit parameters.
    """
    tensors = dict(inventory.blocks())
    num_ranks = spec.mesh.world_size // spec.mesh.pp
    stages = []
    for pp_rank, slots in enumerate(layout.by_rank()):
        held = [tensors[name] for slot in slots for name in slot.blocks if name not in slot.copies]
        stored = sum(_saved_bytes(spec, tensor) for block in held for tensor in packed_block(spec.packing, block, 1).tensors)
        biases = BIAS_BYTES * sum(_bias_elements(spec, block.family) for block in held)
        names = [name for slot in slots for name in ({*slot.blocks, *(("head",) if "final_norm" in slot.blocks else ())} - {*slot.copies})]
        scaled = sum(len(delayed_weights(spec, inventory, name)) for name in names)
        stages.append(StageBytes(pp_rank, num_ranks, stored + biases + _scaling_bytes(spec, scaled)))
    sizes = CheckpointSizes(tuple(stages), (), spec.device.per_node)
    if spec.host.kind.saves_working_copy:
        return sizes._replace(rank_host_bytes=sizes.rank_bytes)
    of_ranks = [0] * spec.mesh.world_size
    for rank in budget.ranks:
        size = _state_bytes(rank)
        for number in rank.ranks:
            of_ranks[number] = size
    return sizes._replace(rank_host_bytes=tuple(of_ranks))


def _saved_bytes(spec: Spec, tensor: ParamTensor) -> int:
    precision, elements = spec.precision, tensor.elements
    copy = precision.params.bytes if spec.host.kind.saves_working_copy else 0
    if tensor.group is Group.PACKED:
        return elements
    if tensor.group is Group.FROZEN:
        stored = precision.master if spec.lora is None else spec.lora.stored(precision.params)
        return elements * (copy or stored.bytes)
    by_muon = tensor.group is Group.MATRIX and spec.optimizer.uses_muon
    moments = (1 if by_muon or spec.host.optimizer != "adam" else 2) * precision.moments.bytes
    return elements * (precision.master.bytes + moments + copy) + (0 if by_muon else STEP_BYTES)


def _bias_elements(spec: Spec, family: str) -> int:
    """Elements of the experts' bias of a layer, a buffer that is saved too."""
    moe = spec.model.moe
    return moe.num_choices if family == "E" and moe is not None and moe.expert_bias else 0


def _scaling_bytes(spec: Spec, num_weights: int) -> int:
    """Bytes of the factors and histories of so many weights' products under delayed scaling, buffers that are saved too."""
    recipe = spec.precision.recipe
    return 0 if recipe is None else num_weights * DELAYED_ROLES * SCALE_BYTES * (1 + recipe.amax_history)


def _state_bytes(rank: RankBudget) -> int:
    """State on the device, and state in host memory, which a save copies too."""
    cells = rank.cells[Phase.FORWARD_BACKWARD]
    return sum(cells[column] for column in STATE) + rank.host.total


def storage_times(spec: Spec, sizes: CheckpointSizes) -> dict[str, StorageTime]:
    """Seconds in each class of storage; the spec's bandwidths replace those of its class."""
    written, states = by_node(sizes.rank_bytes, sizes.per_node), sizes.node_host_bytes
    return {name: _storage_time(spec, sizes, name, written, states) for name in CLASSES}


def _storage_time(spec: Spec, sizes: CheckpointSizes, name: str, written: tuple[int, ...], states: tuple[int, ...]) -> StorageTime:
    run, known = spec.run, figures()
    node, total = known[f"{name}_node_bytes_per_second"], known.get(f"{name}_total_bytes_per_second")
    if run is not None and run.storage == name:
        if run.node_bandwidth is not None:
            node = given("node_bandwidth", run.node_bandwidth, "B/s of one node")
        if run.total_bandwidth is not None:
            total = given("total_bandwidth", run.total_bandwidth, "B/s")
    read_whole = sum(states) if spec.host.kind.trained else sizes.whole_bytes
    read_node = max(states) if spec.host.kind.trained else max(written)
    write, read = _seconds(max(written), sizes.whole_bytes, node, total), _seconds(read_node, read_whole, node, total)
    if spec.host.kind.trained:  # checksums: every file is summed when it is written, and all are read and summed before they are loaded
        summing = sizes.largest_rank_bytes / known["sum_bytes_per_second"].value
        read += write + summing
        write += summing
    return StorageTime(name, node, total, write, read, name != "local")


def _seconds(node_bytes: int, whole_bytes: int, node: RunFigure, total: RunFigure | None) -> float:
    return max(node_bytes / node.value, whole_bytes / total.value if total is not None else 0.0)
