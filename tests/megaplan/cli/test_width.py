"""Tables follow the line's width, every rank can be asked for, and a stream that lacks a character gets another one."""

import io
import re
import sys

import pytest

from megaplan.cli.main import run

SPEC = ("estimate", "plans/nam56r-8xh200.yaml", "--set", "mesh.pp=4", "--set", "mesh.dp_shard=13")


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_no_line_of_a_table_is_wider_than_the_line_has_room_for(megaplan, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = megaplan(*SPEC).out.splitlines()
    assert max(map(len, lines)) <= columns
    head = next(line for line in lines if line.startswith("GiB "))
    assert len(re.findall(r"ranks? \d", head)) == {80: 3, 120: 4, 200: 4}[columns]


def test_all_ranks_are_shown_in_as_many_tables_as_they_need(megaplan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    some, every = megaplan(*SPEC).out, megaplan(*SPEC, "--all-ranks").out
    assert "share a column" in some
    assert "not shown, peak at most" in some
    assert "--all-ranks shows them" in " ".join(some.split())
    assert "not shown" not in every
    heads = [line for line in every.splitlines() if line.startswith("GiB ")]
    assert len(heads) == 2
    assert re.findall(r"ranks? [\d-]+", " ".join(heads)) == [
        "ranks 0-12",
        "ranks 13-25",
        "ranks 26-38",
        "ranks 39-51",
    ]


@pytest.mark.parametrize("words", [SPEC, (*SPEC, "--json"), ("show", "plans/nam56r-8xh200.json"), ("estimate", "plans/none.yaml")])
def test_a_stream_of_ascii_alone_gets_the_answer(here, monkeypatch, words):
    shown = []
    for encoding in ("utf-8", "ascii"):
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            status = run(words)
        shown.append((status, *(stream.buffer.getvalue().decode(encoding) for stream in (out, err))))
    (status, text, error), (same, plain, plain_error) = shown
    assert status == same
    assert len(plain.splitlines()) == len(text.splitlines())
    assert "MP499" not in plain + plain_error
    assert not {"?"} & (set(plain + plain_error) - set(text + error))
