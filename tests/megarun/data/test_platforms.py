"""Platforms of documents: the folders of a corpus, in the token file and its rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaplan.errors import MegaplanError
from megaplan.spec.models import Spec
from megarun.cli.main import run
from megarun.data.corpus import read_corpus
from megarun.data.mix import TokenMix
from megarun.data.platforms import SCHEME, document_platforms
from megarun.data.token_file import TokenFile
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind
from megarun.training.prepare import open_tokens

pytestmark = pytest.mark.runtime


def test_a_platform_is_a_folder_of_the_corpus() -> None:
    """Platforms are read from a folder's name, however deep the file; 0 next to the folders."""
    found, count = document_platforms(["b/x/y.h", "a/z.h", "top.h", "b/z.h", "a/b/c.h"])
    assert (found.tolist(), count) == ([2, 1, 0, 2, 1], 3)
    assert document_platforms(["top.h"])[1] == 1
    with pytest.raises(MegaplanError) as refused:
        document_platforms([f"{folder:03}/x.h" for folder in range(256)])
    assert [item.code for item in refused.value.diagnostics] == ["MP616"]


@pytest.mark.parametrize("structure", [False, True])
def test_a_token_file_carries_them(structure: bool, corpus: Path, tmp_path: Path) -> None:
    """One byte a document behind classes or without them; rows have the platform of each token's document."""
    path, bare = tmp_path / "x.tokens", tmp_path / "bare.tokens"
    tokenize(read_corpus(corpus), TokenizerKind.BYTES, 257, path, structure=structure, platform=True)
    tokenize(read_corpus(corpus), TokenizerKind.BYTES, 257, bare, structure=structure)
    source, without = TokenFile(path), TokenFile(bare)
    source.verify()
    assert (source.header.version, source.header.platform, source.header.num_platforms) == (3, SCHEME, 2)
    assert (without.header.version, without.platforms) == (2 if structure else 1, None)
    assert source.platforms is not None
    assert source.platforms.tolist() == [1, 1, 0, 0, 0]
    assert path.stat().st_size == bare.stat().st_size + source.header.num_documents
    assert np.array_equal(source.tokens, without.tokens)
    of_token = np.repeat(source.platforms, np.diff(source.document_offsets))
    windows = source.windows(np.arange(8, 12), 5, 16)
    expected = np.stack([of_token[window * 16 : window * 16 + 17] for window in windows])
    for rows in (source, TokenMix([(source, 1)])):
        assert np.array_equal(rows.platform_rows(2, 5, 4, 16), expected)
    assert np.array_equal(source.rows(2, 5, 4, 16), source.read(windows, 16))


@pytest.mark.parametrize("header", [{"platform": ""}, {"num_platforms": 0}, {"num_platforms": 257}, {"structure": "c-lexical/1"}])
def test_a_damaged_header_is_found(header: dict[str, Any], token_file: Any) -> None:
    fields = {"platform": SCHEME, "num_platforms": 2, "structure": "", "num_categories": 0}
    with pytest.raises(MegaplanError) as refused:
        TokenFile(token_file([list(range(40))], version=3, header=fields | header))
    assert [found.code for found in refused.value.diagnostics] == ["MP614"]


def test_what_a_model_needs_is_checked(corpus: Path, tmp_path: Path, spec_with: Any, token_file: Any) -> None:
    """A file without platforms, and one with more than the model embeds."""
    path = tmp_path / "x.tokens"
    tokenize(read_corpus(corpus), TokenizerKind.BYTES, 257, path, platform=True)
    spec = Spec.model_validate(spec_with({"model.vocab_size": 300, "model.features": {"platform": {"num_categories": 1, "bottleneck": 4}}}))
    with pytest.raises(MegaplanError) as refused:
        open_tokens(path, spec)
    (found,) = refused.value.diagnostics
    assert found.code == "MP627"
    assert "model.features.platform.num_categories=2" in found.hints[0]
    with pytest.raises(MegaplanError) as refused:
        open_tokens(token_file([list(range(40))]), spec)
    (found,) = refused.value.diagnostics
    assert found.code == "MP626"
    assert "--platform" in found.hints[0]


def test_the_command_writes_and_shows_them(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.tokens"
    assert run(["data", "tokenize", str(corpus), "-o", str(path), "--tokenizer", "bytes", "--platform"]) == 0
    assert f"{SCHEME}, 2 platforms" in capsys.readouterr().out
    assert run(["data", "inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"{SCHEME}, 2 platforms" in shown
    assert "structure" not in shown
