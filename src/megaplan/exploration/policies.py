"""Comparison of the memory that two policies keep on every rank of a layout."""

from megaplan.exploration.recompute import STRENGTH
from megaplan.exploration.values import MemoryPolicy


def keeps_more(one: MemoryPolicy, other: MemoryPolicy) -> bool:
    """True if cuts that do not fit with `other` do not fit with `one` either; False if that is unknown.

    A family with less recompute saves at least as much; parameters that stay gathered take more memory. Under Megatron-Core full recompute
    keeps only the inputs of layers, and of two nested sets of modules the smaller one keeps more.
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
    """Recomputed modules; `moe` includes the experts' activation."""
    return {*policy.modules, *(("moe_act",) if "moe" in policy.modules else ())}
