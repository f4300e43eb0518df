"""Sizes of a rank: of its blocks, of a microbatch's transfer between stages, and of shards that are gathered in fewer bits.

With `precision.recipe.param_gather` a rank packs its shard of a weight (`megakernels.ops.fp8_linear.weights`), and FSDP2 gathers the rows
of bytes. Weights of the linears that a recipe covers are packed if each shard has whole blocks of scales; the rest is gathered as without
the key: gates of one row, layers of `first_last_bf16`, head and prediction depths. Tensors that FSDP2 does not shard have no gather and do
not change.

MXFP8 and rows with a scale each have other elements for the forward product than for the gradient of the input. As in Transformer Engine,
forward gathers the one copy and backward the other, or both at once if one gather serves both products: where gathered parameters are kept,
in whole or in part, where backward runs a layer's linears again, as attention that gathers latents does, and under a pipeline, whose next
forward reads what a backward has gathered.

Source: Transformer Engine, `fsdp_pre_all_gather` of `pytorch/tensor/mxfp8_tensor.py`; torchao 0.18, `float8/fsdp_utils.py`.
"""

from collections.abc import Iterable
from itertools import accumulate
from math import prod
from typing import NamedTuple

from megakernels.libraries import FLASH4
from megakernels.ops.fp8_linear.facts import DELAYED, SCALE_BYTES
from megakernels.ops.fp8_linear.packing.facts import (
    OWN_LARGEST,
    PACKED_COLUMNS,
    PACKED_ROWS,
    TWO_FORMS,
    num_largest,
    packed_columns,
    packing_bytes,
    packs,
)
from megaplan.blocks.ops import Dims
from megaplan.blocks.payload import Payload
from megaplan.dtypes import DType
from megaplan.families.registry import FAMILIES
from megaplan.inventory.adapters import linear_of
from megaplan.inventory.tensors import Inventory, Outside
from megaplan.low_precision import SCALINGS
from megaplan.spec.low_precision import keeps_plain
from megaplan.spec.models import Spec

ALIGNMENT_BYTES = 16
"""Alignment of a value in a packed tensor: kernels read views of it like separate tensors."""


class Part(NamedTuple):
    """A part of the transfer between stages: the stream, or a value.

    Attributes:
        value: The value; None for the stream.
        shape: Shape on a rank.
        dtype: Dtype.
    """

    value: Payload | None
    shape: tuple[int, ...]
    dtype: DType

    @property
    def own_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.bytes

    @property
    def bytes(self) -> int:
        """Bytes in a packed tensor."""
        return -(-self.own_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Boundary(NamedTuple):
    """Tensors that one microbatch sends from a stage to the next.

    Attributes:
        stream: The residual stream, all its streams.
        values: Values of earlier layers that later layers read, by the layers that pass them on.
    """

    stream: Part
    values: tuple[Part, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stream, and the values after it."""
        return self.stream, *self.values

    @property
    def bytes(self) -> int:
        """Bytes of one microbatch, activations or gradients."""
        return sum([part.bytes for part in self.parts]) if self.values else self.stream.own_bytes


def local_dims(spec: Spec, *, is_last_cp_rank: bool = True) -> Dims:
    """The local sizes of a checked spec (cp and tp divide the sequence), for the last rank of a CP group or another."""
    mesh, batch = spec.mesh, spec.batch
    tokens, relation = batch.seq_length // mesh.cp, spec.model.features.relation_bias
    return Dims(
        batch=batch.micro_batch_size,
        tokens=tokens,
        residual_tokens=tokens // mesh.tp,
        hidden=spec.model.hidden_size,
        tp=mesh.tp,
        cp=mesh.cp,
        dtype=spec.precision.activations,
        packed=spec.data.packing == "documents",
        is_last_cp_rank=is_last_cp_rank,
        ep=mesh.ep,
        etp=mesh.etp,
        kernels=spec.host.uses_triton,
        gathers=spec.host.uses_triton,
        frozen=spec.lora is not None,
        relations=0 if relation is None else relation.num_relations,
        flash4=spec.host.uses(FLASH4),
        gathers_latents=mesh.gathers_latents,
        streams=spec.model.num_streams,
        gathers_tokens=spec.host.gathers_tokens,
    )


def boundary(spec: Spec, dims: Dims, cut: int) -> Boundary:
    """The tensors that a stage beginning with layer `cut` receives from the previous stage."""
    stream = Part(None, dims.boundary, spec.precision.activations)
    return Boundary(stream, tuple([part for value, part in payload_parts(spec, dims) if value.crosses(cut)]))


def boundary_sizes(spec: Spec, dims: Dims) -> list[int]:
    """Bytes of the boundary before each layer from the second on."""
    stream, steps = Part(None, dims.boundary, spec.precision.activations), [0] * (spec.model.num_layers + 2)
    for value, part in payload_parts(spec, dims):
        steps[value.source + 1] += part.bytes
        steps[value.readers[-1] + 1] -= part.bytes
    return [stream.bytes + carried if carried else stream.own_bytes for carried in list(accumulate(steps))[1:-2]]


def payload_parts(spec: Spec, dims: Dims) -> list[tuple[Payload, Part]]:
    """The model's values with their sizes on a rank."""
    of_value = ((value, value.dtype or spec.precision.of(value.letter).of_products) for value in spec.model.payload)
    return [(value, Part(value, value.shape(dims), dtype)) for value, dtype in of_value]


ONE_ROW = "shared_gate.weight"
"""The weight of a linear that multiplies in a recipe's format and has one row, so that it is not packed."""
BANKS, BANK_DIMS = frozenset({"experts.gate_proj", "experts.up_proj", "experts.down_proj"}), 3
"""Matrices of a bank [E, a, b], which are sharded as the rows of all."""


class PackedShards(NamedTuple):
    """The packed shards of a group on one rank.

    Attributes:
        maxima_bytes: Largest magnitudes of their weights, fp32, where scales depend on them.
        elements: Elements of the shards.
        packed_bytes: The same packed.
        making_bytes: Most bytes while they are packed one after another, results included.
    """

    maxima_bytes: int = 0
    elements: int = 0
    packed_bytes: int = 0
    making_bytes: int = 0


class PackedGather(NamedTuple):
    """Weights of a spec that are packed.

    Attributes:
        scaling: Scaling of their elements.
        families: Letters whose linears the recipe covers.
        layers: The layers that it covers: the first, and the first after them.
        both: Letters whose weights are gathered in the form of both products at once.
        degrees: Numbers of ranks that share a dense weight, and that share a bank.
    """

    scaling: str
    families: frozenset[str]
    layers: tuple[int, int]
    both: frozenset[str]
    degrees: tuple[int, int]

    def covers(self, name: str, family: str) -> bool:
        """True for a block of the inventory whose linears have packed weights."""
        first, behind = self.layers
        return family in self.families and name.startswith("layers.") and first <= int(name.removeprefix("layers.")) < behind

    def shard_bytes(self, family: str, name: str, shape: tuple[int, ...]) -> int | None:
        """Bytes of a packed shard of a covered block's tensor with this local shape; None if it is gathered unpacked."""
        if not multiplies(name, shape) or not self.fits(shape):
            return None
        return self.rows(shape) * packed_columns(shape[-1], self.scaling) * (1 + (family in self.both))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if ranks share the weight with this local shape, and shards and matrices have whole blocks of scales."""
        height = shape[1] if len(shape) == BANK_DIMS else 0
        return self.degree(shape) > 1 and packs(self.rows(shape), shape[-1], self.scaling) and height % PACKED_ROWS[self.scaling] == 0

    def why_whole(self, shape: tuple[int, ...]) -> str:
        """Reason why the weight of a covered block's linear, with this local shape, is gathered unpacked."""
        if self.degree(shape) == 1:
            return "of no other rank"
        rows, columns = PACKED_ROWS[self.scaling], PACKED_COLUMNS[self.scaling]
        return f"shards of {self.rows(shape)} × {shape[-1]}, not of multiples of {rows} rows and {columns} columns"

    def rows(self, shape: tuple[int, ...]) -> int:
        """Rows of a shard; for a bank, of all its matrices."""
        return -(-prod(shape[:-1]) // self.degree(shape))

    def degree(self, shape: tuple[int, ...]) -> int:
        """Ranks that share a weight with this local shape."""
        return self.degrees[len(shape) == BANK_DIMS]

    def together(self, family: str, tensors: Iterable[tuple[str, tuple[int, ...]]], itemsize: int, *, casts: bool) -> PackedShards:
        """Tensors of one group in the order in which FSDP2 lists them; elements of packed ones are rounded from `itemsize` bytes."""
        largest = elements = done = most = 0
        for name, shape in tensors:
            size = self.shard_bytes(family, name, shape)
            if size is not None:
                own = len(shape) == BANK_DIMS and self.scaling in OWN_LARGEST
                largest += num_largest(shape[-2], shape[-1], self.scaling) * (shape[0] if own else 1)
                rows = self.rows(shape)
                elements, done = elements + rows * shape[-1], done + size
                at_once = min(rows, shape[1]) if own else rows
                most = max(most, done + packing_bytes(at_once, shape[-1], self.scaling, itemsize, casts=casts))
        return PackedShards(largest * SCALE_BYTES, elements, done, most)


def multiplies(name: str, shape: tuple[int, ...]) -> bool:
    """True for the weight of a linear, or for a bank's matrices."""
    return linear_of(name) is not None if len(shape) == BANK_DIMS - 1 else name in BANKS


def delayed_weights(spec: Spec, inventory: Inventory, name: str) -> tuple[str, ...]:
    """The weights of a block of the inventory whose products have numbers of delayed scaling (`megakernels.fp8_linears`), in order.

    `head` names a tied head, too.
    """
    recipe = spec.precision.recipe
    if recipe is None or SCALINGS[recipe.name] != DELAYED or not spec.host.kind.trained:
        return ()
    if name == Outside.HEAD:
        return ("weight",) if recipe.head else ()
    if not name.startswith("layers."):
        return ()
    index = int(name.removeprefix("layers."))
    block = inventory.layers[index]
    covered = spec.multiplies_in_eight_bits(index, block.family)
    return tuple([name for name, shape, *_ in block.tensors if name == ONE_ROW or multiplies(name, shape)]) if covered else ()


def packed_gather(spec: Spec) -> PackedGather | None:
    """The packed weights of a spec that megarun trains; None if it gathers none so."""
    recipe, degrees = spec.precision.recipe, spec.shard_degrees
    if recipe is None or not recipe.param_gather or max(degrees) == 1 or not spec.host.kind.trained:
        return None
    kept = not spec.sharding.reshard_after_forward or spec.sharding.kept_over > 0 or spec.mesh.is_pipelined
    again = {letter for letter in FAMILIES if spec.recompute.of(letter) != "none"} | ({"A"} if spec.mesh.gathers_latents else set())
    both = [letter for letter in FAMILIES if SCALINGS[recipe.name] in TWO_FORMS and (kept or letter in again)]
    covered, (first, last) = FAMILIES if recipe.families is None else recipe.families, recipe.first_last_bf16
    families = frozenset(letter for letter in covered if not keeps_plain(spec.precision.of(letter), spec.precision.params))
    return PackedGather(SCALINGS[recipe.name], families, (first, spec.model.num_layers - last), frozenset(both), degrees)
