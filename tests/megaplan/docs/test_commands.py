"""Every command in README.md and docs is run, or says why not."""

import re
from pathlib import Path

import pytest
from doc_commands import COMMAND_BLOCKS, PAGES, PROGRAMS, RUN_BLOCKS, blocks, prepare, run_block

ROOT = Path(__file__).parents[3]
PLANNER = [block for block in RUN_BLOCKS if not block.of_runtime]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One working directory for each page: a page's blocks follow each other."""
    made: dict[Path, Path] = {}

    def folder(page: Path) -> Path:
        if page not in made:
            made[page] = tmp_path_factory.mktemp(page.stem)
            prepare(made[page])
        return made[page]

    return folder


@pytest.mark.jobs
@pytest.mark.parametrize("block", PLANNER, ids=[block.name for block in PLANNER])
def test_a_block_of_the_planner_runs(block, folders):
    run_block(block, folders(block.page))


def test_a_block_of_commands_is_console_and_has_commands():
    for block in blocks():
        first = block.text.lstrip().partition("\n")[0]
        if re.match(rf"(\$ )?({PROGRAMS})(?![\w-]*[.:=(])", first) and block.language != "python":
            assert block.language == "console", f"{block.name}: a command in a block that is not console: {first}"
    for block in COMMAND_BLOCKS:
        assert block.commands or block.reason, f"{block.name} has no line that begins with `$ `"


def test_a_page_is_read_whole():
    """The parser finds as many blocks as fences are written."""
    for page in PAGES:
        fences = sum(line.startswith("```") for line in page.read_text(encoding="utf-8").splitlines())
        assert fences == 2 * sum(block.page == page for block in blocks()), page
