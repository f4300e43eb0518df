"""Dimensions of the model that must fit each other: each family's own, then those of features."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.errors import Diagnostic
from megaplan.families.registry import families_of
from megaplan.spec.context import Checked
from megaplan.wording import plural


def model_rules(checked: Checked) -> Iterator[Diagnostic]:
    """MP332, MP701 … MP714."""
    for family, section in families_of(checked.spec.model):
        yield from family.rules(checked, section)
    yield from _features(checked)


def _features(checked: Checked) -> Iterator[Diagnostic]:
    features = checked.spec.model.features
    for name in ("mtp", "relation_bias"):
        if getattr(features, name) is not None and checked.pattern is not None and not checked.has("A"):
            detail = f"features.{name} is given, and the {plural(len(checked.pattern.layers), 'layer')} have no A"
            yield checked.error("MP709", detail, f"model.features.{name}", f"remove features.{name}, or add A to the pattern")
    ngram = features.ngram
    if ngram is not None and ngram.num_rows < ngram.num_tables:
        rows, tables = ngram.num_rows, ngram.num_tables
        detail = f"features.ngram.num_rows = {rows}, features.ngram.num_tables = {tables}, and {rows} < {tables}"
        yield checked.error("MP710", detail, "model.features.ngram.num_rows", "num_rows counts the rows of all tables together")
