"""The identity of an operation next to its measured constant: the counts of its kinds of kernels in reference specs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from megaplan.cost.rates import Rates
from megaplan.cost.replay import ReplayTimer
from megaplan.inventory.build import build_inventory
from megaplan.measured.constants import PARTS, Counts, Measured, measured
from megaplan.spec.models import Spec


class Everywhere(dict[str, int]):
    """Rates under which every kind of kernels runs at its peak rate."""

    def get(self, _key: str, _default: object = None) -> int:
        """The whole."""
        return PARTS


def at_peak(rates: Rates) -> Rates:
    """Rates under which a kind of kernels takes its counted floor, and launches take no time."""
    found = Measured(rates.device.name, {}, (), (), Everywhere(), {}, {}, {}, 0, 0, 0, {}, (), (1.0, 1.0), {})
    return replace(rates, measured=found, launch_ns=0, step_ns=0)


def kind_counts(references: Sequence[Mapping[str, Any]]) -> dict[str, Counts]:
    """Bytes, products and launches of each kind, over the steps of all references."""
    found: dict[str, Counts] = {}
    for document in references:
        spec = Spec.model_validate(document)
        for _, part, _ in ReplayTimer(build_inventory(spec), spec, at_peak).kinds(spec):
            before = found.get(part.kind, Counts(0, 0, 0))
            found[part.kind] = Counts(before.num_bytes + part.num_bytes, before.flops + part.flops, before.launches + part.launches)
    return found


@cache
def changed_kinds(device: str) -> frozenset[str]:
    """Kinds whose counts differ from those at their measurement.

    Their measured share is applied to the new counts, so their time is modelled.
    """
    constants = measured(device)
    return frozenset() if constants is None else changed(constants)


def changed(constants: Measured) -> frozenset[str]:
    """Kinds of these constants whose counts or kernels have changed without a new measurement."""
    now = kind_counts(constants.references)
    faster = frozenset(kind for kind, change in constants.changes.items() if not change.is_measured)
    return faster | frozenset(kind for kind, counts in constants.counts.items() if now.get(kind, Counts(0, 0, 0)) != counts)
