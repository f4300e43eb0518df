"""600 mutated inputs; `python scripts/fuzz.py` reads any number, of any seed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # fuzz_inputs

from fuzz_commands import Commands
from fuzz_foreign import ForeignFiles
from fuzz_grammar import files_of, run_lines
from fuzz_inputs import HANG_SECONDS, LARGEST_BYTES, Inputs, fuzz, peak_bytes

from megarun.data.corpus import read_corpus
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

pytestmark = [pytest.mark.runtime, pytest.mark.jobs]


def test_no_input_gives_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(Path(__file__).read_text())
    tokenize(read_corpus(tmp_path / "text"), TokenizerKind.BYTES, 257, tmp_path / "small.tokens")
    before = peak_bytes()
    tokens = tmp_path / "small.tokens"
    readers = Inputs(tmp_path, tokens).readers | Commands(tmp_path).readers | ForeignFiles(tmp_path / "foreign", tokens).readers
    found = fuzz(readers, 480, 0, HANG_SECONDS)
    assert not found.wrong
    assert set(found.refused) == set(readers)  # every kind has met what it must refuse
    assert set(found.loaded) == set(readers)
    assert peak_bytes() - before < LARGEST_BYTES


def test_no_command_line_gives_a_traceback(tmp_path: Path) -> None:
    found = run_lines(tmp_path, files_of(None), 120, 0, HANG_SECONDS)
    assert not found.wrong
    assert found.taken
    assert found.refused
