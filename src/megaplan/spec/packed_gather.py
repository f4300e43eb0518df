"""Weights that megarun gathers in their recipe's bits (`precision.recipe.param_gather`), and their sizes.

A rank packs its shard of a weight (`megakernels.ops.fp8_linear.weights`), and FSDP2 gathers the rows of bytes. Weights of the linears
that a recipe covers are packed if each shard has whole blocks of scales; the rest is gathered as without the key: gates of one row,
layers of `first_last_bf16`, head and prediction depths. What FSDP2 does not shard has no gather, and nothing changes.

MXFP8 and rows with a scale each have other elements for the forward product than for the gradient of the input. As in Transformer Engine,
forward gathers those of the one and backward those of the other, and both at once where one gather serves both products: where gathered
parameters are kept, in whole or in part, where backward runs a layer's linears again, and under a pipeline, whose next forward reads what a
backward has gathered.

Source: Transformer Engine, `fsdp_pre_all_gather` of `pytorch/tensor/mxfp8_tensor.py`; torchao 0.18, `float8/fsdp_utils.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from megakernels.ops.fp8_linear.facts import SCALE_BYTES
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
from megaplan.families.registry import FAMILIES
from megaplan.inventory.adapters import linear_of
from megaplan.low_precision import PACKED
from megaplan.spec.models import Spec

BANKS, BANK_DIMS = frozenset({"experts.gate_proj", "experts.up_proj", "experts.down_proj"}), 3
"""Matrices of a bank [E, a, b], which are sharded as the rows of all."""


class PackedShards(NamedTuple):
    """The packed shards of a group on one rank.

    Attributes:
        maxima_bytes: Largest magnitudes of their weights, fp32, where scales depend on them.
        elements: Elements of the shards.
        packed_bytes: The same packed.
        making_bytes: Most bytes while they are packed one after another, of those that are packed too.
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
        layers: The layers that it covers: the first, and the first behind them.
        both: Letters whose weights are gathered in the form of both products at once.
        degrees: Ranks that share a dense weight, and those that share a bank.
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
        """Bytes of a packed shard of a covered block's tensor with this local shape; None if it is gathered as it is."""
        if not multiplies(name, shape) or not self.fits(shape):
            return None
        return self.rows(shape) * packed_columns(shape[-1], self.scaling) * (1 + (family in self.both))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if ranks share the weight with this local shape, and shards and matrices have whole blocks of scales."""
        height = shape[1] if len(shape) == BANK_DIMS else 0
        return self.degree(shape) > 1 and packs(self.rows(shape), shape[-1], self.scaling) and height % PACKED_ROWS[self.scaling] == 0

    def why_whole(self, shape: tuple[int, ...]) -> str:
        """Reason why the weight of a covered block's linear, with this local shape, is gathered as it is."""
        if self.degree(shape) == 1:
            return "of no other rank"
        rows, columns = PACKED_ROWS[self.scaling], PACKED_COLUMNS[self.scaling]
        return f"shards of {self.rows(shape)} × {shape[-1]}, not of multiples of {rows} rows and {columns} columns"

    def rows(self, shape: tuple[int, ...]) -> int:
        """Rows of a shard; a bank has those of all its matrices."""
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


def packed_gather(spec: Spec) -> PackedGather | None:
    """The packed weights of a spec that megarun trains; None if it gathers none so."""
    recipe, degrees = spec.precision.recipe, spec.shard_degrees
    if recipe is None or not recipe.param_gather or recipe.name not in PACKED or max(degrees) == 1 or not spec.host.kind.trained:
        return None
    kept = not spec.sharding.reshard_after_forward or spec.sharding.kept_over > 0 or spec.mesh.is_pipelined
    both = [letter for letter in FAMILIES if PACKED[recipe.name] in TWO_FORMS and (kept or spec.recompute.of(letter) != "none")]
    families, (first, last) = frozenset(FAMILIES if recipe.families is None else recipe.families), recipe.first_last_bf16
    return PackedGather(PACKED[recipe.name], families, (first, spec.model.num_layers - last), frozenset(both), degrees)
