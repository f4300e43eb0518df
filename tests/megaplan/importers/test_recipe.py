"""The recipe of a new architecture lists files of the tree, and the page of well-known models is what the command answers."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "docs/recipes/huggingface.md"
MOST_LINES = 60

pytestmark = pytest.mark.skipif(not RECIPE.is_file(), reason="runs beside the sources")


def test_the_recipe_lists_files_of_the_tree() -> None:
    text = RECIPE.read_text(encoding="utf-8")
    section = text.partition("## Files")[2].partition("\n## ")[0]
    files = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(files) == len(set(files)) == 6
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len(text.splitlines()) < MOST_LINES


def test_the_page_of_well_known_models_is_up_to_date() -> None:
    """Fifteen models; remedy: scripts/models_page.py."""
    script = runpy.run_path(str(ROOT / "scripts/models_page.py"))
    assert len(script["MODELS"]) == 15
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"]()
