"""A plan under `--set`: changed values with the same cuts."""

from collections.abc import Sequence

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.inventory.build import build_inventory
from megaplan.layout.build import span_problems
from megaplan.partition.choose import keep_cuts
from megaplan.plan.document import PlanDocument
from megaplan.plan.inputs import spec_values
from megaplan.plan.make import make_plan
from megaplan.spec.document import Document, SourceMap
from megaplan.spec.load import check_document, check_spec
from megaplan.spec.models import Spec
from megaplan.spec.overrides import apply_overrides


def varied_spec(plan: PlanDocument, name: str, overrides: Sequence[str]) -> tuple[Spec, tuple[Diagnostic, ...]]:
    """The plan's spec with overrides, with the warnings and notes that a spec of these values has.

    Args:
        plan: A plan.
        name: Name of its file in diagnostics.
        overrides: `KEY=VALUE` texts.

    Raises:
        MegaplanError: The overrides or the resulting spec are wrong, or the plan's cuts do not fit it (MP488).
    """
    document = Document(spec_values(plan.inputs), SourceMap(name))
    spec, _, found = check_document(apply_overrides(document, overrides)) if overrides else check_spec(plan.spec, document)
    if broken := span_problems(plan.spans, spec.model.num_layers, spec.mesh.pp, spec.mesh.vpp, may_be_empty=spec.host.kind.empty_slots):
        options = " ".join(f"--set {override}" for override in overrides)
        hint = f"megaplan split SPEC {options} -o plan.json"
        raise MegaplanError([diagnostic("MP488", item.detail, Location(name), (hint,)) for item in broken])
    return spec, found


def vary_plan(plan: PlanDocument, name: str, overrides: Sequence[str]) -> tuple[PlanDocument, tuple[Diagnostic, ...]]:
    """The plan estimated again with overrides, its cuts kept and judged by today's costs; and warnings.

    Raises:
        MegaplanError: The same as for `varied_spec`.
    """
    spec, found = varied_spec(plan, name, overrides)
    inventory = build_inventory(spec)
    cuts = keep_cuts(spec, inventory, plan.spans)
    if plan.decisions.split.costs is not None:
        detail = f"the plan records {plan.decisions.split.costs}; its cuts are shown as FLOPs per token weigh them"
        found = (*found, diagnostic("MP415", detail, Location(name), severity=Severity.WARNING))
    return make_plan(spec, overrides=(*plan.overrides, *overrides), cuts=cuts), found
