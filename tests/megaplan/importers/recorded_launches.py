"""The launch scripts of these tests, recorded once a process each, and as plain scripts."""

import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megaplan.errors import Diagnostic, MegaplanError, Severity
from megaplan.importers.megatron.recorded import read_recording
from megaplan.importers.megatron.recording.confine import missing
from megaplan.importers.megatron.recording.record import Recording, record
from megaplan.importers.megatron.spec import import_megatron

SCRIPTS = Path(__file__).parent / "launches"
CONFINED = not missing()
PLAIN = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --bf16 --mock-data"
TRAIN = f"pretrain_gpt.py {PLAIN} --micro-batch-size"
RUN = f"torchrun --nproc_per_node 8 {TRAIN}"
Record = Callable[..., Recording]


def batch(recording: Recording, number: int | None = None) -> object:
    """The micro-batch size of a recorded launch."""
    return read_recording(recording, "launch.sh", number).values["micro_batch_size"]


@cache
def recorded(name: str, argv: tuple[str, ...] = (), environment: tuple[tuple[str, str], ...] = ()) -> Recording:
    """Recording of what a script starts in an empty folder that has a file of the program's name."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        shutil.copy(SCRIPTS / f"{name}.sh", folder)
        Path("pretrain_gpt.py").touch()
        return record(["bash", f"{name}.sh", *argv], dict(environment), confined=CONFINED)


def plain_script(name: str) -> str:
    """The launch of a script as one command, an argument a line."""
    given = read_recording(recorded(name), f"{name}.sh")
    launcher = " ".join(f"--{key} {given.values[key]}" for key in ("nnodes", "nproc_per_node") if key in given.values)
    words = [
        f"  --{key.replace('_', '-')}" + ("" if value is True else "".join(f" {shlex.quote(str(each))}" for each in _list(value)))
        for key, value in given.values.items()
        if key not in ("nnodes", "nproc_per_node")
    ]
    return " \\\n".join([f"torchrun {launcher} pretrain_gpt.py", *words]) + "\n"


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


BARE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --bf16 "
"""Arguments of a small model, without data."""


def notes(text: str, name: str, **more: Any) -> list[str]:
    """Details of the assumptions of an import."""
    return [found.detail for found in import_megatron(text, name, **more).loaded.diagnostics if found.code == "MP919"]


def errors(text: str, name: str = "launch.sh", **more: Any) -> Sequence[Diagnostic]:
    """Errors of a launch that is refused."""
    with pytest.raises(MegaplanError) as caught:
        import_megatron(text, name, **more)
    return [found for found in caught.value.diagnostics if found.severity is Severity.ERROR]
