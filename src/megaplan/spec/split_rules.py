"""Rules of cuts: manual spans, and cuts that are forbidden, pinned or kept together (R-21, R-24, R-25)."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from megaplan.errors import Diagnostic
from megaplan.families.checks import rising
from megaplan.spec.context import Checked
from megaplan.spec.models import Spec
from megaplan.spec.pattern import Span, has_boundaries
from megaplan.wording import plural, series, show


class Inseparable(NamedTuple):
    """Layers that no cut may separate, because the host's stages pass on the stream alone.

    Attributes:
        start: Layer that makes the values.
        stop: Layer after the last reader.
        what: Names of the values that the later layers read.
    """

    start: int
    stop: int
    what: str

    def has_inside(self, cut: int) -> bool:
        """True if the cut separates a reader."""
        return self.start < cut < self.stop

    @property
    def text(self) -> str:
        """The layers as text, to follow a verb such as `parts`."""
        return f"layer {self.stop - 1} from layer {self.start}, whose {self.what} it reads, which the host does not send between stages"


def inseparable(spec: Spec) -> tuple[Inseparable, ...]:
    """The layers of a spec's model that no cut may separate on its host."""
    if spec.host.kind.carries_values:
        return ()
    spans: dict[tuple[int, int], list[str]] = {}
    for value in spec.model.payload:
        spans.setdefault((value.source, value.readers[-1] + 1), []).append(value.title)
    return tuple([Inseparable(start, stop, series(titles, "and")) for (start, stop), titles in spans.items()])


def split_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP320 … MP333."""
    broken = list(_lists(checked))
    yield from broken
    if not broken:
        yield from _conflicts(checked)
    wrong = list(_mode(checked)) or list(_spans(checked))
    yield from wrong
    if not wrong and not broken:
        yield from _constraints_of_spans(checked)


def manual_spans(checked: Checked) -> tuple[Span, ...] | None:
    """The spans of a manual split, from `|` or `split.spans`."""
    if checked.pattern is not None and checked.pattern.spans is not None:
        return checked.pattern.spans
    return checked.spec.split.spans


def _mode(checked: Checked) -> Iterator[Diagnostic]:
    split, bars = checked.spec.split, has_boundaries(checked.spec.model.pattern)
    count = checked.spec.model.pattern.count("|")
    if bars and split.mode != "manual":
        detail = f"model.pattern has {count} '|', and split.mode = {split.mode}"
        yield checked.error("MP320", detail, "split.mode", "mode: manual, with a reason", "remove the '|' from the pattern")
        return
    if bars and split.spans is not None:
        detail = f"model.pattern has {count} '|', and split.spans = {show(split.spans)}"
        yield checked.error("MP322", detail, "split.spans", "remove split.spans, or the '|' from the pattern")
    if split.mode == "manual" and not bars and split.spans is None:
        equal = _equal_spans(checked.spec.model.num_layers, checked.spec.mesh.num_slots)
        yield checked.error(
            "MP321", "split.mode = manual, model.pattern has no '|', and split.spans = null", "split.mode", f"spans: {equal}"
        )
    if split.mode != "manual" and split.spans is not None:
        detail = f"split.spans = {show(split.spans)}, and split.mode = {split.mode}"
        yield checked.error("MP333", detail, "split.spans", "mode: manual, with a reason", "remove split.spans")
    if split.mode == "manual" and not (split.reason or "").strip():
        source = "model.pattern has '|'" if bars else "split.mode = manual"
        detail = f"{source}, and split.reason = {show(split.reason)}"
        yield checked.error("MP323", detail, "split.reason", 'reason: "what this split protects"')


def _equal_spans(num_layers: int, slots: int) -> str:
    if slots > min(num_layers, 8):
        return "one [start, stop] a slot"
    stops = [num_layers * index // slots for index in range(slots + 1)]
    return str([[start, stop] for start, stop in pairwise(stops)])


def _spans(checked: Checked) -> Iterator[Diagnostic]:
    """Checks number, order and coverage of `split.spans`; the spans of a pattern are ordered by construction."""
    spec, spans = checked.spec, checked.spec.split.spans
    if spans is None or spec.split.mode != "manual":
        return
    slots = spec.mesh.num_slots
    if len(spans) != slots:
        detail = f"split.spans has {plural(len(spans), 'span')}, and mesh.pp · mesh.vpp = {spec.mesh.pp} · {spec.mesh.vpp} = {slots}"
        yield checked.error("MP324", detail, "split.spans", f"write {plural(slots, 'span')}, or change mesh.pp or mesh.vpp")
    empty = [f"split.spans[{index}] = [{start}, {stop}]" for index, (start, stop) in enumerate(spans) if stop <= start]
    if empty:
        yield checked.error("MP326", "\n".join(empty[:8]), "split.spans", "let each span stop after it starts")
        return
    reached, faults = 0, []
    for index, (start, stop) in enumerate(spans):
        if start != reached:
            faults.append(f"split.spans[{index}] = [{start}, {stop}], but the spans before it end at {reached}")
        reached = stop
    if reached != spec.model.num_layers:
        faults.append(f"split.spans ends at {reached}, and model.num_layers = {spec.model.num_layers}")
    if faults:
        starts = [0, *(stop for _, stop in spans[:-1])]
        stops = [*(stop for _, stop in spans[:-1]), spec.model.num_layers]
        joined = [[start, stop] for start, stop in zip(starts, stops, strict=True)]
        hint = (
            f"spans: {joined}"
            if len(joined) <= 8 and all(start < stop for start, stop in joined)
            else "begin each span where the previous one stops"
        )
        yield checked.error("MP325", "\n".join(faults[:8]), "split.spans", hint)


def _lists(checked: Checked) -> Iterator[Diagnostic]:
    """Checks each cut and span: in order, and within the model."""
    split, num_layers = checked.spec.split, checked.spec.model.num_layers
    for name in ("forbid", "pin"):
        cuts = getattr(split, name)
        yield from rising(checked, f"split.{name}", cuts)
        outside = [str(cut) for cut in cuts if not 0 < cut < num_layers]
        if outside:
            detail = f"split.{name} has {series(outside[:8], 'and')}, and model.num_layers = {num_layers} allows cuts 1 to {num_layers - 1}"
            yield checked.error("MP327", detail, f"split.{name}", f"use cuts from 1 to {num_layers - 1}")
    for index, (start, stop) in enumerate(split.together):
        if not start < stop <= num_layers:
            detail = f"split.together[{index}] = [{start}, {stop}], and model.num_layers = {num_layers}: 0 ≤ start < stop ≤ {num_layers}"
            yield checked.error("MP327", detail, "split.together", f"use layers from 0 to {num_layers}, the stop above the start")


def _conflicts(checked: Checked) -> Iterator[Diagnostic]:
    """Checks constraints against each other."""
    split, num_layers = checked.spec.split, checked.spec.model.num_layers
    slots = checked.spec.mesh.num_slots
    both = sorted(set(split.pin) & set(split.forbid))
    if both:
        cuts = series([str(cut) for cut in both], "and")
        yield checked.error("MP328", f"split.pin and split.forbid both have {cuts}", "split.pin", f"remove {cuts} from one of them")
    inside = _inside_together(checked)
    parted = [cut for cut in split.pin if cut in inside]
    for cut in parted[:8]:
        start, stop = next(span for span in split.together if span[0] < cut < span[1])
        detail = f"split.pin has {cut}, split.together has [{start}, {stop}], and {start} < {cut} < {stop}"
        yield checked.error("MP329", detail, "split.pin", f"pin {start} or {stop} instead, or remove the span")
    if both or parted or slots > num_layers:
        return
    joined = inseparable(checked.spec)
    inside.update(cut for span in joined for cut in range(span.start + 1, span.stop))
    barred = len(inside.union(split.forbid, checked.spec.model.parallel_layers).intersection(range(1, num_layers)))
    allowed, needed = num_layers - 1 - barred, slots - 1
    if len(split.pin) > needed:
        detail = f"split.pin has {plural(len(split.pin), 'cut')}, and {plural(slots, 'slot')} have {needed} between them"
        yield checked.error("MP330", detail, "split.pin", f"pin at most {needed}")
    elif allowed < needed:
        where = "inside split.together, or between layers of which one reads another's values" if joined else "inside split.together"
        free = f"{num_layers - 1} cuts − {barred} forbidden or {where} = {allowed}"
        detail = f"{free}, and {plural(slots, 'slot')} need {needed}"
        yield checked.error("MP330", detail, "split.forbid" if split.forbid else "split.together", "forbid fewer cuts, or use fewer slots")


def _constraints_of_spans(checked: Checked) -> Iterator[Diagnostic]:
    """Checks the manual split against the constraints."""
    spans, split = manual_spans(checked), checked.spec.split
    if spans is None or split.mode != "manual":
        return
    cuts = {start for start, _ in spans[1:]}
    faults = [f"cut {cut} is in split.forbid" for cut in split.forbid if cut in cuts]
    faults += [
        f"cut {cut} parts split.together [{start}, {stop}]" for cut in sorted(cuts) for start, stop in split.together if start < cut < stop
    ]
    faults += [f"split.pin has {cut}, and no span starts there" for cut in split.pin if cut not in cuts]
    shared = sorted(cuts & set(checked.spec.model.parallel_layers))
    faults += [f"cut {cut} parts layer {cut} of model.parallel_layers from the layer before, whose input it reads" for cut in shared]
    joined = inseparable(checked.spec)
    faults += [f"cut {cut} parts {span.text}" for cut in sorted(cuts) for span in joined if span.has_inside(cut)]
    if faults:
        detail = "\n".join(faults[:8])
        yield checked.error(
            "MP331", detail, "split.spans" if split.spans is not None else "model.pattern", "move the boundary, or the constraint"
        )


def _inside_together(checked: Checked) -> set[int]:
    """Cuts inside a span of `split.together`; linear time for any number of overlapping spans."""
    if not checked.spec.split.together:
        return set()
    steps = [0] * (checked.spec.model.num_layers + 2)
    for start, stop in checked.spec.split.together:
        steps[start + 1] += 1
        steps[stop] -= 1
    return {cut for cut, depth in enumerate(accumulate(steps)) if depth > 0}
