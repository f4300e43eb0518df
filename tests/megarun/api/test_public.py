"""`megarun.train`: documented, typed, listed, imported when asked for; its example runs."""

import doctest
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import megaplan
import megarun
from megarun import api
from megarun.data.corpus import read_corpus, silent
from megarun.data.tokenize import tokenize
from megarun.data.tokenizer import TokenizerKind

ROOT = Path(__file__).parents[3]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working directory with the bundled plans and a token file."""
    shutil.copytree(ROOT / "plans", tmp_path / "plans")
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} sentences about nothing. " * 200)
    corpus = read_corpus(tmp_path / "texts", ("*",), None, silent)
    tokenize(corpus, TokenizerKind("bytes"), 257, tmp_path / "corpus.tokens", silent)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", megarun.__all__)
def test_a_public_name_is_documented_and_listed(name):
    value = getattr(megarun, name)
    assert inspect.getdoc(value)
    assert f"::: megarun.{name}\n" in (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    if inspect.isfunction(value):
        assert set(value.__annotations__) == {*inspect.signature(value).parameters, "return"}
        documented = {line.strip().partition(":")[0] for line in value.__doc__.splitlines()}
        assert {*inspect.signature(value).parameters, "Returns", "Raises", "Examples"} <= documented


def test_importing_megarun_loads_no_torch():
    code = "import sys, megarun; megarun.train; print('torch' in sys.modules, 'megarun.training.loop' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="bogus"):
        getattr(megarun, "bogus")  # noqa: B009
    assert set(megarun.__all__) <= set(dir(megarun))


def test_the_example_prints_what_it_says(here):
    (example,) = doctest.DocTestFinder(recurse=False).find(api.train, "megarun.train", globs={})
    failed, _ = doctest.DocTestRunner().run(example)
    assert failed == 0
    steps = [json.loads(line) for line in (here / "runs/api/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("a.tokens", ["a.tokens"]),
        (Path("a.tokens"), ["a.tokens"]),
        (["a.tokens=1", "b.tokens=3"], ["a.tokens=1", "b.tokens=3"]),
        ({"a.tokens": 1, "b.tokens": 3}, ["a.tokens=1", "b.tokens=3"]),
    ],
)
def test_data_is_named_as_on_the_command_line(data, words):
    assert api._words(data) == words


def test_both_kinds_of_held_out_data_are_refused(here):
    with pytest.raises(megaplan.MegaplanError) as caught:
        megarun.train("plans/tiny-hybrid.json", "corpus.tokens", "out", eval_data="corpus.tokens", validation_fraction=0.1)
    assert caught.value.diagnostics[0].code == "MP628"
