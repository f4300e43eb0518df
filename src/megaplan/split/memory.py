"""Whether a split fits: by the budget of the whole job, rank by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaplan.budget.build import build_budget
from megaplan.budget.reserve import device_budget
from megaplan.devices import load_device
from megaplan.inventory.tensors import Inventory
from megaplan.layout.build import build_layout
from megaplan.layout.spans import Spans
from megaplan.layout.values import Layout
from megaplan.spec.models import Spec

if TYPE_CHECKING:
    from megaplan.cost.times import MeasuredCosts
    from megaplan.split.layer_bytes import RankSum


class Memory:
    """Excesses of splits of one spec; each split is budgeted once."""

    def __init__(self, spec: Spec, inventory: Inventory, measured: MeasuredCosts | None = None) -> None:
        """Bytes that a costs file measured count where they say more than the budget."""
        self._spec, self._inventory, self._measured = spec, inventory, measured
        self._measured_sums: tuple[tuple[RankSum, ...], ...] = ()
        self._excesses: dict[Spans, tuple[int, ...]] = {}

    @property
    def num_budgets(self) -> int:
        """Splits budgeted so far."""
        return len(self._excesses)

    def excesses(self, spans: Spans) -> tuple[int, ...]:
        """By how many bytes each pp rank exceeds what is usable; negative is headroom."""
        if spans not in self._excesses:
            layout = build_layout(self._spec, self._inventory, spans)
            per_stage = self._spec.mesh.world_size // self._spec.mesh.pp
            found = [-(1 << 62)] * self._spec.mesh.pp
            for budget in build_budget(self._spec, self._inventory, layout).ranks:
                for stage in {rank // per_stage for rank in budget.ranks}:
                    found[stage] = max(found[stage], -budget.headroom_bytes)
            if self._measured is not None and self._spec.mesh.pp * self._spec.mesh.vpp > 1:
                found = list(map(max, found, self._measured_excesses(layout)))
            self._excesses[spans] = tuple(found)
        return self._excesses[spans]

    def sums(self, spans: Spans) -> tuple[tuple[RankSum, ...], ...]:
        """For each pp rank the sums that every split which fits keeps; `spans` are any split's."""
        if self._spec.host.name == "megatron":
            from megaplan.split.megatron_bytes import megatron_limits  # noqa: PLC0415

            layout = build_layout(self._spec, self._inventory, spans)
            return megatron_limits(self._spec, self._inventory, layout, self._usable_bytes())
        from megaplan.split.layer_bytes import necessary_limits  # noqa: PLC0415  (where all fits, nothing else is paid for)

        layout = build_layout(self._spec, self._inventory, spans)
        return necessary_limits(self._spec, self._inventory, layout, self._usable_bytes(), self._measured)

    def _usable_bytes(self) -> int:
        return device_budget(load_device(self._spec.device.name)).usable_bytes

    def _measured_excesses(self, layout: Layout) -> list[int]:
        sums = self._measured_sums or self.sums(tuple((slot.start, slot.stop) for slot in layout.slots))
        self._measured_sums = sums
        owned = [[(slot.start, slot.stop) for slot in layout.of_rank(rank)] for rank in range(layout.pp)]
        return [max(moment.excess(spans) for moment in moments) for moments, spans in zip(sums, owned, strict=True)]
