"""Reading text from a file or standard input: bounded, UTF-8, with one diagnostic for each kind of failure."""

import os
import re
import sys
from pathlib import Path
from shlex import quote
from typing import BinaryIO, TextIO

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError
from megaplan.spec.hub import CONFIG, cache_folder, cached_config, is_model_name

MAX_BYTES = 2**20
MOST_FOLDERS = 6
HUB = "https://huggingface.co/"
STDIN = "-"
STDIN_NAME = "<stdin>"
NO_CONTROL = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def display_name(path: str) -> str:
    """Name of the file in diagnostics."""
    return STDIN_NAME if path == STDIN else path


def folders_above(path: str) -> list[Path]:
    """The folders around a file in which files that belong to it are looked for, nearest first: at most `MOST_FOLDERS`."""
    return list(Path(path).resolve().parents)[:MOST_FOLDERS]


def file_of(path: str, name: str) -> str | None:
    """The file that a launch names: at its path, or at the longest suffix of that path below the launch's folder or a parent of it.

    None if absent.

    Args:
        path: Path of the file in the launch.
        name: Path of the launch, in whose folder the bare file name is searched.
    """
    parts, folders = Path(path).parts, folders_above(name)
    ends = [Path(*parts[start:]) for start in range(parts[0] == "/", len(parts))] if parts else []
    above = [folder / end for end in ends[:-1] for folder in folders]
    places = (Path(path), *above, *(folders[0] / end for end in ends[-1:] if folders))
    return next((str(place) for place in places if os.path.isfile(place)), None)


def model_file(path: str) -> str:
    """The `config.json` of a model's folder; any other path unchanged."""
    inside = os.path.join(path, CONFIG)
    return inside if path != STDIN and os.path.isdir(path) and os.path.isfile(inside) else path


def read_text(path: str, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file, or of standard input for `-`.

    Args:
        path: Path as the user gave it.
        max_bytes: Size limit, checked before decoding.

    Raises:
        MegaplanError: MP101 … MP107.
    """
    data = _read_bytes(path, max_bytes)
    name = display_name(path)
    if len(data) > max_bytes:
        raise _refusal("MP104", f"{name} holds {_size(path, max_bytes)} bytes, and at most {max_bytes:,} are read", name)
    if not data.strip():
        raise _refusal("MP105", f"{name} holds {len(data):,} bytes, none of them a key", name, "megaplan new nam56r-8xh200 > spec.yaml")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        hints = ("iconv -f utf-16 -t utf-8 IN > OUT",) if data.startswith(_UTF16_MARKS) else ()
        raise _refusal("MP106", f"{name} has a NUL byte at offset {data.index(0):,}", name, *hints, line=line)
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        detail = f"{name} has the byte 0x{data[error.start]:02x} at offset {error.start:,}"
        raise _refusal("MP107", detail, name, "iconv -f latin1 -t utf-8 IN > OUT", line=line) from None
    control = NO_CONTROL.search(text)
    if control:
        line = text.count("\n", 0, control.start()) + 1
        raise _refusal("MP106", f"{name} has the control character U+{ord(control.group()):04X}", name, line=line)
    return text


def _read_bytes(path: str, max_bytes: int) -> bytes:
    name = display_name(path)
    try:
        if path == STDIN:
            if sys.stdin is None:
                raise _refusal("MP103", "standard input is closed", name)
            return _of_stdin(sys.stdin, max_bytes)
        with Path(path).open("rb") as file:
            return _bounded(file, max_bytes)
    except FileNotFoundError:
        return _cached(path, max_bytes)
    except IsADirectoryError:
        inside = [str(found) for found in sorted(Path(path).glob("*.yaml"))[:3]]
        if not path:
            raise _refusal("MP101", "the path is empty", "''", "megaplan new list") from None
        raise _refusal("MP102", f"{name} is a directory", name, *inside or [f"ls {quote(path)}"]) from None
    except OSError as error:
        raise _refusal("MP103", f"{name}: {(error.strerror or type(error).__name__).lower()}", name, f"ls -l {quote(path)}") from None
    except ValueError:  # a NUL in the path
        raise _refusal("MP103", f"{name!r} is not a path", None) from None


def _cached(path: str, max_bytes: int) -> bytes:
    """The config of a model that has a name of the Hugging Face hub, from the local cache."""
    found = cached_config(path)
    if found is not None:
        with found.open("rb") as file:
            return _bounded(file, max_bytes)
    if is_model_name(path) and not os.path.isdir(Path(path).parent):
        detail = f"{path} is not a file, and the Hugging Face cache in {cache_folder()} has no {CONFIG} of a model of that name"
        raise _refusal("MP101", detail, path, f"megaplan estimate {path} --fetch", f"hf download {path} {CONFIG}")
    raise _refusal("MP101", f"{path} does not exist", path, *_near_names(path) or _nearest_folder(path))


_read_before: list[tuple[TextIO, bytes]] = []
"""Standard input, and its bytes: a command that reads the same source for several hosts or sizes reads them once."""


def _of_stdin(stdin: TextIO, max_bytes: int) -> bytes:
    before = next((data for source, data in _read_before if source is stdin), b"")
    data = before + stdin.buffer.read(max(0, max_bytes + 1 - len(before)))
    _read_before[:] = [(stdin, data)]
    return data


def _bounded(file: BinaryIO, max_bytes: int) -> bytes:
    return file.read(max_bytes + 1)


def _size(path: str, max_bytes: int) -> str:
    if path != STDIN and os.path.isfile(path):
        return f"{Path(path).stat().st_size:,}"
    return f"more than {max_bytes:,}"


def _near_names(path: str) -> list[str]:
    from difflib import get_close_matches  # noqa: PLC0415 (only where a file is missing)

    folder = Path(path).parent
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
    return [str(folder / name) for name in get_close_matches(Path(path).name, names, n=1)]


def _nearest_folder(path: str) -> list[str]:
    """The command that lists the nearest folder that exists; of an address of the hub, the command that fetches its model."""
    if (model := "/".join(path.removeprefix(HUB).split("/")[:2])) and path.startswith(HUB) and is_model_name(model):
        return [f"megaplan estimate {model} --fetch"]
    return [f"ls {quote(str(folder))}" for folder in Path(path).parents if os.path.isdir(folder)][:1]


def _refusal(code: str, detail: str, file: str | None, *hints: str, line: int | None = None) -> MegaplanError:
    return MegaplanError([diagnostic(code, detail, Location(file=file, line=line), hints)])
