"""`manual`: cuts that people wrote down, as spans or as `|` in the pattern. They are checked, never moved (R-25)."""

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location
from megaplan.layout.build import Spans, cuts_of, span_problems
from megaplan.partition.constraints import constraints_of
from megaplan.spec.models import Spec


def manual_problems(spec: Spec, pattern_spans: Spans | None) -> list[Diagnostic]:
    """All errors of a manual split; empty if `manual_spans` can be used.

    MP321 no spans, MP322 two statements, MP323 no reason, MP324 … MP326 spans that do not tile the layers, MP331 a broken constraint.

    Args:
        spec: The spec.
        pattern_spans: Spans between the `|` of the pattern; None if it has none.
    """
    split, mesh, spans = spec.split, spec.mesh, manual_spans(spec, pattern_spans)
    found = []
    if split.reason is None or not split.reason.strip():
        found.append(_problem("MP323", f"split.reason = {'null' if split.reason is None else repr(split.reason)}", "split.reason"))
    if pattern_spans is not None and split.spans is not None:
        found.append(_problem("MP322", f"model.pattern has '|' at {list(cuts_of(pattern_spans))}, and split.spans is given", "split.spans"))
    if not spans:
        return [*found, _problem("MP321", "split.mode = manual, without split.spans and without '|' in model.pattern", "split.spans")]
    found += span_problems(spans, spec.model.num_layers, mesh.pp, mesh.vpp, may_be_empty=spec.host.kind.empty_slots)
    return found + [_problem("MP331", broken, "split.spans") for broken in constraints_of(spec).broken_by(cuts_of(spans))]


def manual_spans(spec: Spec, pattern_spans: Spans | None) -> Spans:
    """The spans of a manual split: the pattern's if it has `|`, else those of `split.spans`; empty if there are none."""
    return pattern_spans if pattern_spans is not None else spec.split.spans or ()


def _problem(code: str, detail: str, key: str) -> Diagnostic:
    return diagnostic(code, detail, Location(key=key))
