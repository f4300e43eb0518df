"""Colour: only on a terminal, never against NO_COLOR, and never the only carrier of a meaning."""

import io
import re
import sys

import pytest

from megaplan.cli.main import run

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_a_terminal(here, monkeypatch):
    def call(*words: str) -> tuple[str, str]:
        out, err = Terminal(), Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            run(words)
        return out.getvalue(), err.getvalue()

    return call


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", "plans/llama-3.1-8b.yaml", "--set", "batch.micro_batch_size=16"),
        ("diff", "plans/tiny-hybrid.json", "plans/tiny-hybrid-pp2.json"),
        ("estimate", "plans/tiny-hybrid.yaml", "--set", "mesh.tp=3", "--set", "mesh.ep=3"),
        ("explain", "MP203"),
    ],
)
def test_colour_adds_nothing_but_colour(on_a_terminal, monkeypatch, words):
    monkeypatch.setenv("TERM", "xterm-256color")
    plain = on_a_terminal(*words)
    assert not ANSI.search("".join(plain))
    monkeypatch.delenv("NO_COLOR")
    coloured = on_a_terminal(*words)
    assert ANSI.search("".join(coloured))
    assert tuple(ANSI.sub("", text) for text in coloured) == plain


def test_a_dumb_terminal_gets_plain_text(on_a_terminal, monkeypatch):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    out, _ = on_a_terminal("estimate", "plans/tiny-hybrid.yaml")
    assert not ANSI.search(out)
