"""Outputs that cannot be written: lost messages never end a command, a lost answer is a separate error."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaplan.terminal import streams
from megaplan.terminal.streams import UnfailingStream, unfailing_stderr

ROOT = Path(__file__).parents[3]
SPEC = ROOT / "plans" / "tiny-hybrid.yaml"
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")


class Broken(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_what_a_stream_does_not_take_is_kept_and_counted(tmp_path: Path) -> None:
    stream = UnfailingStream(Broken(), "stderr")
    stream.write("one\n")
    stream.keep_in(tmp_path / "messages.txt")
    stream.write("two\nthree → \n")
    assert (tmp_path / "messages.txt").read_text() == "two\nthree → \n"
    where = tmp_path / "messages.txt"
    assert stream.account == f"stderr: 3 lines could not be written: Input/output error; 2 of them are in {where}"
    assert stream.account == ""


def test_the_file_of_lost_messages_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "messages.txt").symlink_to(tmp_path / "precious")
    stream = UnfailingStream(None, "stderr")
    stream.keep_in(tmp_path / "messages.txt")
    stream.write("one\n")
    assert (tmp_path / "precious").read_text() == "precious"
    assert stream.account == "stderr: 1 line could not be written: it is closed"


def test_a_reader_that_stops_reading_blocks_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that is full, as behind a paused `less`; when it is read again the stream continues."""
    monkeypatch.setattr(streams, "PATIENCE_SECONDS", 0.01)
    read, written = os.pipe()
    stream = UnfailingStream(os.fdopen(written, "w"), "stderr")
    for _ in range(40):
        stream.write("x" * 4095 + "\n")
    assert 0 < stream.num_lost < 40
    assert "its reader does not read" in stream.account
    assert os.read(read, 1 << 20)
    before = stream.num_lost
    stream.write("again\n")
    assert stream.num_lost == before
    assert os.read(read, 1 << 20).endswith(b"again\n")
    os.close(read)
    stream.write("unread\n")
    assert "Broken pipe" in stream.account


def test_characters_that_a_stream_lacks_are_replaced() -> None:
    found = io.BytesIO()
    text = io.TextIOWrapper(found, "ascii")
    UnfailingStream(text, "stderr").write("1 → 2\n")
    assert found.getvalue() == b"1 -> 2\n"


def test_stderr_is_replaced_once_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = io.StringIO()
    monkeypatch.setattr(sys, "stderr", before)
    with unfailing_stderr() as outer, unfailing_stderr() as inner:
        assert inner is outer
        sys.stderr.write("one\n")
    assert sys.stderr is before
    assert before.getvalue() == "one\n"


def run(words: str, **places: Any) -> subprocess.CompletedProcess[str]:
    """A command of a shell, which can close descriptors."""
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "kernels")]), **places}
    command = f"{sys.executable} -m megaplan {words}"
    return subprocess.run(["sh", "-c", command], env=os.environ | path, capture_output=True, text=True, check=False, timeout=60)


@needs_full
@pytest.mark.parametrize(
    ("words", "reason"),
    [(f"estimate {SPEC} --json > /dev/full", "No space left on device"), (f"estimate {SPEC} >&-", "it is closed")],
    ids=["full", "closed"],
)
def test_an_answer_that_cannot_be_written_is_an_error(words: str, reason: str) -> None:
    """Not exit status 1, which is an answer: it does not fit."""
    done = run(words)
    assert done.returncode == 2
    assert "error[MP482]" in done.stderr
    assert f"stdout: {reason}" in done.stderr
    assert "Traceback" not in done.stderr


@needs_full
def test_an_error_that_cannot_be_written_keeps_its_status() -> None:
    assert run("estimate /nonexistent 2> /dev/full").returncode == 2
    done = run(f"estimate {SPEC} 2>&-")
    assert done.returncode == 0
    assert "headroom" in done.stdout
