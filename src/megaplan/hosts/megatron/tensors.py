"""Parameters of a rank as Megatron-Core stores them: the inventory's, with projections of one input joined and each expert alone.

Source: `megatron/core/distributed/param_and_grad_buffer.py` at d98e8a64, and the modules of `megatron/core` and Transformer Engine.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from megaplan.families.attention.variants import AttentionVariant
from megaplan.hosts.megatron.layer_wise import Layout
from megaplan.hosts.megatron.pattern import MTP, OURS
from megaplan.hosts.megatron.setting import Setting
from megaplan.inventory.tensors import Block, Group, Inventory, Outside, Owner, ParamTensor


class Rule(Enum):
    """Update rule of a parameter: its optimizer under Muon, and the ranks that share it."""

    MATRIX = "matrix"
    OTHER = "other"
    VOCABULARY = "vocabulary"
    EXPERT_MATRIX = "expert matrix"
    EXPERT_OTHER = "expert other"

    __hash__ = object.__hash__  # Enum computes the hash of a member's name in Python

    @property
    def is_expert(self) -> bool:
        """True for a routed expert's."""
        return self is Rule.EXPERT_MATRIX or self is Rule.EXPERT_OTHER

    @property
    def is_matrix(self) -> bool:
        """True if Muon steps it."""
        return self is Rule.MATRIX or self is Rule.EXPERT_MATRIX


class Tensor(NamedTuple):
    """A parameter on its rank.

    Attributes:
        elements: Number of elements.
        rule: Update rule.
        sharded: True if tensor parallelism may shard it.
        low: Shape where products multiply it in low precision.
        columns: Width of a matrix of a block.
    """

    elements: int
    rule: Rule
    sharded: bool
    low: tuple[int, int] | None = None
    columns: int = 1

    @property
    def work(self) -> int:
        """Work of one of Muon's iterations on the matrix, except for a factor: m · n · min(m, n)."""
        return self.elements * min(self.columns, self.elements // self.columns)


@dataclass(slots=True)
class Parameters:
    """A rank's parameters.

    Attributes:
        tensors: One each.
        counts: Number of equal tensors.
        shapes: Distinct shapes of linear weights.
        dealt: Elements that Muon gives each data rank, by ranks and kind, for `megaplan.hosts.megatron.storage`.
        layouts: Buffers of Muon's matrices by kind, for the same.
    """

    tensors: list[Tensor] = field(default_factory=list)
    counts: Counter[Tensor] = field(default_factory=Counter)
    shapes: set[tuple[int, int]] = field(default_factory=set)
    dealt: dict[tuple[int, bool, int], list[tuple[int, int]]] = field(default_factory=dict)
    layouts: dict[bool, list[Layout]] = field(default_factory=dict)

    def add(
        self, elements: int, rule: Rule = Rule.OTHER, *, sharded: bool = True, low: tuple[int, int] | None = None, columns: int = 1
    ) -> None:
        """Add a tensor, if it has elements."""
        if elements:
            tensor = Tensor(elements, rule, sharded, low, columns)
            self.tensors.append(tensor)
            self.counts[tensor] += 1

    def join(self, other: "Parameters") -> None:
        """Add all tensors of another operator."""
        self.tensors += other.tensors
        for tensor, number in other.counts.items():
            self.counts[tensor] += number
        self.shapes |= other.shapes

    def elements(self, *, experts: bool) -> int:
        """Elements of routed experts, or of everything else."""
        return sum([number * one.elements for one, number in self.counts.items() if one.rule.is_expert is experts])


JOINED = {
    "*": {"q_proj": "qkv", "gate_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv"},
    "-": {"gate_proj": "fc1", "up_proj": "fc1"},
    "G": {**dict.fromkeys(("qk_proj", "v_proj", "beta_proj", "decay_proj", "gate_proj"), "in_proj"), "conv_qk": "conv", "conv_v": "conv"},
    "E": {"shared.gate_proj": "fc1", "shared.up_proj": "fc1", "experts.gate_proj": "experts", "experts.up_proj": "experts"},
}
"""Modules whose weights lie below each other in one of Megatron-Core's, by operator."""
INNER_NORMS = ("q_norm", "k_norm", "q_latent_norm", "kv_latent_norm")
"""Norms that are the model's kind here; the inventory has them as RMSNorms."""


class _Module(NamedTuple):
    """A module's weights, joined ones together, each with its local shape, and its bias."""

    weights: list[tuple[ParamTensor, tuple[int, ...]]]
    biases: list[ParamTensor]


def operator_parameters(at: Setting, inventory: Inventory, letter: str) -> Parameters:
    """The parameters of an operator or, of `MTP`, of a prediction module without its operators."""
    found, dims, joined = Parameters(), at.dims, JOINED.get(letter, {})
    modules: dict[str, _Module] = {}
    for name, tensor in _tensors_of(inventory, letter, shares=at.shares):
        own, is_bias = _module_of(name)
        module = modules.setdefault(joined.get(own, own), _Module([], []))
        if is_bias:
            module.biases.append(tensor)
        else:
            module.weights.append((tensor, tensor.local_shape(dims.tp, dims.ep, dims.etp)))
    for name, module in modules.items():
        _add(found, at, name, module)
    return found


def _add(found: Parameters, at: Setting, name: str, module: _Module) -> None:
    tensor, shape = module.weights[0]
    rows, columns = sum([each[-2] if len(each) > 1 else each[0] for _, each in module.weights]), shape[-1]
    sharded, matrix = tensor.owner is Owner.TENSOR_PARALLEL, tensor.group is Group.MATRIX
    if name == "proj":  # the embedding of a prediction module, which Megatron-Core shards
        rows, sharded = rows // at.dims.tp, True
    low = (rows, columns) if at.recipe is not None and (matrix or name == "in_proj") else None
    if matrix:
        found.shapes.add((rows, columns))
    if tensor.owner is Owner.EXPERT_PARALLEL:
        for _ in range(shape[0]):
            found.add(rows * columns, Rule.EXPERT_MATRIX, low=low, columns=columns)
            found.add(rows * bool(module.biases), Rule.EXPERT_OTHER)
        return
    size = rows * columns if len(shape) > 1 else rows
    rule = Rule.MATRIX if matrix or name == "router" else Rule.OTHER
    found.add(size, rule, sharded=sharded, low=low, columns=columns if rule is Rule.MATRIX else 1)
    for bias in module.biases:
        found.add(rows, sharded=bias.owner is Owner.TENSOR_PARALLEL)
        break  # joined weights have one
    if name in INNER_NORMS and at.spec.model.norm == "layernorm":
        found.add(rows, sharded=False)


def _module_of(name: str) -> tuple[str, bool]:
    """The module of a tensor, and whether it is its bias."""
    if name.startswith("experts."):
        return name.removesuffix("_bias"), name.endswith("_bias")
    module, _, kind = name.rpartition(".")
    return module or name, bool(module) and kind == "bias"


def _first_layer(inventory: Inventory, family: str, *, shares: bool) -> Block | None:
    """The first layer of a family; `shares`: operators that read an earlier layer's choice of keys or norm, or all others."""
    return next((block for block in inventory.layers if block.family == family and _shares(block) is shares), None)


def _shares(block: Block) -> bool:
    """True for attention to the keys that an earlier layer's indexer chose, and for an MLP without its own norm."""
    if block.family == "D":
        return block.tensors[0].name != "norm.weight"
    return isinstance(block.variant, AttentionVariant) and block.variant.shares


def _tensors_of(inventory: Inventory, letter: str, *, shares: bool) -> Iterator[tuple[str, ParamTensor]]:
    """Tensors of the first layer of a kind, or of a prediction module's block, by their names in it."""
    depth = next((block for _, block in inventory.outside if block.family is Outside.MTP), None)
    prefixes: list[tuple[str, str]] = [] if depth is None else [(f"{name}.", own) for name, own in depth.variant]
    if letter == MTP and depth is not None:
        own = tuple(prefix for prefix, _ in prefixes)
        return ((tensor.name, tensor) for tensor in depth.tensors if not tensor.name.startswith(own))
    family = OURS[letter]
    layer = _first_layer(inventory, family, shares=shares)
    if layer is not None or depth is None:
        return ((tensor.name, tensor) for tensor in (layer.tensors if layer is not None else ()))
    start = next(prefix for prefix, own in prefixes if own == family)
    return ((tensor.name.removeprefix(start), tensor) for tensor in depth.tensors if tensor.name.startswith(start))
