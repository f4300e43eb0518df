"""Rounds in which Muon orthogonalises matrices, and the ranks among which it deals them out."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple

from megaplan.tuples import new


class Owner(StrEnum):
    """Model axes that may shard a tensor; they decide its budget column, for any degree."""

    REPLICATED = "replicated"
    TENSOR_PARALLEL = "tensor_parallel"
    EXPERT_PARALLEL = "expert_parallel"


class Group(StrEnum):
    """Optimizer group: `matrix` follows `optimizer.matrix` (Muon by default), `other` is AdamW, `frozen` has no gradient and no state.

    `packed` is a frozen tensor as a host stores it in four or eight bits: its elements are bytes. No inventory has it.
    """

    MATRIX = "matrix"
    OTHER = "other"
    FROZEN = "frozen"
    PACKED = "packed"


class Outside(StrEnum):
    """A part of the model outside the layers."""

    EMBEDDING = "embedding"
    HEAD = "head"
    FINAL_NORM = "final_norm"
    NGRAM = "ngram"
    STRUCTURE = "structure"
    PLATFORM = "platform"
    LAYER_EMBEDDINGS = "layer_embeddings"
    RELATION_BIAS = "relation_bias"
    MTP = "mtp"
    TOWERS = "towers"
    VISION = "vision"
    PROJECTOR = "projector"


class Init(StrEnum):
    """Fill rule of a tensor in megarun; every fill is a function of hash(seed, full name) only."""

    NORMAL = "normal"  # std 0.02
    NORMAL_OUT = "normal_out"  # projections back into the residual: std 0.02 / sqrt(2 · num_layers)
    ONES = "ones"
    ZEROS = "zeros"
    A_LOG = "a_log"  # log of uniform [1, 16]
    DT_BIAS = "dt_bias"  # inverse softplus of log-uniform [1e-3, 1e-1]
    RANK_MEAN = "rank_mean"  # 1 / size of dim 1: each stream starts as the mean of the ranks
    XIELU = "xielu"  # factors: 0.8 for positive and for other inputs
    CONV = "conv"  # uniform ± 1/sqrt(size of the last dim): width of a convolution's kernel, or of an adapter's input


class ParamTensor(NamedTuple):
    """One parameter tensor, unsharded.

    Attributes:
        name: Relative to its block: `attention.q_proj.weight`.
        shape: Unsharded shape; a stack of matrices keeps the stack in dim 0 (`stored_shape` is a rank's).
        owner: Model axes that may shard it.
        group: Optimizer group.
        init: Fill rule.
        tp_dim: Tensor dim that TP shards (ETP for an expert bank), None if it is not sharded.
        tp_parts: Sizes along `tp_dim` that shard separately, in order (Mamba's fused in_proj); empty for one part.
        num_matrices: Matrices that Muon orthogonalises separately: dim 0 of a bank, or equal groups of a projection's rows (kv heads).
    """

    name: str
    shape: tuple[int, ...]
    owner: Owner
    group: Group
    init: Init = Init.NORMAL
    tp_dim: int | None = None
    tp_parts: tuple[int, ...] = ()
    num_matrices: int = 1

    @property
    def elements(self) -> int:
        """Unsharded element count."""
        return prod(self.shape)

    def local_shape(self, tp: int, ep: int, etp: int) -> tuple[int, ...]:
        """Shape of a rank's part after TP, EP and ETP, before state sharding (degrees must divide, which the spec's rules check)."""
        if tp == ep == etp == 1:
            return self.shape
        shape = list(self.shape)
        if self.owner is Owner.EXPERT_PARALLEL:
            shape[0] //= ep
        parts = {Owner.TENSOR_PARALLEL: tp, Owner.EXPERT_PARALLEL: etp}.get(self.owner, 1)
        if self.tp_dim is not None:
            shape[self.tp_dim] //= parts
        return tuple(shape)

    def local_elements(self, tp: int, ep: int, etp: int) -> int:
        """Elements of that part."""
        return prod(self.local_shape(tp, ep, etp))

    def stored_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which a rank stores its part of the tensor, of shape `part`; state sharding cuts its dim 0.

        A bank is stored as the rows of all its experts, [E, F, h] as [E · F, h]: the same bytes in the same order. Sharded along its
        experts it would have at most E shards that are not empty, and FSDP2 pads to the number of shards; along another dim it would have
        to divide evenly, and each all-gather and reduction would need a second copy.
        """
        return rows_of_bank(part) if self.owner is Owner.EXPERT_PARALLEL else part

    def cut_dim(self, tp: int, etp: int) -> int | None:
        """The dim along which TP or ETP shards the tensor's matrices themselves; None if matrices are not sharded (head groups)."""
        if self.owner is Owner.EXPERT_PARALLEL:
            return None if etp == 1 or self.tp_dim is None else self.tp_dim - 1  # after the stack of experts
        if tp == 1 or self.owner is not Owner.TENSOR_PARALLEL:
            return None
        whole_groups = self.tp_dim == 0 and self.num_matrices > 1 and self.num_matrices % tp == 0
        return None if whole_groups else self.tp_dim

    def local_matrices(self, tp: int, ep: int) -> int:
        """Number of a rank's matrices, sharded or not: its experts of a bank, its groups of heads, else all."""
        if self.owner is Owner.EXPERT_PARALLEL:
            return self.num_matrices // ep
        if self.owner is Owner.TENSOR_PARALLEL and self.cut_dim(tp, 1) is None:
            return self.num_matrices // tp
        return self.num_matrices


def rows_of_bank(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A stack of matrices, concatenated along the rows."""
    experts, rows, *columns = shape
    return experts * rows, *columns


class Block(NamedTuple):
    """Tensors that live together on one stage: a layer, the embedding, the head, an MTP depth, a side embedding.

    Equal layers share one `Block` object, so that work done per distinct block can be keyed by identity. The full name of a
    tensor is `{block name}.{tensor.name}`.

    Attributes:
        family: The letter of a layer, or an `Outside` part.
        tensors: Tensors in the order of `docs/concepts/architecture.md`.
        variant: `Family.variant` of a layer; for a prediction depth the names and letters of its blocks; else None outside the layers.
        sizes: Unsharded elements of each tensor.
        elements: Elements of the block.
        trained: Name and unsharded elements of each tensor with a gradient.
        reads: The values that a layer reads under attention residuals (`DepthReads`); else None.
    """

    family: str
    tensors: tuple[ParamTensor, ...]
    variant: Any
    sizes: tuple[int, ...]
    elements: int
    trained: tuple[tuple[str, int], ...]
    reads: Any = None


def make_block(family: str, tensors: tuple[ParamTensor, ...], variant: Any = None, reads: Any = None) -> Block:
    """A block of these tensors."""
    sizes = tuple([prod(tensor.shape) for tensor in tensors])
    trained = tuple([(tensor.name, size) for tensor, size in zip(tensors, sizes, strict=True) if tensor.group is not Group.FROZEN])
    return new(Block, (family, tensors, variant, sizes, sum(sizes), trained, reads))


@cache
def layer_names(num_layers: int) -> tuple[str, ...]:
    """The names of a stack's blocks: `layers.0`, `layers.1` and so on."""
    return tuple(f"layers.{index}" for index in range(num_layers))


_LAYERS = "layers."
_GROUPED = _LAYERS, f"{Outside.MTP}."


def has_groups(name: str) -> bool:
    """True if a block of this name has its own FSDP2 groups: a layer, or a depth of multi-token prediction."""
    return name.startswith(_GROUPED)


def fsdp_units(names: Iterable[str], unit_layers: int) -> list[tuple[str, ...]]:
    """Blocks of a slot by unit of FSDP2: consecutive layers, the last unit's maybe fewer, or a prediction depth; none with 0 layers."""
    if not unit_layers:
        return []
    grouped = [name for name in names if has_groups(name)]
    layers = [name for name in grouped if name.startswith(_LAYERS)]
    depths = [(name,) for name in grouped if not name.startswith(_LAYERS)]
    return [*(tuple(layers[start : start + unit_layers]) for start in range(0, len(layers), unit_layers)), *depths]


@dataclass(frozen=True, eq=False)
class Inventory:
    """Every parameter tensor of an architecture.

    Compared and hashed by identity: `build_inventory` gives equal models one object, so that results per inventory can be cached by it.

    Attributes:
        layers: One `Block` per layer, in model order; full names `layers.{i}.…`.
        outside: Named blocks outside the stack, in order: those of a stated encoder and its projection (`megaplan.inventory.towers`),
            `embedding`, `ngram`, `structure`, `platform`, `towers`, `relation_bias`, `final_norm`, `head` (absent when tied), `mtp.0` …
        tied: The head reuses `embedding`.
        active_parameters: Parameters that one token uses: all except the routed experts that its router does not choose.
        ahead: Names of the side embeddings that the depths of multi-token prediction use too.
        normed_ahead: MTP depths read hidden states after a norm, the first of them the final norm's output.
    """

    layers: tuple[Block, ...]
    outside: tuple[tuple[str, Block], ...]
    tied: bool
    active_parameters: int
    ahead: tuple[str, ...] = ()
    normed_ahead: bool = False

    @cached_property
    def variants(self) -> dict[Hashable, Any]:
        """Cached variants of the blocks, by the settings on which they depend besides the inventory.

        One evaluation stores them for the next.
        """
        return {}

    @cached_property
    def parameters(self) -> int:
        """Unique parameters; a tied head counts once."""
        return sum(block.elements * count for block, count in self.makes)

    @cached_property
    def trained_parameters(self) -> int:
        """Number of `parameters` with gradients: all, or with `lora` the adapters."""
        return sum(size * count for block, count in self.makes for _, size in block.trained)

    @cached_property
    def makes(self) -> tuple[tuple[Block, int], ...]:
        """Every distinct block object, with the number of its occurrences in the model."""
        counts = Counter(id(block) for _, block in self.blocks())
        return tuple((block, counts[key]) for key, block in {id(block): block for _, block in self.blocks()}.items())

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Every block with its name, blocks outside the layers last."""
        yield from zip(layer_names(len(self.layers)), self.layers, strict=True)
        yield from self.outside

    def block(self, name: str) -> Block:
        """The block with this name; KeyError if the model has none."""
        if name.startswith("layers."):
            return self.layers[int(name.removeprefix("layers."))]
        return dict(self.outside)[name]

    def tensors(self) -> Iterator[tuple[str, ParamTensor]]:
        """Every tensor with its full name."""
        for name, block in self.blocks():
            for tensor in block.tensors:
                yield f"{name}.{tensor.name}", tensor


ROUND_ELEMENTS = 2**25
"""Elements of the matrices of a round on a rank: fewer launches for small matrices, with little more scratch than one large matrix."""


class MatrixRound(NamedTuple):
    """Tensors that Muon updates together: equal in shape, and shared by the same ranks.

    Each of the `degree` ranks has a shard of the rows of every tensor, and orthogonalises some of the full matrices. If shards consist of
    full matrices, nothing is exchanged: `degree` is 1, and `num_matrices` counts a shard's.

    Attributes:
        num_matrices: Matrices of a tensor, on all ranks that share it.
        elements: Elements of a whole matrix.
        degree: Ranks among which its matrices are dealt out.
    """

    num_matrices: int
    elements: int
    degree: int

    @property
    def num_tensors(self) -> int:
        """Most tensors of a round: about `ROUND_ELEMENTS` on each rank."""
        return max(1, ROUND_ELEMENTS * self.degree // (self.num_matrices * self.elements))

    def matrices(self, num_tensors: int) -> int:
        """Matrices that a rank orthogonalises in a round of so many tensors; the last ranks may have fewer, and fill up with zeros."""
        return -(-num_tensors * self.num_matrices // self.degree)


def matrix_round(count: int, elements: int, degree: int) -> MatrixRound:
    """The rounds in which `degree` ranks, which share them equally, process the `count` matrices of a tensor."""
    return MatrixRound(count // degree, elements, 1) if count % degree == 0 else MatrixRound(count, elements, degree)
