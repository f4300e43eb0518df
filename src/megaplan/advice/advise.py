"""Advice for a spec that does not fit: the smallest changes that make it fit, fastest first.

Changes of one edit are tried first, then changes of two and of three edits, all with the same number of GPUs; then changes with more GPUs.
Changes whose lower bound on memory exceeds the device are left out. Single edits are priced in the order of their bound on the step, until
the next bound is above the step of the last shown edit: no faster edit that fits is missed. Edits with several chunks per rank in loop
placement come last and may spend the limit of work, because their search for cuts is long if no cuts fit. Larger changes are priced in the
order in which they are likely to fit, within a work limit. If the command chooses cuts by step time, it searches them only for the changes
that are shown; the others are priced with the starting cuts of that search, whose step is no shorter.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megaplan.advice.changes import Edit, changed, growth, single_edits, texts, together
from megaplan.advice.pricing import Price, Pricer, Work
from megaplan.schedules import MAX_REPLAYED, placement
from megaplan.spec.models import Spec

MOST = 4
"""Number of changes that are shown."""
WORK = 240_000
"""Work limit for all prices of one spec, in steps of about a microsecond."""
SINGLES_WORK, LOOPS_WORK = 1_500_000, 500_000
"""Work limits: one for all single edits without chunks in loop placement (only deep stacks reach it), and one for edits with such
chunks.
"""
CLIMBS = 400_000
"""Work limit for cuts by the time of a step, for the changes that are shown."""
USEFUL_MOVES, USEFUL_OTHERS = 10, 12
"""Number of mesh edits, and of other edits, that are combined in pairs; triples combine half of them."""
HOPELESS = 1.5
"""Ratio of a likely peak to usable memory from which more GPUs are not tried."""
GROWTH = tuple(2**power for power in range(1, 11))
"""Factors of the number of GPUs."""


class Advice(NamedTuple):
    """A change, priced as the command would price it.

    Attributes:
        overrides: Texts for `--set`, to be appended to those of the spec.
        devices: Number of GPUs if it is larger than the spec's; else None.
        price: Cuts and peak under the change.
        lost: Relative increase of the modelled step; negative if it is shorter.
    """

    overrides: tuple[str, ...]
    devices: int | None
    price: Price
    lost: float


class LegalChange(NamedTuple):
    """A legal change.

    Attributes:
        edits: Edits of the change.
        spec: The changed spec.
        floor_bytes: Lower bound on its peak.
        bound_ns: Lower bound on its step.
    """

    edits: tuple[Edit, ...]
    spec: Spec
    floor_bytes: int
    bound_ns: int


class Adviser:
    """Tries changes of one spec within a limit of work."""

    def __init__(self, spec: Spec, before: Price, pricer: Pricer) -> None:
        """`before` is the current spec."""
        self._spec, self._before, self._pricer = spec, before, pricer
        self._usable_bytes = pricer.usable_bytes(spec)
        self._floor_bytes = pricer.floor_bytes(spec)
        self._bound_ns = pricer.bound_ns(spec)
        self._seen: set[tuple[str, ...]] = set()
        self._ratios: dict[Edit, float] = {}
        self._closest: LegalChange | None = None
        self._least_bytes = before.peak_bytes

    def find(self) -> list[Advice]:
        """The best of the smallest changes; if none fits, the closest one, if it lowers the peak."""
        work, self._pricer.work, self._pricer.thorough = self._pricer.work, Work(SINGLES_WORK), True
        self._pricer.useless_bytes = self._before.peak_bytes
        singles = self._candidates((edit,) for edit in single_edits(self._spec))
        found = self._singles(singles)
        self._pricer.work, self._pricer.thorough = work, False
        for candidate in singles:
            self._ratios.setdefault(candidate.edits[0], self._floor_ratio(candidate))
        useful = self._useful(singles)
        for size in (2, 3):
            found = found or self._level(self._candidates(together(useful if size == 2 else useful[: len(useful) // 2], size)))
        found = found or self._more_devices(useful)
        return found or self._nearest()

    def _nearest(self) -> list[Advice]:
        """The closest change, with the cuts that the command chooses if nothing fits."""
        if self._closest is None:
            return []
        candidate = self._closest
        price = self._pricer.chosen(candidate.spec)
        return [self._advice(candidate, price)] if price is not None else []

    def _candidates(self, changes: Iterable[tuple[Edit, ...]]) -> list[LegalChange]:
        """New legal changes whose schedule is short enough to examine."""
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

    def _singles(self, candidates: Sequence[LegalChange]) -> list[Advice]:
        """The fastest single edits that fit; if the work limit ends the search, only the edits that no unexamined one can beat.

        Edits with chunks in loop placement are left out once the work limit is spent.
        """
        found, loops = list[tuple[int, Advice]](), False
        left = [candidate for candidate in candidates if candidate.floor_bytes <= self._usable_bytes]
        left.sort(key=lambda each: (_loops(each.spec), each.bound_ns, texts(self._spec, each.spec)))
        for candidate in left:
            if len(found) == MOST and candidate.bound_ns > found[-1][0]:
                continue
            if loops < _loops(candidate.spec):
                loops, self._pricer.work = True, Work(LOOPS_WORK)
            if self._pricer.work.left <= 0:
                found = found if loops else [each for each in found if each[0] <= candidate.bound_ns] or found[:1]
                break
            price = self._priced(candidate)
            if price is not None and price.over_bytes <= 0:
                price = self._pricer.climbed(candidate.spec, price)
                step = self._pricer.modelled_ns(candidate.spec, price.spans)
                found = sorted([*found, (step, self._advice(candidate, price))], key=lambda each: _rank(each[1]))[:MOST]
        return [advice for _, advice in found]

    def _priced(self, candidate: LegalChange) -> Price | None:
        """The price of a change; also records its saving and the closest change so far."""
        price = self._pricer.quick(candidate.spec)
        if price is not None and len(candidate.edits) == 1:
            self._ratios[candidate.edits[0]] = price.peak_bytes / self._before.peak_bytes
        if price is not None and price.over_bytes > 0 and price.peak_bytes < self._least_bytes:
            self._closest, self._least_bytes = candidate, price.peak_bytes
        return price

    def _level(self, candidates: Sequence[LegalChange]) -> list[Advice]:
        """The fastest changes that fit, of one number of edits."""
        found: list[tuple[Advice, LegalChange]] = []
        left = [candidate for candidate in candidates if candidate.floor_bytes <= self._usable_bytes]
        for candidate in sorted(left, key=self._order):
            if self._pricer.work.left <= 0 or (len(found) == MOST and not self._may_win(candidate, found)):
                break
            price = self._priced(candidate)
            if price is not None and price.over_bytes <= 0:
                found = sorted([*found, (self._advice(candidate, price), candidate)], key=lambda each: _rank(each[0]))[:MOST]
        return self._climbed(found)

    def _climbed(self, found: Sequence[tuple[Advice, LegalChange]]) -> list[Advice]:
        """Changes priced with the command's own cuts, within a further work limit, fastest first."""
        work, advised = Work(CLIMBS), list[Advice]()
        searched, self._pricer.work = self._pricer.work, work
        for advice, candidate in found:
            if not advised or work.left > 0:
                advised.append(self._advice(candidate, self._pricer.climbed(candidate.spec, advice.price)))
        self._pricer.work = searched
        return sorted(advised, key=_rank)

    def _order(self, candidate: LegalChange) -> tuple[object, ...]:
        """Sort key: changes that likely fit come first, by their bound on time; then the others, by their estimated memory."""
        likely = self._likely_bytes(candidate)
        fits = likely <= self._usable_bytes
        return not fits, candidate.bound_ns if fits else likely, texts(self._spec, candidate.spec)

    def _likely_bytes(self, candidate: LegalChange) -> int:
        """The peak if the reductions of the edits multiply, or the lower bound if that is larger."""
        share = 1.0
        for edit in candidate.edits:
            share *= self._ratios.get(edit, self._floor_ratio(candidate))
        return int(self._before.peak_bytes * share)

    def _floor_ratio(self, candidate: LegalChange) -> float:
        """Bound on the peak relative to the spec's bound; for a host without bounds, as if all memory were shared by more GPUs."""
        if self._floor_bytes:
            return candidate.floor_bytes / self._floor_bytes
        return self._spec.mesh.world_size / candidate.spec.mesh.world_size

    def _may_win(self, candidate: LegalChange, found: Sequence[tuple[Advice, LegalChange]]) -> bool:
        return candidate.bound_ns < self._bound_ns * (1 + found[-1][0].lost)

    def _useful(self, singles: Sequence[LegalChange]) -> list[Edit]:
        """Edits that lower the peak, with the largest saving first, alternating between mesh edits and other edits."""
        edits = sorted({candidate.edits[0] for candidate in singles}, key=lambda edit: (self._ratios[edit], edit.group, str(edit)))
        mesh = [edit for edit in edits if edit.factors and self._ratios[edit] < 1][:USEFUL_MOVES]
        others = [edit for edit in edits if not edit.factors][:USEFUL_OTHERS]
        return [edit for pair in zip(mesh, others, strict=False) for edit in pair] + mesh[len(others) :] + others[len(mesh) :]

    def _more_devices(self, useful: Sequence[Edit]) -> list[Advice]:
        """Changes to the smallest larger number of GPUs that fits, with or without edits."""
        pricer = self._pricer
        pricer.work = Work(pricer.work.most)  # nothing was found with the same number of GPUs: search again with the same limit
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


def _loops(spec: Spec) -> bool:
    """True if a rank has several chunks in loop placement."""
    return spec.mesh.vpp > 1 and placement(spec.schedule.kind) == "loop"


def _saving(useful: Sequence[Edit]) -> tuple[Edit, ...]:
    """The edit of each group, except the mesh, that saves the most."""
    found: dict[str, Edit] = {}
    for edit in useful:
        if not edit.factors:
            group = edit.group.partition(".")[0]
            found.setdefault("recompute" if group == "modules" else group, edit)  # Megatron runs either full or selective recompute
    return tuple(found.values())


def _rank(advice: Advice) -> tuple[object, ...]:
    return advice.lost, advice.price.peak_bytes, advice.overrides
