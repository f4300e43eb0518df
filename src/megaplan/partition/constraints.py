"""Warnings about the positions of cuts (R-24).

A *routing region* is a maximal run of neighbouring E blocks, a *state region* one of neighbouring R blocks. A cut inside such a run warns;
a cut at its end, or next to a single E or R, does not: dispatch and combine stay within one block, and a recurrence scans over time within
one block, so none of their state crosses a boundary. Only the residual stream and a declared payload do (R-14).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.families.registry import FAMILIES
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec
from megaplan.spec.split_rules import Inseparable, inseparable


class Constraints(NamedTuple):
    """Constraints that every split must honour, in every mode.

    Attributes:
        forbid: Cuts that are not allowed.
        pin: Cuts that are required.
        together: Half-open layer spans that no cut may separate.
        shared: Layers that read the input of the layer before them: a cut must not be directly before one.
        joined: Layers inside a transformer block of the host: a cut must not be directly before one.
        values: Layers that read another layer's values which the host does not send between stages.
    """

    forbid: tuple[int, ...] = ()
    pin: tuple[int, ...] = ()
    together: tuple[tuple[int, int], ...] = ()
    shared: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    values: tuple[Inseparable, ...] = ()

    def allowed_cuts(self, num_layers: int) -> tuple[int, ...]:
        """Allowed cuts, ascending."""
        barred = {*self.forbid, *self.shared, *self.joined}
        for start, stop in (*self.together, *((span.start, span.stop) for span in self.values)):
            barred.update(range(start + 1, stop))
        return tuple(cut for cut in range(1, num_layers) if cut not in barred)

    def broken_by(self, cuts: Sequence[int]) -> list[str]:
        """Texts of the constraints that the cuts break."""
        broken = [f"cut {cut} is in split.forbid" for cut in cuts if cut in self.forbid]
        broken += [
            f"cut {c} parts layers [{start}, {stop}) of split.together" for start, stop in self.together for c in cuts if start < c < stop
        ]
        broken += [f"cut {cut} parts layer {cut} of model.parallel_layers from the layer before" for cut in cuts if cut in self.shared]
        broken += [f"cut {cut} parts {span.text}" for span in self.values for cut in cuts if span.has_inside(cut)]
        broken += [f"cut {cut} is inside a transformer block of the host" for cut in cuts if cut in self.joined]
        return broken + [f"cut {cut} of split.pin is missing" for cut in self.pin if cut not in cuts]

    def check(self, num_layers: int, num_slots: int) -> None:
        """Refuse constraints that no split can satisfy.

        Raises:
            MegaplanError: MP327 … MP330, see `problems`.
        """
        if found := self.problems(num_layers, num_slots):
            raise MegaplanError(found)

    def problems(self, num_layers: int, num_slots: int) -> list[Diagnostic]:
        """Reasons that no split can satisfy them (MP327 … MP330); empty if one can."""
        found = []
        for key, cuts in (("split.forbid", self.forbid), ("split.pin", self.pin)):
            for cut in cuts:
                if not 0 < cut < num_layers:
                    found.append(_problem("MP327", f"cut {cut} of {key}, and cuts are 1 to {num_layers - 1}", key))
        for start, stop in self.together:
            if not 0 <= start < stop <= num_layers:
                found.append(_problem("MP327", f"span [{start}, {stop}), and layers are [0, {num_layers})", "split.together"))
        found += [problem for cut in self.pin for problem in self._of_pin(cut)]
        return found or self._too_few_cuts(num_layers, num_slots)

    def _of_pin(self, cut: int) -> Iterator[Diagnostic]:
        if cut in self.forbid:
            yield _problem("MP328", f"cut {cut} is in split.pin and in split.forbid", "split.pin")
        if cut in self.shared:
            yield _problem("MP328", f"cut {cut} of split.pin parts layer {cut} of model.parallel_layers", "split.pin")
        if cut in self.joined:
            yield _problem("MP328", f"cut {cut} of split.pin is inside a transformer block of the host", "split.pin")
        for span in self.values:
            if span.has_inside(cut):
                yield _problem("MP328", f"cut {cut} of split.pin parts {span.text}", "split.pin")
        for start, stop in self.together:
            if start < cut < stop:
                yield _problem("MP329", f"cut {cut} of split.pin is inside [{start}, {stop}) of split.together", "split.pin")

    def _too_few_cuts(self, num_layers: int, num_slots: int) -> list[Diagnostic]:
        needed, pinned, allowed = num_slots - 1, len(set(self.pin)), len(self.allowed_cuts(num_layers))
        if pinned > needed:
            return [_problem("MP330", f"split.pin has {pinned} cuts, and {num_slots} slots have {needed} boundaries", "split.pin")]
        if allowed < needed:
            more = ", and layers that read another layer's values," * bool(self.values) + ", and the host's blocks," * bool(self.joined)
            rules = f"split.forbid and split.together{more}"
            detail = f"{num_slots} slots need {needed} cuts; {num_layers} layers with {rules} allow {allowed}"
            return [_problem("MP330", detail, "split")]
        return []


def constraints_of(spec: Spec) -> Constraints:
    """The constraints of a spec: its `split` section, layers that share an input or a value, and the host's blocks."""
    split = spec.split
    joined = tuple(cut for cut in range(1, spec.model.num_layers) if cut % spec.host.block_layers)
    return Constraints(split.forbid, split.pin, split.together, spec.model.parallel_layers, joined, inseparable(spec))


def _problem(code: str, detail: str, key: str) -> Diagnostic:
    return diagnostic(code, detail, Location(key=key))


_REGIONS = {family.letter: family.region for family in FAMILIES.values() if family.region is not None}


def boundary_warnings(inventory: Inventory, cuts: Sequence[int], owners: Sequence[int], constraints: Constraints) -> list[Diagnostic]:
    """One warning for each cut inside a run of E or of R blocks.

    Args:
        inventory: Layers of the model.
        cuts: Cuts, ascending.
        owners: pp rank of each slot, for the message.
        constraints: Constraints of the split; the hint to keep the run together is given only if they then still allow a split.
    """
    families = [block.family for block in inventory.layers]
    found = []
    for slot, cut in enumerate(cuts):
        if not 0 < cut < len(families):
            continue  # an end of the pipeline without a layer
        family = families[cut]
        if families[cut - 1] != family or family not in _REGIONS:
            continue
        start, stop = _run(families, cut)
        detail = (
            f"layers [{start}, {stop}) are a run of {stop - start} {family} blocks, and cut {cut} puts layers {cut - 1} and {cut} on slots "
            f"{slot} and {slot + 1}, pp ranks {owners[slot]} and {owners[slot + 1]}"
        )
        kept = Constraints(constraints.forbid, constraints.pin, (*constraints.together, (start, stop)))
        hints = () if kept.problems(len(families), len(owners)) else (f"split: {{together: [[{start}, {stop}]]}}",)
        found.append(diagnostic(_REGIONS[family], detail, Location(key="split"), hints, Severity.WARNING))
    return found


def _run(families: Sequence[str], inside: int) -> tuple[int, int]:
    """The maximal run of one family around a layer, half-open."""
    start = stop = inside
    while start > 0 and families[start - 1] == families[inside]:
        start -= 1
    while stop < len(families) and families[stop] == families[inside]:
        stop += 1
    return start, stop
