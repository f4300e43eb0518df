"""The families by letter, in display order. A new one is a folder and a line here."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from megaplan.families.attention import ATTENTION
from megaplan.families.dense import DENSE
from megaplan.families.family import Family
from megaplan.families.linear_attention import LINEAR_ATTENTION
from megaplan.families.mamba import MAMBA
from megaplan.families.moe import EXPERTS
from megaplan.families.recurrent import RECURRENT
from megaplan.families.short_convolution import SHORT_CONVOLUTION

_ORDER = (ATTENTION, MAMBA, EXPERTS, RECURRENT, DENSE, LINEAR_ATTENTION, SHORT_CONVOLUTION)
FAMILIES: dict[str, Family] = {family.letter: family for family in _ORDER}

PARTS = ("head", "attention", "scan", "experts", "recurrence", "memory", "node", "network", "host")
"""Operations of a letter's blocks, other than its linears, that reach their own share of a peak."""
if TYPE_CHECKING:
    Letter = str
    Rated = str
else:
    Letter = Literal[tuple(FAMILIES)]
    Rated = Literal[(*FAMILIES, *PARTS)]


def families_of(model: Any) -> Iterator[tuple[Family, Any]]:
    """The families whose section a model has, each with that section."""
    for family in FAMILIES.values():
        section = getattr(model, family.section)
        if section is not None:
            yield family, section
