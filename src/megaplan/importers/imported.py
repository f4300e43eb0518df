"""`Imported`: the spec that an importer made, and its text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megaplan.errors import Diagnostic
from megaplan.spec.document import Document, resolve_scalar
from megaplan.spec.load import LoadedSpec, check_document

NOT_CARRIED = frozenset({"MP820", "MP915"})
"""Codes of settings that the source has and the spec does not."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A config, launch, job or run as a spec.

    Attributes:
        loaded: The checked spec, with the import's warnings and notes among its diagnostics.
        document: Plain values of the spec, as a spec file holds them.
    """

    loaded: LoadedSpec
    document: dict[str, Any]

    @classmethod
    def of(cls, document: Document, found: Iterable[Diagnostic] = (), loaded: LoadedSpec | None = None) -> "Imported":
        """The spec of a document, with what the importer found before its own diagnostics.

        Args:
            document: Values of the spec, overrides included.
            found: Warnings and notes of the import.
            loaded: The checked document, if it has been checked.

        Raises:
            MegaplanError: Every error found in the spec.
        """
        loaded = loaded or check_document(document)
        return cls(loaded._replace(diagnostics=(*found, *loaded.diagnostics)), document.value)

    def text(self, title: str) -> str:
        """A spec file with a title, and comments on settings that were not carried over."""
        lost = (line for each in self.loaded.diagnostics if each.code in NOT_CARRIED for line in each.detail.splitlines())
        return spec_text(self.document, [title, *(f"Not imported: {line}" for line in lost)])


def spec_text(document: dict[str, Any], comments: Sequence[str] = ()) -> str:
    """A spec file that holds a document's values.

    Args:
        document: Plain values of a spec.
        comments: Lines to put before them.
    """
    head = "".join(f"# {line}\n" for comment in comments for line in comment.splitlines())
    return head + yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=140, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the texts that megaplan's own reader would take for something else, and repeats a list in full instead of an alias."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = resolve_scalar(text) == text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)
