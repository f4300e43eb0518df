"""Every causal type of transformers from 2025 on is read, or refused by the field and the tensors that are missing."""

import inspect
import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from megaplan.importers.registry import ARCHITECTURES, REFUSED, RENAMED  # noqa: E402
from megaplan.importers.towers import MULTIMODAL  # noqa: E402

READ = {*ARCHITECTURES, *RENAMED, *MULTIMODAL}
COUNTS = {"2025": (43, 46), "2026": (40, 49)}
"""Types that are read, and all, by the year of their copyright."""


def types_of(year: str) -> set[str]:
    """Causal types whose config's copyright is of a year; encoders with a head over the vocabulary count, too."""
    found = set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        text = Path(inspect.getfile(transformers.CONFIG_MAPPING[name])).read_text(encoding="utf-8")
        stated = re.search(r"Copyright (\d{4})", text)
        if stated is not None and stated.group(1) == year:
            found.add(name)
    return found


@pytest.mark.parametrize("year", COUNTS)
def test_every_type_is_read_or_refused_by_name(year: str) -> None:
    types = types_of(year)
    assert types - READ - set(REFUSED) == set()
    assert (len(types & READ), len(types)) == COUNTS[year]


def test_no_type_is_read_and_refused() -> None:
    assert READ & set(REFUSED) == set()
