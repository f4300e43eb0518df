"""Validation of plain values as a `Spec`; every failure becomes a diagnostic of megaplan at its key."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError
from megaplan.scalars import BRANCH
from megaplan.spec.document import MAX_FINDINGS, KeyPath, SourceMap, dotted, first_findings
from megaplan.spec.later import SECTION_ERROR
from megaplan.spec.models import MAX_LAYERS, Spec
from megaplan.spec.pattern import BOUNDARY, has_boundaries, parse_pattern
from megaplan.wording import is_newer, show

FORMAT = "megaplan.spec/1"
EDITOR_KEY = "$schema"
"""A spec may name its JSON Schema for editors; the key is ignored."""


def validate_document(document: Any, source: SourceMap) -> Spec:
    """The spec of `document`; a pattern with `|` sets `split.mode` to manual unless the document sets it.

    The value of `$schema` is ignored.

    Raises:
        MegaplanError: MP112, MP115 … MP134, and the pattern's own errors; all that are found.
    """
    if not isinstance(document, dict):
        raise MegaplanError([diagnostic("MP112", f"the document is {show(document)}", source.locate(""), (f"format: {FORMAT}",))])
    if isinstance(document.get(EDITOR_KEY), str):
        document = {key: value for key, value in document.items() if key != EDITOR_KEY}
    if document.get("format") != FORMAT:
        raise MegaplanError([_other_format(document, source)])
    try:
        spec = Spec.model_validate(document)
    except ValidationError as error:
        raise MegaplanError(_findings(error, document, source)) from None
    if has_boundaries(spec.model.pattern) and "mode" not in spec.split.model_fields_set:
        return spec.model_copy(update={"split": spec.split.model_copy(update={"mode": "manual"})})
    return spec


def _other_format(document: dict[str, Any], source: SourceMap) -> Diagnostic:
    if "format" not in document:
        return diagnostic(
            "MP115", f"the document has no key `format`, but a spec begins with format: {FORMAT}", source.locate(""), (f"format: {FORMAT}",)
        )
    written = document["format"]
    detail = f"format = {show(written)}, but this version reads {FORMAT}"
    if isinstance(written, str) and written.startswith("megaplan.plan/"):
        return diagnostic("MP115", detail, source.locate("format"), ("this is a plan; read it with megaplan show PLAN",))
    newer = isinstance(written, str) and is_newer(written, FORMAT)
    return diagnostic("MP115", detail, source.locate("format"), ("pip install --upgrade megaplan" if newer else f"format: {FORMAT}",))


def _findings(error: ValidationError, document: dict[str, Any], source: SourceMap) -> list[Diagnostic]:
    """The first findings in the order of lines; findings without a line, such as overrides, come first. Only those shown get a text."""
    from megaplan.spec.type_errors import Fault, describe, missing_keys, unknown_key  # noqa: PLC0415 (only where something is wrong)

    makers: list[tuple[Location, Callable[[], Diagnostic]]] = []
    missing: dict[KeyPath, list[str]] = {}
    for item in _all_errors(error):
        path, wrong_key = _real_path(item["loc"], document)
        if item["type"] == "missing" and isinstance(path[-1], str):
            missing.setdefault(path[:-1], []).append(path[-1])
        elif wrong_key or item["type"] == "extra_forbidden":
            makers.append((source.locate(dotted(path)), partial(unknown_key, path, document, source)))
        else:
            fault = Fault(item["type"], path, item.get("input"), item.get("ctx", {}), document)
            makers.append((source.locate(fault.key), partial(describe, fault, source)))
    for path, names in missing.items():
        makers.append((source.locate(dotted(path)), partial(missing_keys, path, names, document, source)))
    for found in _pattern_errors(document, source):
        makers.append((found.location, partial(_same, found)))
    makers.sort(key=lambda entry: (entry[0].line or 0, entry[0].column or 0))
    return first_findings([make() for _, make in makers[:MAX_FINDINGS]], len(makers), source.file)


def _all_errors(error: ValidationError) -> Iterator[Any]:
    """Every error; errors of a separately validated section get their full paths."""
    for item in error.errors(include_url=False):
        if item["type"] != SECTION_ERROR:
            yield item
            continue
        yield from ({**inner, "loc": (*item["loc"], *inner["loc"])} for inner in item["ctx"]["errors"])


def _same(found: Diagnostic) -> Diagnostic:
    return found


def _real_path(location: tuple[str | int, ...], document: Any) -> tuple[KeyPath, bool]:
    """The path in the document, without the steps that name a union's branch; and whether the key itself is the fault."""
    if location[-1] == "[key]":
        return tuple(location[:-1]), True
    path: list[str | int] = []
    value = document
    for index, step in enumerate(location):
        is_last = index == len(location) - 1
        if isinstance(step, str) and step.startswith(BRANCH):
            continue
        if isinstance(value, Mapping) and step not in value and not is_last and value.get("kind") == step:
            continue
        path.append(step)
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
    return tuple(path), False


def _pattern_errors(document: dict[str, Any], source: SourceMap) -> list[Diagnostic]:
    """Errors of the pattern, which are reported even if other keys are wrong."""
    model = document.get("model")
    if not isinstance(model, dict):
        return []
    text, num_layers = model.get("pattern"), model.get("num_layers")
    if not isinstance(text, str):
        return []
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or not 0 < num_layers <= MAX_LAYERS:
        num_layers = max(1, len(text) - text.count(BOUNDARY))  # already reported; any length is accepted
    try:
        parse_pattern(text, num_layers, source.locate(dotted(("model", "pattern"))))
    except MegaplanError as error:
        return list(error.diagnostics)
    return []
