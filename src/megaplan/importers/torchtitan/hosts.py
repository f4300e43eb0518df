"""`check_for_hosts`: a job's spec is for host torchtitan, and for megarun where torchtitan's own estimate lacks something."""

from dataclasses import replace

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.importers.structure import Policy
from megaplan.importers.torchtitan.config import JobConfig
from megaplan.spec.document import Document
from megaplan.spec.load import LoadedSpec, check_document

OTHER_HOST = "megarun"
"""Host of a spec with something that torchtitan's own estimate lacks."""


def check_for_hosts(document: Document, config: JobConfig, policy: Policy) -> tuple[Document, LoadedSpec, list[Diagnostic]]:
    """A checked document; for host megarun if the estimate of torchtitan lacks something, which a warning names.

    Args:
        document: Plain values of a spec for host torchtitan, or for another that a setting names.
        config: The file.
        policy: Policy of the import; a strict one takes no other host.

    Raises:
        MegaplanError: The errors of host megarun, with the warning, if torchtitan's estimate lacks something; else those of host
            torchtitan.
    """
    if _is_of_other(document):
        document = _without_second_dispatch(document)
    reasons = list(config.beyond)
    kept = MegaplanError([diagnostic("MP902", each, Location(config.name)) for each in reasons])
    try:
        loaded = check_document(document)
        if not reasons:
            return document, loaded, []
    except MegaplanError as error:
        found = [each.detail for each in error.diagnostics if each.code == "MP902" and each.severity is Severity.ERROR]
        if not found or _is_of_other(document):
            raise
        reasons += found
        kept = error
    if policy.strict:
        raise kept
    other = _without_second_dispatch(document._replace(value={**document.value, "host": {"name": OTHER_HOST}}))
    said = "\n".join(dict.fromkeys(reasons))
    detail = f"{said}\nthe spec is for host {OTHER_HOST}, which shards with FSDP2 too: the same parameters, other kernels and checkpoints"
    warning = diagnostic("MP919", detail, Location(config.name), ("--strict",), severity=Severity.WARNING)
    try:
        return other, check_document(other), [warning]
    except MegaplanError as error:
        raise MegaplanError([*error.diagnostics, replace(warning, hints=())]) from None


def _is_of_other(document: Document) -> bool:
    host = document.value.get("host")
    return isinstance(host, dict) and host.get("name") == OTHER_HOST


def _without_second_dispatch(document: Document) -> Document:
    """The document with experts whose dispatch is not recomputed under full recompute: megarun refuses to dispatch twice."""
    recompute, model = document.value.get("recompute"), document.value.get("model")
    if not (isinstance(recompute, dict) and recompute.get("default") == "full" and isinstance(model, dict) and model.get("moe")):
        return document
    given = recompute.get("blocks") or {}
    if not isinstance(given, dict):
        return document
    return document._replace(value={**document.value, "recompute": {**recompute, "blocks": {"E": "selective", **given}}})
