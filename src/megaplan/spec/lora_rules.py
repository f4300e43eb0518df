"""Rules of `lora`: its names must exist, and settings without a frozen form are refused."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.families.registry import FAMILIES
from megaplan.inventory.adapters import adaptable
from megaplan.spec.context import Checked
from megaplan.spec.lora import Lora
from megaplan.wording import series


def lora_rules(checked: Checked) -> Iterator[Diagnostic]:
    """Yields MP725, MP726 and MP902."""
    lora = checked.spec.lora
    if lora is None:
        return
    if not checked.spec.host.kind.trained:
        detail = f"lora.rank = {lora.rank}, and host.name = {checked.spec.host.kind.name} has no terms for adapters and frozen parameters"
        yield checked.error("MP902", detail, "lora", "host: {name: megarun}", "remove lora")
    if checked.letters is not None:
        yield from _named(checked, lora)
    for key, given, instead in _unsupported(checked, lora):
        yield checked.error("MP726", f"lora.rank = {lora.rank}, and {given}", key, instead)


def _named(checked: Checked, lora: Lora) -> Iterator[Diagnostic]:
    """Every entry of `lora.families` must name a linear, and some linear must be adapted."""
    linears = _linears(checked)
    known = {letter: list(names) for letter, names in linears.items() if names}
    every = dict.fromkeys(name for names in known.values() for name in names)
    for index, entry in enumerate(lora.families or ()):
        if entry not in known and entry not in every and entry not in {name.rpartition(".")[2] for name in every}:
            detail = f"lora.families names {entry}; {_shown(known)}"
            yield checked.error("MP725", detail, f"lora.families[{index}]", "families: null")
    if not known:
        yield checked.error("MP725", f"lora.rank = {lora.rank}; {_shown(known)}", "lora", "remove lora")


def _linears(checked: Checked) -> dict[str, dict[str, None]]:
    """The linears that can be adapted, by letter of the pattern; missing sections are reported elsewhere."""
    found: dict[str, dict[str, None]] = {}
    model = checked.spec.model
    letters = checked.letters or ""
    for index, letter in enumerate(letters):
        family = FAMILIES[letter]
        section = getattr(model, family.section)
        if section is None:
            continue
        tensors = family.tensors(section, model.hidden_size, family.variant(section, index, letters[:index].count(letter)))
        found.setdefault(letter, {}).update(dict.fromkeys(name for tensor in tensors if (name := adaptable(tensor)) is not None))
    return found


def _shown(known: dict[str, list[str]]) -> str:
    if not known:
        return "no layer of the pattern has a linear that can be adapted"
    return "linears that can be adapted: " + "; ".join(f"{letter} has {series(names, 'and')}" for letter, names in known.items())


def _unsupported(checked: Checked, lora: Lora) -> Iterator[tuple[str, str, str]]:
    """Each setting that lora does not support: its key, its value, and the value to write instead."""
    spec = checked.spec
    model, precision = spec.model, spec.precision
    if model.features.mtp is not None:
        yield (
            "model.features.mtp",
            f"model.features.mtp.depth = {model.features.mtp.depth}: its loss trains the depths themselves",
            "mtp: null",
        )
    if getattr(model.attention, "indexer", None) is not None:
        yield "model.attention.indexer", "model.attention.indexer is given: it is trained by a loss of its own", "indexer: null"
    if model.features.relation_bias is not None:
        yield "model.features.relation_bias", "model.features.relation_bias is given: no frozen form of it is priced", "relation_bias: null"
    if precision.recipe is not None:
        yield (
            "precision.recipe",
            f"precision.recipe.name = {precision.recipe.name}: copies of frozen weights are not priced",
            "recipe: null",
        )
    if precision.families:
        written = ", ".join(f"{letter}: {dtype}" for letter, dtype in precision.families.items())
        yield "precision.families", f"precision.families = {{{written}}}: frozen parameters have one dtype", "families: {}"
    if lora.dtype is not None and lora.dtype not in (precision.params, precision.master):
        given = f"lora.dtype = {lora.dtype}: frozen parameters are stored as they are used, or as others are"
        yield "lora.dtype", f"{given} (precision.params = {precision.params}, precision.master = {precision.master})", "dtype: null"
