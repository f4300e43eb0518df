"""The blocks that a depth of multi-token prediction has between its projection and its output norm."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from megaplan.families.dense import DENSE
from megaplan.families.dense.section import Mlp
from megaplan.families.family import Family
from megaplan.families.registry import FAMILIES
from megaplan.spec.models import Model

NAMES = ("attention", "mlp")
"""Names of the blocks if no pattern is given."""


class DepthBlock(NamedTuple):
    """A block of a depth.

    Attributes:
        name: Name of its module in the depth.
        family: Family of the block.
        section: Dimensions of the block.
        variant: `Family.variant` of a layer behind the model's last one: its attention has the model's window, and no indexer.
        operations: `Family.operations` of such a layer.
    """

    name: str
    family: Family
    section: Any
    variant: Hashable
    operations: Hashable


def depth_blocks(model: Model) -> tuple[DepthBlock, ...]:
    """The blocks of each depth in order. They have the model's dimensions; an MLP has the depth's own.

    Raises:
        ValueError: The model has no depths, or lacks a section that they need (an unchecked spec).
    """
    mtp = model.features.mtp
    if mtp is None:
        raise ValueError("the model has no section features.mtp")
    own = Mlp(ffn_hidden_size=mtp.ffn_hidden_size, activation=mtp.activation, bias=mtp.bias)
    layer, found = model.num_layers, []
    for index, letter in enumerate(mtp.letters):
        family = FAMILIES[letter]
        section = own if family is DENSE else family.section_of(model)
        name = f"block{index}" if mtp.pattern is not None else NAMES[index]
        found.append(DepthBlock(name, family, section, family.variant(section, layer, model.num_layers), family.operations(section, layer)))
    return tuple(found)
