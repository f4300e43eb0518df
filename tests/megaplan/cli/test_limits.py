"""Limits of the process are separate errors, with the limit and its remedy; absurd sizes end after seconds."""

import errno
import os
import signal
from pathlib import Path

import pytest

from megaplan.cli import main
from megaplan.cli.main import run
from megaplan.diagnostics import refuse
from megaplan.terminal.limits import limit_reached
from megaplan.terminal.run import DEFAULT_SECONDS, VARIABLE, ProcessorTimeError, limited_processor_time, processor_seconds

SPEC = str(Path(__file__).parents[3] / "plans" / "tiny-hybrid.yaml")


@pytest.mark.parametrize(
    ("error", "detail", "hint"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n = ", "ulimit -n 65536"),
        (OSError(errno.ENFILE, "x"), "open files of the machine", "fs.file-max"),
        (RuntimeError("can't start new thread"), "ulimit -u = ", "ulimit -u"),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "threads and processes", "ulimit -u"),
        (MemoryError(), "ulimit -v = ", "free -h"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "ulimit -v = ", "free -h"),
        (OSError(errno.EFBIG, "File too large", "out/a"), "ulimit -f = ", "ulimit -f unlimited"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk quota", "quota -s"),
        (OSError(errno.ENOSPC, "No space left on device"), "/dev/shm", "--shm-size"),
    ],
)
def test_each_limit_has_its_value_and_its_remedy(error: Exception, detail: str, hint: str) -> None:
    found = limit_reached(error)
    assert found is not None
    assert found.code == "MP493"
    assert detail in found.detail
    assert hint in found.hints[0]


def test_the_limit_behind_an_error_is_found() -> None:
    """A refusal may hide its cause, and another rank may have failed."""
    for hiding in (refuse("MP101", "x"), ValueError("x")):
        hiding.__context__ = OSError(errno.EMFILE, "Too many open files")  # as `raise … from None` leaves it
        assert limit_reached(hiding) is not None
    of_ranks = RuntimeError("failed")
    of_ranks.failures = {1: (OSError(errno.EDQUOT, "x"), None)}  # type: ignore[attr-defined]
    assert limit_reached(of_ranks) is not None
    assert limit_reached(ValueError("x")) is None
    assert limit_reached(FileNotFoundError(errno.ENOENT, "x")) is None


def test_a_command_says_that_memory_ran_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def spend(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(main, "_app", spend)
    assert run(["estimate", SPEC]) == 2
    said = capsys.readouterr().err
    assert "error[MP493]" in said
    assert "MP499" not in said


def test_processor_time_is_bounded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An exception that is lost on the way is raised again."""
    caught = 0
    monkeypatch.setenv(VARIABLE, "0.01")

    def spend(_: object) -> None:
        nonlocal caught
        while True:
            try:
                while True:
                    sum(range(1000))
            except ProcessorTimeError:
                caught += 1
                if caught > 1:
                    raise

    monkeypatch.setattr(main, "_app", spend)
    assert run(["show", SPEC]) == 2
    said = capsys.readouterr().err
    assert "error[MP494]" in said
    assert "0.01 s of processor time" in said
    assert f"{VARIABLE}=0.12" in said
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_the_limit_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, seconds in (
        ("", DEFAULT_SECONDS),
        ("3", 3.0),
        ("0", 0.0),
        ("-1", DEFAULT_SECONDS),
        ("nan", DEFAULT_SECONDS),
        ("x", DEFAULT_SECONDS),
    ):
        monkeypatch.setenv(VARIABLE, given)
        assert processor_seconds() == seconds
    with limited_processor_time(0):
        assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.parametrize("words", ["zbv --pp 65536 --microbatches 1", "interleaved_zero_bubble --pp 128 --vpp 16 --microbatches 128"])
def test_schedules_are_bounded_by_their_actions(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "--kind", *words.split()]) == 2
    assert "actions, above the limit of 120,000" in capsys.readouterr().err
    assert os.environ.get(VARIABLE) is None


@pytest.mark.parametrize("words", [["estimate", SPEC], ["search", SPEC], ["devices"], ["import", "megatron", "launch.sh"]])
def test_a_working_directory_that_is_gone(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(words) == 2
    assert "error[MP675]" in capsys.readouterr().err
