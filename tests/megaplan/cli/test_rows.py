"""Every row of docs/reference/rows.yaml answers as the page of requirements says."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
ROWS = yaml.safe_load((ROOT / "docs/reference/rows.yaml").read_text())


@pytest.mark.parametrize("row", ROWS, ids=[row["row"] for row in ROWS])
def test_a_row_answers_as_written(row, megaplan):
    """A row whose training, planning or refusal has changed fails, so that the page is updated with it."""
    program, *words = shlex.split(row["command"])
    ran = megaplan(*words)
    found = set(re.findall(r"\[(MP\d+)\]", ran.out + ran.err))
    assert program == "megaplan"
    if row["answer"] in ("works", "priced"):
        assert ran.status == 0, ran.err
        assert ("MP790" in found) is (row["answer"] == "priced")
    else:
        assert ran.status > 0
        assert row["answer"] in found
    assert "also" not in row or (ROOT / "tests" / row["also"]).is_file()
