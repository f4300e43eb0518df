"""The table of exit statuses in the docs matches the code."""

import re
import signal
from importlib import import_module
from pathlib import Path

import pytest

from megaplan.cli import check, diff, estimate, export, fail_on, run, search, split
from megaplan.terminal import exit_status

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "exit-status.md"
PLANNER = {
    ("every command", exit_status.ERROR),
    ("every command", exit_status.INTERRUPTED),
    ("every command", exit_status.BROKEN_PIPE),
    ("megaplan estimate", estimate.DOES_NOT_FIT),
    ("megaplan split", split.NO_SPLIT),
    ("megaplan run", run.DOES_NOT_FIT),
    ("megaplan search", search.NOTHING_FITS),
    ("megaplan diff", diff.DIFFERS),
    ("megaplan diff", fail_on.FAILED_ON),
    ("megaplan check", fail_on.FAILED_ON),
    ("megaplan check", check.FAILS),
    ("megaplan export", export.LOSES),
    ("megarun train", exit_status.SIGNAL_STATUS + signal.SIGINT),
    ("megarun train", exit_status.SIGNAL_STATUS + signal.SIGTERM),
    ("megarun train", exit_status.SIGNAL_STATUS + signal.SIGUSR1),
    ("megarun train", exit_status.SIGNAL_STATUS + signal.SIGHUP),
}


def rows() -> list[tuple[str, int]]:
    found = re.findall(r"^\| (`[^`]+`|every command) \| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [(command.strip("`"), int(status)) for command, status in found]


def test_the_table_lists_every_status_of_the_planner_once():
    runtime = [row for row in rows() if row[0].startswith(("megarun trace", "megarun checkpoint", "megarun compile", "megarun doctor"))]
    assert sorted(set(rows()) - set(runtime)) == sorted(PLANNER)
    assert len(rows()) == len(set(rows()))


@pytest.mark.runtime
def test_the_table_lists_the_statuses_of_the_runtime():
    pytest.importorskip("torch")
    trace, checkpoint = import_module("megarun.trace.command"), import_module("megarun.cli.checkpoint")
    assert {("megarun trace", trace.PAST_TOLERANCE), ("megarun checkpoint verify", checkpoint.DAMAGED)} <= set(rows())
