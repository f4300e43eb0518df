"""Reading a plan file: bounded, strict, and with one diagnostic per error.

Nothing in a plan is executed. A document is refused if it is not the plan that `megaplan split` wrote: a digest that does not match
its inputs and decisions, decisions that do not follow from the inputs and the cuts, estimates whose sums do not hold.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.plan import problems
from megaplan.plan.canonical import Json
from megaplan.plan.consistency import contradictions, rule_errors, shape_problems
from megaplan.plan.digests import plan_digest
from megaplan.plan.document import FORMAT, FORMAT_MINOR, PlanDocument
from megaplan.plan.inputs import spec_values
from megaplan.plan.locate import locate
from megaplan.plan.text import MAX_PLAN_BYTES, parse_json
from megaplan.spec.document import KeyPath
from megaplan.spec.models import Spec
from megaplan.spec.read import display_name, read_text

MAX_FINDINGS = 20


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """A plan and the findings of reading it.

    Attributes:
        plan: The document.
        tampered: Errors of digests, or of parts that contradict each other; every command but `check` and `diff` refuses them.
        warnings: Consequences to report (ignored keys of a newer minor).
    """

    plan: PlanDocument
    tampered: tuple[Diagnostic, ...]
    warnings: tuple[Diagnostic, ...]


def read_plan(path: str) -> PlanDocument:
    """Read a plan file, `-` for stdin.

    Raises:
        MegaplanError: Anything is wrong with it, including a digest that does not match.
    """
    loaded = inspect_plan(path)
    if loaded.tampered:
        raise MegaplanError(loaded.tampered)
    return loaded.plan


def inspect_plan(path: str) -> LoadedPlan:
    """Read a plan file, and report a digest mismatch or a contradiction instead of refusing it.

    Raises:
        MegaplanError: It is not a plan, of another version, or its keys or types are wrong.
    """
    return parse_plan(read_text(path, MAX_PLAN_BYTES), display_name(path))


def parse_plan(text: str, name: str) -> LoadedPlan:
    """The plan in `text`; `name` is the name of the file in diagnostics."""
    try:
        return _parsed(text, name)
    except RecursionError:  # the parser allows deeper nesting than copying and checking do
        raise MegaplanError([problems.too_deep(Location(name))]) from None


def _parsed(text: str, name: str) -> LoadedPlan:
    document = parse_json(text, name)
    source = _Source(text, name)
    raw = _check_format(document, source)
    known, warnings = raw, []
    if raw["format_minor"] > FORMAT_MINOR:
        known, ignored = _without_unknown(raw)
        if ignored:
            warnings.append(problems.newer_minor(raw["format_minor"], FORMAT_MINOR, ignored, source.at(("format_minor",))))
    plan = _validate(known, source)
    tampered = _check_digest(raw, plan, source)
    if unusable := shape_problems(plan, source.at) or rule_errors(plan, source.at):
        raise MegaplanError([*tampered, *unusable])
    tampered = tampered or contradictions(plan, source.at)
    return LoadedPlan(plan, tuple(tampered), tuple(warnings))


class _Source:
    """Positions of key paths in the file."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name

    def at(self, path: Sequence[str | int]) -> Location:
        line, column = locate(self._text, path)
        return Location(self._name, line, column, problems.dotted(path) or None)


def _check_format(document: Json, source: _Source) -> dict[str, Any]:
    if not isinstance(document, dict) or not isinstance(document.get("format"), str):
        raise MegaplanError([problems.not_a_plan(_shape(document), source.at(()))])
    if document["format"] != FORMAT:
        raise MegaplanError([problems.other_format(str(document["format"]), source.at(("format",)))])
    minor = document.get("format_minor")
    if not isinstance(minor, int) or isinstance(minor, bool) or minor < 0:
        raise MegaplanError([problems.wrong_field("format_minor", f"{minor!r} is not a natural number", source.at(("format_minor",)))])
    return document


def _shape(document: Json) -> str:
    if isinstance(document, dict):
        keys = ", ".join(sorted(document)[:5])
        return f"the top level has no `format`; its keys are {keys}" if keys else "the top level is an empty object"
    return f"the top level is {'an array' if isinstance(document, list) else 'a single value'}"


def _validate(document: dict[str, Any], source: _Source) -> PlanDocument:
    try:
        plan = PlanDocument.model_validate(document)
    except ValidationError as error:
        raise MegaplanError([_schema_problem(item, path, source) for item, path in _located(error, document, ())]) from None
    try:
        plan.spec  # noqa: B018  (cached: the inputs are validated here, once)
    except ValidationError as error:
        raise MegaplanError([_schema_problem(item, path, source) for item, path in _located(error, document, ("inputs",))]) from None
    return plan


def _located(error: ValidationError, document: dict[str, Any], root: KeyPath) -> list[tuple[Any, KeyPath]]:
    """Errors that pydantic found, each with its path in the document; at most `MAX_FINDINGS`."""
    return [(item, _real_path(document, (*root, *item["loc"]))) for item in error.errors(include_url=False)[:MAX_FINDINGS]]


def _schema_problem(item: Any, path: KeyPath, source: _Source) -> Diagnostic:
    if item["type"] == "extra_forbidden":
        return problems.unknown_key(path, source.at(path))
    if item["type"] == "missing":
        return problems.missing_key(path, source.at(path[:-1]))
    shown = problems.shortened(repr(item["input"]))
    return problems.wrong_field(problems.dotted(path), f"{shown}: {item['msg'][:1].lower()}{item['msg'][1:]}", source.at(path))


def _without_unknown(document: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy without the keys that this version does not know, and their dotted names."""
    trimmed, ignored = copy.deepcopy(document), []
    for validate, root in ((PlanDocument.model_validate, ()), (lambda plan: Spec.model_validate(spec_values(plan["inputs"])), ("inputs",))):
        if not isinstance(trimmed.get("inputs"), dict):
            break
        try:
            validate(trimmed)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                path = _real_path(trimmed, (*root, *item["loc"]))
                if item["type"] == "extra_forbidden":
                    ignored.append(problems.dotted(path))
                    del _walk(trimmed, path[:-1])[path[-1]]
    return trimmed, ignored


def _real_path(document: Any, location: KeyPath) -> KeyPath:
    """`location` without the steps that pydantic adds for the branch of a union; a final step for a missing key is kept."""
    path: list[str | int] = []
    for step in location:
        if step in document if isinstance(document, dict) else isinstance(document, list) and step in range(len(document)):
            path.append(step)
            document = document[step]
    last = location[-1] if location else None
    if path[-1:] != [last] and (isinstance(document, dict) or isinstance(last, int)):
        path.append(location[-1])
    return tuple(path)


def _walk(document: Any, path: KeyPath) -> Any:
    for step in path:
        document = document[step]
    return document


def _check_digest(raw: dict[str, Any], plan: PlanDocument, source: _Source) -> list[Diagnostic]:
    computed = plan_digest(raw["inputs"], raw["decisions"])
    if computed == plan.digests.plan:
        return []
    return [problems.digest_mismatch(plan.digests.plan, computed, source.at(("digests", "plan")))]
