"""Which of two policies keeps more on every rank of a layout."""

from __future__ import annotations

from megaplan.exploration.recompute import STRENGTH
from megaplan.exploration.values import MemoryPolicy


def keeps_more(one: MemoryPolicy, other: MemoryPolicy) -> bool:
    """True if cuts that do not fit with `other` do not fit with `one` either; False where that is not known.

    A family that runs less again keeps as much or more, and so do parameters that stay gathered. Under Megatron-Core full recompute keeps
    the inputs of layers alone, and of two sets of modules the one within the other keeps more.
    """
    same = one._replace(recompute=other.recompute, reshard=other.reshard, full_layers=other.full_layers, modules=other.modules)
    if same != other or (one.reshard and not other.reshard) or (one.full_layers and one.full_layers != other.full_layers):
        return False
    if other.full_layers:
        return True
    again = dict(other.recompute)
    weaker = all(STRENGTH.index(policy) <= STRENGTH.index(again[letter]) for letter, policy in one.recompute)
    return weaker and _with_parts(one) <= _with_parts(other)


def _with_parts(policy: MemoryPolicy) -> set[str]:
    """Modules that run again; whole experts have their activation in them."""
    return {*policy.modules, *(("moe_act",) if "moe" in policy.modules else ())}
