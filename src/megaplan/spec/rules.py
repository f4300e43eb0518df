"""All rules about more than one key. Each group yields everything it finds; no group stops another."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.errors import Diagnostic, MegaplanError, Severity
from megaplan.spec.context import Checked, Locate
from megaplan.spec.host_rules import host_rules
from megaplan.spec.lora_rules import lora_rules
from megaplan.spec.low_precision_rules import low_precision_rules
from megaplan.spec.mesh_rules import mesh_rules
from megaplan.spec.model_rules import model_rules
from megaplan.spec.models import Spec
from megaplan.spec.pattern import parse_pattern
from megaplan.spec.pattern_rules import pattern_rules
from megaplan.spec.policy_rules import policy_rules
from megaplan.spec.schedule_rules import schedule_rules
from megaplan.spec.serving_rules import serving_rules
from megaplan.spec.source import NOWHERE
from megaplan.spec.split_rules import split_rules
from megaplan.spec.training_rules import training_rules


def check_rules(spec: Spec, locate: Locate = NOWHERE.locate) -> list[Diagnostic]:
    """Errors and warnings of a typed spec, errors first.

    Args:
        spec: A spec whose values are typed and within their bounds.
        locate: Position of a dotted key.
    """
    found = list(_all_rules(spec, locate))
    return sorted(found, key=lambda item: item.severity is not Severity.ERROR)


def _all_rules(spec: Spec, locate: Locate) -> Iterator[Diagnostic]:
    pattern = None
    try:
        pattern = parse_pattern(spec.model.pattern, spec.model.num_layers, locate("model.pattern"))
    except MegaplanError as error:
        yield from error.diagnostics
    checked = Checked(spec, pattern, locate)
    groups = (
        pattern_rules,
        model_rules,
        mesh_rules,
        schedule_rules,
        split_rules,
        policy_rules,
        low_precision_rules,
        lora_rules,
        training_rules,
        serving_rules,
        host_rules,
    )
    for rules in groups:
        yield from rules(checked)
    if spec.post_training is not None:
        from megaplan.spec.post_training_rules import post_training_rules  # noqa: PLC0415  (few specs have the section)

        yield from post_training_rules(checked)
