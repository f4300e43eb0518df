"""Rules of `model.linear_attention`: key heads divide the value heads."""

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.families.checks import CheckedSpec, divisors, remainder, use_one_of
from megaplan.families.linear_attention.section import GatedDeltaNet, KimiDeltaAttention


def linear_attention_rules(checked: CheckedSpec, linear: GatedDeltaNet | KimiDeltaAttention) -> Iterator[Diagnostic]:
    """Yields MP701."""
    heads, key_heads = linear.num_value_heads, linear.num_key_heads
    if heads % key_heads:
        detail = remainder("linear_attention.num_value_heads", heads, "linear_attention.num_key_heads", key_heads)
        yield checked.error("MP701", detail, "model.linear_attention.num_key_heads", use_one_of(divisors(heads)))
