"""The page of well-known models is what the command answers."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/models_page.py"


@pytest.mark.skipif(not SCRIPT.is_file(), reason="runs beside the sources")
def test_the_page_of_well_known_models_is_up_to_date() -> None:
    """Fifteen models; remedy: scripts/models_page.py."""
    script = runpy.run_path(str(SCRIPT))
    assert len(script["MODELS"]) == 15
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"]()
