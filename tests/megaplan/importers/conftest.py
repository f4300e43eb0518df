"""Makes `hf_samples` importable, whichever way the tests are collected, and records scripts."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megaplan.importers.megatron.recording import record as recorder
from megaplan.importers.megatron.recording.confine import missing
from megaplan.importers.megatron.recording.record import Recording

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recording]:
    """Writes a script and records it in its own folder; recordings are made in the folder above."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recorder.tempfile, "tempdir", str(tmp_path.parent))

    def take(text: str, *argv: str, command: tuple[str, ...] = ("bash",), name: str = "launch.sh", **more: object) -> Recording:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        environment = {key: str(value) for key, value in more.items() if key != "seconds"}
        return recorder.record([*command, name, *argv], environment, confined=not missing(), seconds=int(str(more.get("seconds", 60))))

    return take
