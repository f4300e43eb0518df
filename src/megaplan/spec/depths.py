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
"""Of the blocks where no pattern is given."""


class DepthBlock(NamedTuple):
    """A block of a depth.

    Attributes:
        name: Of its module in the depth.
        family: Whose block it is.
        section: Its dimensions.
        variant: `Family.variant` of a layer behind the model's last one: attention has a window where the model has one, and no indexer.
        operations: `Family.operations` of such a layer.
    """

    name: str
    family: Family
    section: Any
    variant: Hashable
    operations: Hashable


def depth_blocks(model: Model) -> tuple[DepthBlock, ...]:
    """The blocks of each depth in order, as the model's; an MLP is the depth's own.

    Raises:
        ValueError: The model has no depths, or lacks a section that they need (a spec that was not checked).
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
        found.append(DepthBlock(name, family, section, family.variant(section, layer), family.operations(section, layer)))
    return tuple(found)
