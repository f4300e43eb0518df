"""Readings that a network file system interrupts."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megarun import files
from megarun.files import PAUSES_SECONDS, again, read_bounded

pytestmark = pytest.mark.runtime


def failing(number: int, times: int) -> tuple[Callable[[], str], list[int]]:
    """A reading that fails so many times, and the list of its tries."""
    tries: list[int] = []

    def read() -> str:
        tries.append(number)
        if len(tries) <= times:
            raise OSError(number, os.strerror(number))
        return "read"

    return read, tries


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were made."""
    made: list[float] = []
    monkeypatch.setattr(files.time, "sleep", made.append)
    return made


@pytest.mark.parametrize("number", sorted(files.PASSING))
def test_an_error_that_may_pass_is_met_with_another_try(number: int, no_pauses: list[float]) -> None:
    read, tries = failing(number, len(PAUSES_SECONDS))
    assert again(read) == "read"
    assert len(tries) == len(PAUSES_SECONDS) + 1
    assert tuple(no_pauses) == PAUSES_SECONDS


def test_an_error_that_stays_is_raised(no_pauses: list[float]) -> None:
    read, tries = failing(errno.ESTALE, 99)
    with pytest.raises(OSError, match="Stale"):
        again(read)
    assert len(tries) == len(PAUSES_SECONDS) + 1
    assert len(no_pauses) == len(PAUSES_SECONDS)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.EMFILE])
def test_an_error_that_does_not_pass_is_raised_at_once(number: int, no_pauses: list[float]) -> None:
    read, tries = failing(number, 1)
    with pytest.raises(OSError):  # noqa: PT011  (its number is the parameter)
        again(read)
    assert len(tries) == 1
    assert not no_pauses


def test_a_file_whose_first_opening_fails_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, failed = tmp_path / "a", os.open, []
    path.write_text("text")

    def opened(name: object, *arguments: object) -> int:
        if name == path and not failed:
            failed.append(name)
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", opened)
    assert read_bounded(path, 10) == "text"
    assert failed
