"""Every command of the runtime in README.md and docs is run, or says why not."""

import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import RUN_BLOCKS, prepare, run_block
from hf_model import write_model

RUNTIME = [block for block in RUN_BLOCKS if block.of_runtime]
LONG = ("huggingface", "lora", "machine")
"""Pages whose commands take longest."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One working directory for each page, with a token file and a model's folder."""
    made: dict[Path, Path] = {}

    def folder(page: Path) -> Path:
        if page not in made:
            made[page] = tmp_path_factory.mktemp(page.stem)
            prepare(made[page])
            write_model(made[page] / "model")
            words = ["data", "tokenize", "docs", "-o", "headers.tokens", "--tokenizer", "bytes", "--include", "*.md"]
            subprocess.run([sys.executable, "-m", "megarun", *words], cwd=made[page], check=True, capture_output=True)
        return made[page]

    return folder


@pytest.mark.jobs
@pytest.mark.parametrize(
    "block",
    [pytest.param(block, id=block.name, marks=pytest.mark.slow if block.page.stem in LONG else ()) for block in RUNTIME],
)
def test_a_block_of_the_runtime_runs(block, folders):
    run_block(block, folders(block.page))
