"""Rules of `model.toy`."""

from collections.abc import Iterator

from megaplan.families.toy.section import Toy

from megaplan.errors import Diagnostic
from megaplan.families.checks import CheckedSpec


def toy_rules(checked: CheckedSpec, toy: Toy) -> Iterator[Diagnostic]:
    """MP704 for a bottleneck that is none."""
    if toy.rank > checked.hidden_size:
        yield checked.error("MP704", f"toy.rank = {toy.rank}, hidden_size = {checked.hidden_size}", "model.toy.rank")
