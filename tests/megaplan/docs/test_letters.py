"""Pages that list the letters of the pattern list those of the registry."""

import re
from pathlib import Path

from megaplan.families.registry import FAMILIES

README = Path(__file__).parents[3] / "README.md"


def test_the_readme_names_every_letter_in_the_order_of_the_registry():
    """Each as `A` with what it stands for; the paragraph that says what a pattern is has no other single letters."""
    section = README.read_text(encoding="utf-8").split("## A model is a pattern\n", 1)[1].split("\n## ", 1)[0]
    first_sentence = section.strip().split(". ", 1)[0]
    assert re.findall(r"`([A-Z])` [a-zA-Z]", first_sentence) == [*FAMILIES]
