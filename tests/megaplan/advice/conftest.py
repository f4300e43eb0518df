"""Specs that are read from where the repository's plans are."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megaplan.spec.document import Document, SourceMap
from megaplan.spec.load import check_document
from megaplan.spec.models import Spec
from megaplan.spec.overrides import apply_overrides


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])


@pytest.fixture
def again() -> Callable[[Spec, Sequence[str]], Spec]:
    """A spec with `--set` texts."""

    def call(spec: Spec, overrides: Sequence[str]) -> Spec:
        return check_document(apply_overrides(Document(spec.model_dump(mode="json", exclude_unset=True), SourceMap()), overrides)).spec

    return call
