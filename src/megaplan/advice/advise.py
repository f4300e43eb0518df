"""Advice for a spec that does not fit: the smallest changes after which it does, fastest first.

Changes of one edit are tried first, then of two, then of three, all with the same number of GPUs; then more GPUs. Of the changes with the
same number of edits, those whose lower bound of memory exceeds the device are left out, and the others are priced in the order of their
bound of time, those first that are likely to fit. Where the command chooses cuts by the time of a step, that search is made for the changes
that are shown alone; the others are priced under the cuts that it starts from, whose step is no shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megaplan.advice.changes import Edit, changed, growth, single_edits, texts, together
from megaplan.advice.pricing import Price, Pricer, Work
from megaplan.schedules import MAX_REPLAYED
from megaplan.spec.models import Spec

MOST = 4
"""Changes that are shown."""
WORK = 240_000
"""Of all prices of one spec, in steps of about a microsecond."""
CLIMBS = 400_000
"""Of cuts by the time of a step for the changes that are shown."""
USEFUL_MOVES, USEFUL_OTHERS = 10, 12
"""Edits of the mesh, and others, that pairs are made of; triples have half as many."""
HOPELESS = 1.5
"""More GPUs are not tried where a peak is likely to be so many times what is usable."""
GROWTH = tuple(2**power for power in range(1, 11))
"""Times as many GPUs."""


class Advice(NamedTuple):
    """A change, priced as the command would price it.

    Attributes:
        overrides: Texts for `--set`, to be given after those of the spec.
        devices: GPUs, where they are more than the spec's; else None.
        price: Cuts and peak under the change.
        lost: By how much the modelled step is longer, as a share; negative where it is shorter.
    """

    overrides: tuple[str, ...]
    devices: int | None
    price: Price
    lost: float


class LegalChange(NamedTuple):
    """A legal change.

    Attributes:
        edits: What it is made of.
        spec: The changed spec.
        floor_bytes: Its peak is at least this.
        bound_ns: Its step is at least this.
    """

    edits: tuple[Edit, ...]
    spec: Spec
    floor_bytes: int
    bound_ns: int


class Adviser:
    """Tries changes of one spec within a limit of work."""

    def __init__(self, spec: Spec, before: Price, pricer: Pricer) -> None:
        """`before`: the spec as it is."""
        self._spec, self._before, self._pricer = spec, before, pricer
        self._usable_bytes = pricer.usable_bytes(spec)
        self._floor_bytes = pricer.floor_bytes(spec)
        self._bound_ns = pricer.bound_ns(spec)
        self._seen: set[tuple[str, ...]] = set()
        self._ratios: dict[Edit, float] = {}
        self._closest: LegalChange | None = None
        self._least_bytes = before.peak_bytes

    def find(self) -> list[Advice]:
        """The best of the smallest changes; if none fits, the one that comes closest, if it lowers the peak."""
        singles = self._candidates((edit,) for edit in single_edits(self._spec))
        found = self._level(singles)
        for candidate in singles:
            self._ratios.setdefault(candidate.edits[0], self._floor_ratio(candidate))
        useful = self._useful(singles)
        for size in (2, 3):
            found = found or self._level(self._candidates(together(useful if size == 2 else useful[: len(useful) // 2], size)))
        found = found or self._more_devices(useful)
        return found or self._nearest()

    def _nearest(self) -> list[Advice]:
        """The change that comes closest, with the cuts that the command chooses where nothing fits."""
        if self._closest is None:
            return []
        candidate = self._closest
        price = self._pricer.chosen(candidate.spec)
        return [self._advice(candidate, price)] if price is not None else []

    def _candidates(self, changes: Iterable[tuple[Edit, ...]]) -> list[LegalChange]:
        """Legal changes that were not seen before, without those whose schedule is too long to be looked at."""
        found, longest = [], max(MAX_REPLAYED, self._spec.num_actions)
        for edits in changes:
            spec = changed(self._spec, edits)
            if spec is None or self._pricer.work.left <= 0 or spec.num_actions > longest:
                continue
            key = texts(self._spec, spec)
            if not key or key in self._seen:
                continue
            self._seen.add(key)
            if self._pricer.legal(spec):
                floor = self._pricer.floor_bytes(spec)
                found.append(LegalChange(edits, spec, floor, self._pricer.bound_ns(spec)))
        return found

    def _level(self, candidates: Sequence[LegalChange]) -> list[Advice]:
        """The fastest changes that fit among those of one size."""
        found: list[tuple[Advice, LegalChange]] = []
        left = [candidate for candidate in candidates if candidate.floor_bytes <= self._usable_bytes]
        for candidate in sorted(left, key=self._order):
            if self._pricer.work.left <= 0 or (len(found) == MOST and not self._may_win(candidate, found)):
                break
            price = self._pricer.quick(candidate.spec)
            if price is None:
                continue
            if len(candidate.edits) == 1:
                self._ratios[candidate.edits[0]] = price.peak_bytes / self._before.peak_bytes
            if price.over_bytes <= 0:
                found = sorted([*found, (self._advice(candidate, price), candidate)], key=lambda each: _rank(each[0]))[:MOST]
            elif price.peak_bytes < self._least_bytes:
                self._closest, self._least_bytes = candidate, price.peak_bytes
        return self._climbed(found)

    def _climbed(self, found: Sequence[tuple[Advice, LegalChange]]) -> list[Advice]:
        """With the command's own cuts, as many as a further limit of work allows; those that are fastest without come first."""
        work, advised = Work(CLIMBS), list[Advice]()
        searched, self._pricer.work = self._pricer.work, work
        for advice, candidate in found:
            if not advised or work.left > 0:
                advised.append(self._advice(candidate, self._pricer.climbed(candidate.spec, advice.price)))
        self._pricer.work = searched
        return sorted(advised, key=_rank)

    def _order(self, candidate: LegalChange) -> tuple[object, ...]:
        """Those that are likely to fit by their bound of time, then the others by what they are likely to need."""
        likely = self._likely_bytes(candidate)
        fits = likely <= self._usable_bytes
        return not fits, candidate.bound_ns if fits else likely, texts(self._spec, candidate.spec)

    def _likely_bytes(self, candidate: LegalChange) -> int:
        """The peak, if edits lower it as much together as each does alone, or as its floor says."""
        share = 1.0
        for edit in candidate.edits:
            share *= self._ratios.get(edit, self._floor_ratio(candidate))
        return int(self._before.peak_bytes * share)

    def _floor_ratio(self, candidate: LegalChange) -> float:
        """What the bound of the peak is of the spec's own; of a host without bounds, as if more GPUs shared all of it."""
        if self._floor_bytes:
            return candidate.floor_bytes / self._floor_bytes
        return self._spec.mesh.world_size / candidate.spec.mesh.world_size

    def _may_win(self, candidate: LegalChange, found: Sequence[tuple[Advice, LegalChange]]) -> bool:
        return candidate.bound_ns < self._bound_ns * (1 + found[-1][0].lost)

    def _useful(self, singles: Sequence[LegalChange]) -> list[Edit]:
        """Edits that lower the peak, those of the mesh and others in turn, the most saving first."""
        edits = sorted({candidate.edits[0] for candidate in singles}, key=lambda edit: (self._ratios[edit], edit.group, str(edit)))
        mesh = [edit for edit in edits if edit.factors and self._ratios[edit] < 1][:USEFUL_MOVES]
        others = [edit for edit in edits if not edit.factors][:USEFUL_OTHERS]
        return [edit for pair in zip(mesh, others, strict=False) for edit in pair] + mesh[len(others) :] + others[len(mesh) :]

    def _more_devices(self, useful: Sequence[Edit]) -> list[Advice]:
        """On the fewest more GPUs on which the spec fits, as it is or with edits."""
        pricer = self._pricer
        pricer.work = Work(pricer.work.most)  # on as many GPUs nothing was found: a further search of the same length
        saving = _saving(useful)
        for factor in GROWTH:
            for with_edits in ((), saving[:1], saving) if saving else ((),):
                changes = [(edit, *with_edits) for edit in growth(self._spec, factor)]
                candidates = self._candidates(changes)
                if found := self._level([each for each in candidates if self._likely_bytes(each) <= HOPELESS * self._usable_bytes]):
                    return found
        return []

    def _advice(self, candidate: LegalChange, price: Price) -> Advice:
        spec, devices = candidate.spec, candidate.spec.mesh.world_size
        lost = self._pricer.lost((self._spec, self._before.spans), (spec, price.spans))
        more = devices if devices != self._spec.mesh.world_size else None
        return Advice(texts(self._spec, spec), more, price, lost)


def _saving(useful: Sequence[Edit]) -> tuple[Edit, ...]:
    """Of each group but the mesh, the edit that saves the most."""
    found: dict[str, Edit] = {}
    for edit in useful:
        if not edit.factors:
            group = edit.group.partition(".")[0]
            found.setdefault("recompute" if group == "modules" else group, edit)  # Megatron does one of full and selective recompute
    return tuple(found.values())


def _rank(advice: Advice) -> tuple[object, ...]:
    return advice.lost, advice.price.peak_bytes, advice.overrides
