"""A signal ends the process from its first instructions on, also one that its shell ignores."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarun import __main__ as entry

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.runtime


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_ends_the_process(number: signal.Signals, tmp_path: Path) -> None:
    """SIGINT is ignored by what a script starts with `&`."""
    (tmp_path / "typer.py").write_text("import pathlib, time\npathlib.Path('here').touch()\ntime.sleep(30)\n")  # an import that takes long
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT / "kernels")])
    process = subprocess.Popen(
        [sys.executable, "-m", "megarun", "doctor"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509
    )
    end = time.monotonic() + 60
    while not (tmp_path / "here").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(30) == 128 + number


def test_every_signal_that_training_takes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that `nohup` ignores stays ignored."""
    taken: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda number, _: taken.append(number))
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    monkeypatch.setattr("megarun.cli.main.run", lambda: 0)
    monkeypatch.setattr("faulthandler.enable", lambda: None)
    with pytest.raises(SystemExit):
        entry.main()
    assert taken == [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
