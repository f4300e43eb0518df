"""Rules of the pattern: letters need sections, boundaries must match slots (R-1, R-2)."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.families.registry import FAMILIES
from megaplan.spec.context import Checked
from megaplan.spec.pattern import BOUNDARY, Pattern, empty_slots, has_boundaries
from megaplan.wording import plural, quoted


def pattern_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP302, MP305, MP307, MP308 and MP309."""
    if checked.pattern is None:
        return
    if not checked.spec.host.kind.empty_slots:
        yield from empty_slots(checked.spec.model.pattern, checked.locate("model.pattern"))
    yield from _sections(checked, checked.pattern)
    yield from _unused_letters(checked, checked.pattern)
    slots, mesh = checked.spec.mesh.num_slots, checked.spec.mesh
    boundaries = checked.pattern.text.count(BOUNDARY)
    if boundaries and boundaries != slots - 1:
        product = f"mesh.pp · mesh.vpp = {mesh.pp} · {mesh.vpp} = {slots} slots"
        detail = f"model.pattern has {boundaries} '|', {product}, and {slots} − 1 = {slots - 1}"
        fit = f"pp: {(boundaries + 1) // mesh.vpp}" if (boundaries + 1) % mesh.vpp == 0 else f"vpp: 1 and pp: {boundaries + 1}"
        yield checked.error("MP302", detail, "model.pattern", f"write {slots - 1} '|', or set {fit} under mesh")


def _sections(checked: Checked, pattern: Pattern) -> Iterator[Diagnostic]:
    text = quoted(pattern.text)
    for letter, family in FAMILIES.items():
        name = family.section
        present = getattr(checked.spec.model, name) is not None
        if letter in pattern.layers and not present:
            detail = f"layer {pattern.layers.index(letter)} of {text} is {letter}, and model.{name} is absent"
            yield checked.error("MP307", detail, "model.pattern", f"add model.{name}, or take {letter} out of the pattern")
        if present and letter not in pattern.layers:
            detail = f"model.{name} is given, and there is no {letter} among the {plural(len(pattern.layers), 'layer')} of {text}"
            late = pattern.text.find(letter)
            hint = f"num_layers: {late + 1} or more reaches the first {letter}" if late >= 0 else f"remove model.{name}"
            yield checked.error("MP308", detail, f"model.{name}", hint)


def _unused_letters(checked: Checked, pattern: Pattern) -> Iterator[Diagnostic]:
    letters, layers = len(pattern.text), len(pattern.layers)
    if not has_boundaries(pattern.text) and letters > layers:
        detail = f"model.pattern has {letters} letters, model.num_layers = {layers}, and the last {letters - layers} build nothing"
        yield checked.warning("MP309", detail, "model.pattern", f"pattern: {pattern.layers}" if layers <= 60 else "shorten the pattern")
