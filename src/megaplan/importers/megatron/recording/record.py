"""`record`: runs a launch script where it can change nothing, and returns the launches that stubs wrote down."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from megaplan.importers.megatron.recording import confine
from megaplan.importers.megatron.recording.mirror import copy_up
from megaplan.importers.megatron.recording.names import FILE_TOOLS, STUBS, TOOLS
from megaplan.importers.megatron.recording.rows import Recording, RecordLine

SECONDS = 60
MAX_WRITTEN_BYTES, MAX_PROCESSES, MAX_RECORD_BYTES, MAX_SAID_BYTES = 2**28, 400, 2**22, 2**14
_SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY$|^KEY_|APIKEY|API_KEY|ACCESS_KEY|PROXY|COOKIE|SESSION|^(AWS|AZURE|GOOGLE|GCP|GCLOUD|CLOUDSDK|OCI|S3|WANDB"
    r"|HF|HUGGING_?FACE|GH|GITHUB|GITLAB|CI_JOB|DOCKER|KUBE\w*|SSH|GPG|VAULT|PIP|UV|NETRC|DBUS|XDG)_",
    re.IGNORECASE,
)
_OF_SHELLS = re.compile(r"(BASH.*|ENV|LD_.*|DYLD_.*|PYTHON.*|SHELLOPTS|PS4|PROMPT_COMMAND|IFS|CDPATH|GLOBIGNORE|MEGAPLAN_.*|OLDPWD|PWD|_)")


def kept_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that a script gets: none that names a secret, a proxy or an account, and none that changes shells or loaders."""
    return {
        key: value
        for key, value in environment.items()
        if not _SECRET.search(key) and not _OF_SHELLS.fullmatch(key) and not re.search(r"://[^/\s]*@", value)
    }


def work_folders(command: Sequence[str]) -> list[str]:
    """The current folder, and that of each file that the command names."""
    files = (os.path.abspath(word) for word in command if os.path.isfile(word))
    return list(dict.fromkeys([str(Path.cwd()), *map(os.path.dirname, files)]))


def announcement(command: Sequence[str], withheld: Sequence[str], *, confined: bool) -> list[str]:
    """Description of the actions of `record`, printed before it runs."""
    guard = "the kernel refuses it writes outside, other programs, sockets and signals"
    return [
        f"recording: {shlex.join(command)}",
        f"  in a temporary folder with copies of {', '.join(work_folders(command))}, deleted at the end",
        f"  bash and {len(TOOLS | FILE_TOOLS)} tools of text and files run; every other program is written down and does nothing",
        f"  {guard if confined else 'not confined: the script itself can write wherever you can'}",
        f"  variables withheld: {', '.join(withheld) or 'none'}",
        f"  limits: {SECONDS} s, {MAX_WRITTEN_BYTES >> 20} MiB written, {MAX_PROCESSES} processes",
    ]


def record(
    command: Sequence[str], environment: Mapping[str, str], *, gpus_per_node: int = 8, confined: bool = True, seconds: int = SECONDS
) -> Recording:
    """Run a command with stubs in place of all programs except the harmless ones.

    Args:
        command: Words, such as `bash launch.sh ARGS`.
        environment: Variables of the command in addition to those of the recording.
        gpus_per_node: The answer of `nvidia-smi`.
        confined: True if the kernel refuses the calls that `confine` lists; otherwise only stubs protect the system.
        seconds: Limit of wall-clock time, and of processor time.

    Raises:
        OSError: There is no bash, or the temporary folder cannot be made.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise FileNotFoundError("bash is not installed")
    here, home = Path.cwd(), Path.home()
    folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="megaplan-record-")))
    try:
        tree = folder / "tree"
        for path in (*work_folders(command), str(home)):
            copy_up(f"{tree}{path}/entry", str(tree), str(home), copies=path != str(home))
        executable = _programs(folder, bash)
        mirrored = [f"{tree}{word}" if word.startswith("/") and os.path.isfile(word) else word for word in command]
        variables = {
            **environment,
            "PATH": str(folder / "bin"),
            "HOME": f"{tree}{home}",
            "TMPDIR": str(folder / "tmp"),
            "BASH_ENV": str(Path(__file__).with_name("session.bash")),
            "MEGAPLAN_FOLDER": str(folder),
            "MEGAPLAN_BIN": str(folder / "bin"),
            "MEGAPLAN_BASH": bash,
            "MEGAPLAN_GPUS": str(gpus_per_node),
            "MEGAPLAN_CONFINED": str(int(confined)),
        }

        def prepare() -> None:
            confine.limit(seconds)
            if confined:
                confine.confine([str(folder), "/dev/null", "/dev/zero", "/dev/tty"], executable)

        with (folder / "errors").open("wb") as errors:
            process = _started([str(folder / "bin" / "megaplan-stub"), *mirrored], f"{tree}{here}", variables, prepare, errors)
        try:
            ended = _watched(process, folder, seconds)
        finally:
            _end_all(process, folder)
        said = _unmirrored((folder / "errors").read_bytes()[-MAX_SAID_BYTES:].decode(errors="replace"), folder)
        return Recording(tuple(_rows(folder)), None if ended else process.returncode, ended, said)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _started(
    command: list[str], folder: str, variables: dict[str, str], prepare: Callable[[], None], errors: BinaryIO
) -> subprocess.Popen[bytes]:
    """Start the script in its own session, after `prepare`.

    Raises:
        OSError: The limits cannot be set.
    """
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 (only this process can limit the child, and it is started from one thread)
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    except subprocess.SubprocessError:
        raise OSError("the kernel refuses the limits of the script") from None


def _programs(folder: Path, bash: str) -> list[str]:
    """Fill the folders of programs; returns the files that may be executed."""
    for name in ("bin", "tools", "records", "tmp"):
        (folder / name).mkdir(parents=True)
    root, module = str(Path(__file__).parents[4]), "megaplan.importers.megatron.recording.stub"
    code = f"import sys; sys.path.insert(0, {root!r}); import {module} as own; sys.exit(own.main(sys.argv[1], sys.argv[2:]))"
    program = shlex.join([sys.executable, "-I", "-S", "-c", code])
    body = f'#!/bin/sh\nexec {program} "$0" "$@"\n'
    stub = folder / "stub"
    stub.write_text(body, encoding="utf-8")
    stub.chmod(0o700)
    for name in (*STUBS, "megaplan-stub", "megaplan-redirects", "megaplan-target", "megaplan-folder"):
        (folder / "bin" / name).symlink_to(stub)
    found = {"bash": bash, **{name: path for name in (*TOOLS, *FILE_TOOLS) if (path := shutil.which(name)) is not None}}
    for name, path in found.items():
        (folder / ("tools" if name in FILE_TOOLS else "bin") / name).symlink_to(os.path.realpath(path))
    loaders = [str(path) for pattern in ("lib*/ld-*.so*", "lib/*/ld-*.so*", "lib*/ld-*.so*") for path in Path("/").glob(pattern)]
    return [*map(os.path.realpath, [*found.values(), sys.executable, "/bin/sh", *loaders]), str(stub)]


def _watched(process: subprocess.Popen[bytes], folder: Path, seconds: int) -> str:
    """Reason to terminate the script; empty if it ended by itself."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            return ""
        if len(_processes(process.pid, folder)) > MAX_PROCESSES:
            return f"it had more than {MAX_PROCESSES} processes"
        if _written(folder) > MAX_WRITTEN_BYTES:
            return f"it wrote more than {MAX_WRITTEN_BYTES >> 20} MiB"
    return f"it ran for {seconds} seconds"


def _written(folder: Path) -> int:
    """Bytes of all files of a folder."""
    sizes = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                sizes += os.lstat(os.path.join(path, name)).st_blocks * 512
    return sizes


def _processes(session: int, folder: Path) -> list[int]:
    """Processes of the script: those of its session, and those that left it and still have its variables."""
    found = []
    mark = f"MEGAPLAN_FOLDER={folder}".encode()
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError, IndexError, ValueError):
                stat = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
                if stat[0] != b"Z" and (int(stat[3]) == session or mark in Path("/proc", entry, "environ").read_bytes()):
                    found.append(int(entry))
    return found


def _end_all(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Terminate the script's process group, then the processes that have left it."""
    for _ in range(50):
        if process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        left = _processes(process.pid, folder)
        for each in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.02)
    process.wait()


def _rows(folder: Path) -> list[RecordLine]:
    rows, read = [], 0
    for path in sorted((folder / "records").glob("*.json")):
        data = path.read_bytes()
        read += len(data)
        if read > MAX_RECORD_BYTES:
            break
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            rows.append(_row(json.loads(data), folder))
    return rows


def _row(plain: Mapping[str, Any], folder: Path) -> RecordLine:
    file, _, line = str(plain["at"]).rpartition(":")
    words = tuple(_unmirrored(str(word), folder) for word in plain["words"])
    environment = {str(key): _unmirrored(str(value), folder) for key, value in plain["environment"].items()}
    said = _unmirrored(str(plain["said"]), folder)
    return RecordLine(str(plain["kind"]), words, said, _unmirrored(file, folder), int(line) if line.isdigit() else None, environment)


def _unmirrored(text: str, folder: Path) -> str:
    """A text with paths of the mirror replaced by the original ones."""
    return text.replace(f"{folder}/tree", "").replace(f"{folder}/bin/", "")
