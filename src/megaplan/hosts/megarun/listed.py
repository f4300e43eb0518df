"""The order in which FSDP2 lists a block's tensors."""

from __future__ import annotations

from collections.abc import Callable

from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Block, Outside

LAST_OWN = {family.letter: family.last_own for family in FAMILIES.values() if family.last_own}
"""Last parameter that FSDP2 lists for a family whose blocks have parameters of their own, which follow those of their children."""


def listed_key(block: Block) -> Callable[[str], tuple[int, bool]]:
    """Sort key that gives FSDP2's order of a block's tensors: a module's own, without a dot in their names, come last.

    A prediction depth has blocks below it, one after another, and each lists its own tensors last.
    """
    inside = block.variant if block.family == Outside.MTP else ()
    blocks = {name: (place, LAST_OWN.get(letter)) for place, (name, letter) in enumerate(inside)}
    own = LAST_OWN.get(block.family)

    def key(name: str) -> tuple[int, bool]:
        first, _, rest = name.partition(".")
        if first in blocks:
            place, last = blocks[first]
            return place, rest == last or "." not in rest
        return len(blocks), name == own or "." not in name

    return key
