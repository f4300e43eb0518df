"""Reading and checking a spec from a file, standard input, a text or plain values; all problems are reported at once."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megaplan.errors import Diagnostic, Diagnostics, MegaplanError
from megaplan.spec.document import Document, SourceMap, parse_document
from megaplan.spec.models import Spec
from megaplan.spec.not_built_yet import megarun_refuses
from megaplan.spec.read import display_name, read_text
from megaplan.spec.rules import check_rules
from megaplan.spec.validate import validate_document


class LoadedSpec(NamedTuple):
    """A valid spec, the positions of its keys, and warnings and notes about it."""

    spec: Spec
    source: SourceMap
    diagnostics: tuple[Diagnostic, ...]


def load_spec(path: str, overrides: Sequence[str] = ()) -> LoadedSpec:
    """The spec of a file.

    Args:
        path: YAML or JSON; `-` is standard input.
        overrides: `KEY=VALUE` texts of `--set`, in order.

    Raises:
        MegaplanError: Every error found.
    """
    return load_spec_text(read_text(path), display_name(path), overrides)


def load_spec_text(text: str, name: str | None = None, overrides: Sequence[str] = ()) -> LoadedSpec:
    """The spec of a text that is already read; `name` is its name in diagnostics.

    Raises:
        MegaplanError: Every error found.
    """
    document = parse_document(text, name)
    if overrides:
        from megaplan.spec.overrides import apply_overrides  # noqa: PLC0415 (the daily command has none)

        document = apply_overrides(document, overrides)
    return check_document(document)


def spec_from_document(document: Mapping[str, Any], source: SourceMap | None = None) -> Spec:
    """The spec of plain values, such as a plan's inputs, checked by the same rules.

    Raises:
        MegaplanError: Every error found.
    """
    return check_document(Document(dict(document), source or SourceMap())).spec


def check_document(document: Document) -> LoadedSpec:
    """The spec of a document that is already parsed.

    Raises:
        MegaplanError: Every error found.
    """
    try:
        spec = validate_document(document.value, document.source)
    except MegaplanError as error:
        raise MegaplanError([*document.faults, *_of_arguments(error.diagnostics, document)]) from None
    return check_spec(spec, document)


def check_spec(spec: Spec, document: Document) -> LoadedSpec:
    """`check_document` for a document that was validated as `spec`.

    Raises:
        MegaplanError: Every error found.
    """
    found = Diagnostics([*document.faults, *_of_arguments(check_rules(spec, document.source.locate), document)])
    found.raise_errors()
    notes = megarun_refuses(spec, document.source.locate) if spec.host.kind.trained else ()
    return LoadedSpec(spec, document.source, (*found, *notes))


def _of_arguments(found: Sequence[Diagnostic], document: Document) -> Sequence[Diagnostic]:
    """The diagnostics; one about a command-line value, or about an import (which has no lines), gets hints for the command line."""
    imported = not document.source.marks and document.source.file is not None
    if not found or not (document.source.overrides or imported):
        return found
    from megaplan.spec.overrides import as_arguments  # noqa: PLC0415 (the daily command has none)

    return [as_arguments(each, document, imported=imported) for each in found]
