"""Runs the command line in this process, in a directory with the bundled specs, and holds its texts against the golden files."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from megaplan.cli.main import run

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "cli"
UPDATE = bool(os.environ.get("MEGAPLAN_UPDATE_GOLDEN"))


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working directory with `plans/`, so that paths in texts are relative."""
    shutil.copytree(ROOT / "plans", tmp_path / "plans")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


@pytest.fixture
def megaplan(here, capsys):
    """`megaplan("estimate", "plans/x.yaml")`: exit status and both streams."""

    def call(*words: str) -> Ran:
        capsys.readouterr()
        status = run(words)
        streams = capsys.readouterr()
        assert "Traceback" not in streams.out + streams.err
        return Ran(status, streams.out, streams.err)

    return call


@pytest.fixture
def golden():
    """Compares with `tests/golden/cli/NAME.txt`; MEGAPLAN_UPDATE_GOLDEN=1 writes it."""

    def compare(name: str, ran: Ran) -> None:
        text = f"exit {ran.status}\n--- stdout\n{ran.out}--- stderr\n{ran.err}"
        path = GOLDEN / f"{name}.txt"
        if UPDATE:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare
