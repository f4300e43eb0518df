"""Result of loading a changed copy of the sample."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megaplan.errors import Diagnostic, MegaplanError, render_diagnostic
from megaplan.spec.load import LoadedSpec, load_spec_text

sys.path.insert(0, str(Path(__file__).parent))

from spec_samples import Accepted, Edit, Refused, edited

RAW_WORDS = ("pydantic", "Traceback", "Input should", "type=", "validation error", "libyaml")


@pytest.fixture
def accepted() -> Accepted:
    """Loads the sample with edits and overrides."""

    def load(*edits: Edit, overrides: Sequence[str] = ()) -> LoadedSpec:
        return load_spec_text(edited(*edits), "sample.yaml", overrides)

    return load


@pytest.fixture
def refused() -> Refused:
    """All diagnostics of the sample with edits and overrides, or of `text`: in our words, each with a place and a next step."""

    def load(*edits: Edit, overrides: Sequence[str] = (), text: str | None = None) -> tuple[Diagnostic, ...]:
        with pytest.raises(MegaplanError) as caught:
            load_spec_text(edited(*edits) if text is None else text, "sample.yaml", overrides)
        shown = "\n\n".join(render_diagnostic(found) for found in caught.value.diagnostics)
        assert not [word for word in RAW_WORDS if word in shown], shown
        for found in caught.value.diagnostics:
            assert found.location.file, found
            assert found.hints[-1] == f"megaplan explain {found.code}"
            assert found.detail, found
        return caught.value.diagnostics

    return load
