"""The Python of the pages runs; a comment below a call of `print` matches its output."""

from pathlib import Path

import pytest
from doc_commands import ROOT, Block, blocks

import megaplan

PAGES = ("docs/reference/api.md", "docs/guides/run.md")
BLOCKS = [block for block in blocks() if block.language == "python" and str(block.page.relative_to(ROOT)) in PAGES]


@pytest.fixture(scope="module")
def names() -> dict[Path, dict[str, object]]:
    """Names that the blocks of a page have made: they follow each other."""
    return {block.page: {"megaplan": megaplan} for block in BLOCKS}


@pytest.mark.parametrize("block", BLOCKS, ids=[block.name for block in BLOCKS])
def test_a_block_of_python_runs(
    block: Block, names: dict[Path, dict[str, object]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block.text, block.name, "exec"), names[block.page])
    said = [line.removeprefix("# ") for line in block.text.splitlines() if line.startswith("# ")]
    assert "\n".join(said) in capsys.readouterr().out


def test_every_page_has_blocks() -> None:
    assert {str(block.page.relative_to(ROOT)) for block in BLOCKS} == set(PAGES)
