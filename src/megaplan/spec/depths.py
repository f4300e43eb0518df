"""The blocks that a depth of multi-token prediction has between its projection and its output norm."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from megaplan.families.attention import ATTENTION
from megaplan.families.dense import DENSE
from megaplan.families.dense.section import Mlp
from megaplan.families.family import Family
from megaplan.families.moe import EXPERTS
from megaplan.spec.models import Model


class DepthBlock(NamedTuple):
    """A block of a depth.

    Attributes:
        name: Of its module in the depth.
        family: Whose block it is.
        section: Its dimensions.
        variant: `Family.variant` of a layer behind the model's last one: the block has a window where the model has one, and no indexer.
        operations: `Family.operations` of such a layer.
    """

    name: str
    family: Family
    section: Any
    variant: Hashable
    operations: Hashable


def depth_blocks(model: Model) -> tuple[DepthBlock, ...]:
    """The blocks of each depth in order: attention as the model's, then an MLP of the depth's own or experts as the model's.

    Raises:
        ValueError: The model has no depths, or lacks a section that they need (a spec that was not checked).
    """
    mtp = model.features.mtp
    if mtp is None:
        raise ValueError("the model has no section features.mtp")
    mlp: tuple[Family, Any] = DENSE, Mlp(ffn_hidden_size=mtp.ffn_hidden_size, activation=mtp.activation, bias=mtp.bias)
    if mtp.experts:
        mlp = EXPERTS, EXPERTS.section_of(model)
    given = (("attention", ATTENTION, ATTENTION.section_of(model)), ("mlp", *mlp))
    layer, found = model.num_layers, []
    for name, family, section in given:
        found.append(DepthBlock(name, family, section, family.variant(section, layer), family.operations(section, layer)))
    return tuple(found)
