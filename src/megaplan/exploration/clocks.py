"""The choice of the clock that times a spec's steps."""

from megaplan.exploration.clock import Clock
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec


def clock_of(spec: Spec, inventory: Inventory, copies: int = 1) -> Clock:
    """The clock of a spec's host and model; `copies` are the most of the model that a layout's pipeline holds."""
    if spec.host.kind.step is not None:
        from megaplan.cost.step.from_spec import unpriced  # noqa: PLC0415

        if unpriced(spec) is None:
            from megaplan.exploration.fitted import FittedClock  # noqa: PLC0415

            return FittedClock(inventory)
    if spec.pools:
        from megaplan.exploration.pooled import PooledClock  # noqa: PLC0415

        return PooledClock(inventory)
    from megaplan.exploration.replayed import ReplayClock  # noqa: PLC0415

    return ReplayClock(inventory, spec, copies)
