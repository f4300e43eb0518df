"""The budget of a job that MaxText runs: one program for all devices, so that every device has the same bytes.

XLA plans memory before the program runs. The budget is the largest peak of the tensors that the program defines: state, gradients, inputs
of scanned blocks, tensors that the remat policy saves, logits, and one block that backward recomputes. One block's peak is that of
megarun's kernels,
which fuse the same operations as XLA. Choices of XLA's scheduler are not modelled: copies for layouts, padding to tiles of 8 × 128, buffers
of collectives that run ahead, and rematerialisation that the compiler adds if a program does not fit.

Source: `get_remat_policy` and `__call__` of src/maxtext/layers/decoders.py, AI-Hypercomputer/maxtext at e591f30c.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from megaplan.budget.values import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    MATRIX_OPTIMIZER,
    NO_BYTES,
    OTHER_OPTIMIZER,
    Budget,
    Cells,
    KeptBytes,
    RankBudget,
    StageBudget,
    checked,
    device_budget,
)
from megaplan.columns import Column, Phase
from megaplan.hosts.maxtext.limits import SIZE
from megaplan.hosts.maxtext.policies import DEVICE, HOST, INPUT, saved_bytes, saved_places
from megaplan.hosts.megarun.ledger import block_bytes, block_variants
from megaplan.hosts.megarun.parts import BlockBytes
from megaplan.hosts.megarun.storage import OWNER_COLUMNS
from megaplan.hosts.values import Explained, HostBytes
from megaplan.inventory.tensors import Block, Group, Inventory, Owner, ParamTensor
from megaplan.layout.ranks import Layout, Slot, rank_coordinate
from megaplan.spec.host import Host, device_of
from megaplan.spec.local import local_dims
from megaplan.spec.models import Recompute, Spec

LOGIT_COPIES = 2
"""Logits and their gradient, in the dtype of the products: fp32 values of the loss stay inside fusions."""


class Peaks(NamedTuple):
    """Bytes at the three points of a step at which memory can peak, by column, in addition to the state."""

    loss: dict[Column, int]
    backward: dict[Column, int]
    update: dict[Column, int]


class Program:
    """The buffers of the program of a spec."""

    def __init__(self, spec: Spec, inventory: Inventory, layout: Layout) -> None:
        """Evaluate every block once."""
        self.spec, self.inventory, self.layout = spec, inventory, layout
        mesh = spec.mesh
        given = {"host": Host.plain(), "recompute": Recompute.plain(), "precision": spec.precision.model_copy(update={"recipe": None})}
        self._plain = spec.model_copy(update=given)
        self.dims = local_dims(self._plain)
        self.size = spec.precision.params.of_products.bytes
        whole = 1 if mesh.is_pipelined else spec.schedule.steps_per_update
        self.accumulates = (spec.schedule.microbatches_per_update if not mesh.is_pipelined else whole) > 1
        self.passes = spec.schedule.num_microbatches * mesh.vpp + mesh.pp - 1 if mesh.is_pipelined else 1
        self.tokens = spec.batch.micro_batch_size * spec.batch.seq_length // mesh.cp
        self._bytes: dict[object, BlockBytes] = {}
        self._variants = block_variants(self._plain, inventory)

    def block(self, index: int) -> BlockBytes:
        """Saved and working tensors of a layer with megarun's kernels, without recompute."""
        name = f"layers.{index}"
        variant = self._variants[name]
        if variant not in self._bytes:
            self._bytes[variant] = block_bytes(self._plain, self.dims, name, self.inventory.layers[index])
        return self._bytes[variant]

    def units(self, slot: Slot) -> Iterator[range]:
        """Layers that are scanned and recomputed together: a block, or a pipeline stage."""
        size = slot.stop - slot.start if self.spec.mesh.is_pipelined else SIZE * self.spec.host.layers_per_block
        for start in range(slot.start, slot.stop, size):
            yield range(start, min(start + size, slot.stop))

    def saved(self, layers: range) -> dict[str, int]:
        """Bytes that a unit saves, on the device and in host memory: its input, and the tensors that the policy names."""
        blocks = [self.inventory.layers[index] for index in layers]
        named, places = saved_bytes(self.spec, blocks, self.tokens), saved_places(self.spec)
        found = {place: sum(tensors.values()) for place, tensors in named.items()}
        residual, inner = prod(self.dims.residual) * self.size, len(layers) // SIZE - 1
        found[places.get(INPUT, DEVICE)] += residual
        if INPUT in places:
            found[places[INPUT]] += inner * residual
        if self.spec.recompute.default == "none":
            found[DEVICE] += sum(self.block(index).saved_bytes for index in layers)
        return found

    def kept(self, slot: Slot) -> dict[str, int]:
        """Bytes that a slot keeps of one pass, on the device and in host memory."""
        found = [self.saved(unit) for unit in self.units(slot)]
        return {place: sum(each[place] for each in found) for place in (DEVICE, HOST)}

    def working(self, layers: range) -> dict[Column, int]:
        """Bytes of a unit in backward: recomputed tensors of all its layers, and the largest peak of one layer.

        If the input of every layer is saved, layers are recomputed one by one, so only one is in memory.
        """
        if INPUT in saved_places(self.spec) and len(layers) > SIZE:
            parts = [self.working(layers[start : start + SIZE]) for start in range(0, len(layers), SIZE)]
            return max(parts, key=lambda part: sum(part.values()))
        blocks, found = [self.block(index) for index in layers], dict[Column, int]()
        if self.spec.recompute.default != "none":
            for block in blocks:
                _add(found, block.saved)
        largest = max(blocks, key=lambda block: block.backward_bytes - block.saved_bytes)
        at_peak = NO_BYTES.copy()
        largest.add_to(at_peak, largest.backward, largest.backward.params)
        _add(found, {column: size - largest.saved.get(column, 0) for column, size in at_peak.items()})
        return {column: max(0, size) for column, size in found.items()}

    def gathered(self, layers: Iterable[int]) -> int:
        """Bytes of parameters gathered at a time: of one MaxText layer, or of all given layers under a pipeline."""
        if self.spec.mesh.dp_shard * self.spec.mesh.cp == 1:
            return 0
        sizes = [self.local(self.inventory.layers[index]) * self.size for index in layers]
        if self.spec.mesh.is_pipelined and not self.spec.sharding.reshard_after_forward:
            return sum(sizes)
        return max(sum(sizes[start : start + SIZE]) for start in range(0, len(sizes), SIZE))

    def local(self, block: Block) -> int:
        """Elements of a block on a device before state sharding."""
        mesh = self.spec.mesh
        return sum(prod(tensor.local_shape(mesh.tp, mesh.ep, mesh.etp)) for tensor in block.tensors)

    def shard(self, tensor: ParamTensor) -> int:
        """Elements of a tensor that a device stores; norms and biases are not sharded."""
        mesh = self.spec.mesh
        local = prod(tensor.local_shape(mesh.tp, mesh.ep, mesh.etp))
        if len(tensor.shape) == 1:
            return local
        ranks = mesh.dp_shard * mesh.cp // (mesh.ep if tensor.owner is Owner.EXPERT_PARALLEL else 1)
        return -(-local // ranks)

    def held(self) -> Iterator[ParamTensor]:
        """Tensors on a device: its stage's layers, and embedding and head, which all stages have."""
        for _, block in self.inventory.outside:
            yield from block.tensors
        for slot in self.layout.of_rank(0):
            for index in range(slot.start, slot.stop):
                yield from self.inventory.layers[index].tensors

    def state(self) -> tuple[dict[Column, int], HostBytes]:
        """Parameters and AdamW's moments; moments that are offloaded are in host memory between updates."""
        precision, found = self.spec.precision, NO_BYTES.copy()
        moments = precision.moments.bytes + precision.master.bytes
        for tensor in self.held():
            elements = self.shard(tensor)
            found[OWNER_COLUMNS[tensor.owner]] += elements * precision.master.bytes
            found[MATRIX_OPTIMIZER if tensor.group is Group.MATRIX else OTHER_OPTIMIZER] += elements * moments
        away = found[MATRIX_OPTIMIZER] + found[OTHER_OPTIMIZER] if self.spec.host.optimizer_offload else 0
        kept = sum(self.kept(slot)[HOST] for slot in self.layout.of_rank(0)) * self._runs()
        return found, HostBytes(away + kept, 0)

    def _runs(self) -> int:
        """Number of passes whose tensors are kept at the same time, over the slots of a stage."""
        return -(-self.passes // self.spec.mesh.vpp)

    def peaks(self) -> Peaks:
        """Bytes at the loss, in the backward of the largest unit, and in the update."""
        slots, precision = self.layout.of_rank(0), self.spec.precision
        saved = sum(self.kept(slot)[DEVICE] for slot in slots) * self._runs()
        gradients = sum(map(self.shard, self.held())) * precision.grads.bytes
        units = {self._key(unit): unit for slot in slots for unit in self.units(slot)}
        busiest = max(map(self.working, units.values()), key=lambda found: sum(found.values()))
        layers = [index for slot in slots for index in range(slot.start, slot.stop)]
        head = self.inventory.block("embedding" if self.inventory.tied else "head")
        rows = self.spec.model.vocab_size // self.spec.mesh.tp
        logits = LOGIT_COPIES * self.tokens * self.size * rows // self.spec.host.num_vocab_tiling
        sums = gradients if self.accumulates else 0
        at_head = {ACTIVATIONS: saved + logits, COMMUNICATION: self.local(head) * self.size, GRADIENTS: sums + self.local(head) * self.size}
        inside = {ACTIVATIONS: saved, COMMUNICATION: self.gathered(layers), GRADIENTS: gradients + sums}
        _add(inside, busiest)
        return Peaks(at_head, inside, {GRADIENTS: gradients})

    def _key(self, unit: range) -> object:
        return tuple(self._variants[f"layers.{index}"] for index in unit)


def _add(found: dict[Column, int], more: dict[Column, int]) -> None:
    for column, size in more.items():
        found[column] = found.get(column, 0) + size


def maxtext_budget(spec: Spec, inventory: Inventory, layout: Layout) -> Budget:
    """Bytes of every rank by phase and column.

    Args:
        spec: A checked spec whose host is maxtext.
        inventory: Parameter tensors of the spec.
        layout: Slots of the spec, which are equal.
    """
    device, program = device_budget(device_of(spec.device), spec.mesh.world_size), Program(spec, inventory, layout)
    cells, where, host = _cells(program)
    ranks = tuple(range(spec.mesh.world_size))
    local = sum(prod(tensor.local_shape(spec.mesh.tp, spec.mesh.ep, spec.mesh.etp)) for tensor in program.held())
    rank = RankBudget(ranks, rank_coordinate(spec.mesh, 0), local, cells, where, device.usable_bytes, host)
    stages = tuple(
        StageBudget(slot.index, slot.pp_rank, slot.chunk, slot.start, slot.stop, _whole(inventory, slot)) for slot in layout.slots
    )
    return Budget(device, stages, (rank,), inventory.parameters, inventory.active_parameters)


def _whole(inventory: Inventory, slot: Slot) -> int:
    layers = sum(inventory.layers[index].elements for index in range(slot.start, slot.stop))
    return layers + sum(block.elements for name, block in inventory.outside if name in slot.blocks)


def _cells(program: Program) -> tuple[Cells, dict[Phase, str], HostBytes]:
    state, host = program.state()
    peaks, offloads = program.peaks(), program.spec.host.optimizer_offload
    idle = {**state, MATRIX_OPTIMIZER: 0, OTHER_OPTIMIZER: 0} if offloads else state
    candidates = {"the loss of all tokens": peaks.loss, "the block that is recomputed in backward": peaks.backward}
    place, busiest = max(candidates.items(), key=lambda item: sum(item[1].values()))
    running, updating = idle.copy(), state.copy()
    _add(running, busiest)
    _add(updating, peaks.update)
    phases = (idle, running, updating, running, updating)
    words = ("parameters and moments in place", place, "the update of all parameters", place, "the update of all parameters")
    cells = {phase: found.copy() for phase, found in zip(Phase, phases, strict=True)}
    return checked(cells), dict(zip(Phase, words, strict=True)), host


def maxtext_kept_bytes(spec: Spec, inventory: Inventory, layout: Layout) -> tuple[KeptBytes, ...]:
    """Bytes that one microbatch keeps on each slot, in model order."""
    program = Program(spec, inventory, layout)
    return tuple(KeptBytes(program.kept(slot)[DEVICE]) for slot in layout.slots)


def explain(spec: Spec, inventory: Inventory, layout: Layout, pp_rank: int) -> Explained:
    """The layers of a pipeline rank, and the tensors that the remat policy saves of each."""
    program = Program(spec, inventory, layout)
    held: dict[object, tuple[list[str], Block, list[tuple[str, ...]], int]] = {}
    for slot in layout.of_rank(pp_rank):
        for index in range(slot.start, slot.stop):
            block = inventory.layers[index]
            named = saved_bytes(spec, (block,), program.tokens)
            rows: list[tuple[str, ...]] = [(name, place, f"{size:,}") for place, tensors in named.items() for name, size in tensors.items()]
            entry = held.setdefault(program._variants[f"layers.{index}"], ([], block, rows, sum(named[DEVICE].values())))
            entry[0].append(f"layers.{index}")
    titled = [(f"{names[0]}{f' and {len(names) - 1} more like it' if names[1:] else ''}, {block.family}", block, rows, size)
              for names, block, rows, size in held.values()]  # fmt: skip
    return Explained([(title, block) for title, block, _, _ in titled], ("tensor", "place", "bytes"),
                     [(title, size, rows) for title, _, rows, size in titled])  # fmt: skip
