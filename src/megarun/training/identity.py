"""The identity of a job, fixed at its start: plans, options and token files, in `job.json` of `--out`; needs no torch.

torchrun restarts the processes of a job with the command line that it began with, and a file that it names may have changed meanwhile. So a
restart takes plans and options from `job.json` and reports differences from the current files. A new start of the command reads the current
files, since a folder may be resumed under another plan.
"""

import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Location, MegaplanError, Severity
from megaplan.terminal.output import report
from megarun.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, finished
from megarun.data.identity import DataFile, DataFiles, data_text, same_data
from megarun.data.mix import TokenMix
from megarun.data.token_file import TokenFile, tokenizer_path
from megarun.errors import refusal
from megarun.files import read_bounded, write_whole
from megarun.job.run import Run
from megarun.launch.process import ProcessIdentity
from megarun.remote import AnyPath
from megarun.training.folder import JOB, MAX_JOB_BYTES, PLAN

MAX_TOKENIZER_BYTES = 1 << 26

FORMAT = "megarun.job/1"
RUN_ID, RESTARTS, LOCAL_RANK = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "LOCAL_RANK"
NO_RUN_ID = "none"
"""torchrun's value if `--rdzv-id` was not given: it does not identify the job."""
Stamp = tuple[int, int, int]
"""Size in bytes, time of the last change in ns, and number of a file."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """The torchrun that started this process.

    Attributes:
        run_id: `--rdzv-id`, or one that torchrun has drawn; empty without torchrun.
        agent: Process of that torchrun on this machine.
    """

    run_id: str
    agent: ProcessIdentity

    @classmethod
    def own(cls) -> "Launcher":
        """The launcher of this process."""
        return cls(os.environ.get(RUN_ID, ""), ProcessIdentity.of(os.getppid()))

    def restarts(self, began: "Launcher") -> bool:
        """True if this start is a restart of the job that the other start began."""
        if not self.run_id or self.run_id != began.run_id:
            return False
        return self.agent == began.agent or (self.run_id != NO_RUN_ID and os.environ.get(RESTARTS, "0").strip("0") != "")


@dataclass(frozen=True, slots=True)
class Beginning:
    """The inputs that a job began with.

    Attributes:
        token: Token of its lock.
        launcher: The torchrun that started it.
        plans: Text of each plan that it may train, by the name that the command line has for it; the first is PLAN.
        options: Options by their command-line names.
        data: Token files.
        eval_data: Held-out token files.
        stamps: Size, time and number of each token file.
        before: Checkpoints that were there, by folder and sum of the manifest.
    """

    token: str
    launcher: Launcher
    plans: dict[str, str]
    options: dict[str, Any]
    data: DataFiles
    eval_data: DataFiles
    stamps: tuple[Stamp, ...]
    before: tuple[str, ...] = ()

    def text(self) -> str:
        """The text of `job.json`."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def parse(cls, text: str) -> "Beginning":
        """The content of `job.json`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, RecursionError: It is not valid.
        """
        found = json.loads(text)
        launcher = Launcher(str(found["launcher"]["run_id"]), ProcessIdentity.parse(found["launcher"]["agent"]))
        plans = {str(name): str(plan) for name, plan in found["plans"].items()}
        data, held_out = (tuple(DataFile(**file) for file in found[key]) for key in ("data", "eval_data"))
        stamps, before = tuple(map(tuple, found["stamps"])), tuple(map(str, found["before"]))
        return cls(str(found["token"]), launcher, plans, dict(found["options"]), data, held_out, stamps, before)


def restarted_from(out: Path) -> Beginning | None:
    """The inputs that the job began with, if this process is a restart by the torchrun that began it; else None.

    Args:
        out: Folder of the run.
    """
    own = Launcher.own()
    if not own.run_id:
        return None
    for name in (_of_host(), JOB):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            found = Beginning.parse(read_bounded(out / name, MAX_JOB_BYTES))
            if own.restarts(found.launcher):
                return found
    return None


def beginning_of(run: Run, token: str) -> Beginning:
    """The inputs that a job begins with.

    Args:
        run: The run.
        token: Token of its lock.
    """
    held_out = run.held_out.source if run.held_out is not None else None
    stamps = tuple(_stamp(file) for source in (run.source, held_out) if source is not None for file in _files(source))
    data = held_out.identity if held_out is not None else ()
    return Beginning(token, Launcher.own(), dict(run.plans), dict(run.options), run.source.identity, data, stamps, run.before)


def tokenizer_of(run: Run) -> str | None:
    """The tokenizer next to the first token file, whose digest that file has; None if it is another job's, or cannot be read."""
    file = _files(run.source)[0]
    try:
        text = read_bounded(tokenizer_path(file.path), MAX_TOKENIZER_BYTES)
    except (OSError, ValueError):
        return None
    return text if hashlib.sha256(text.encode()).hexdigest() == file.header.tokenizer_sha256 else None


def checkpoints_of(root: AnyPath) -> tuple[str, ...]:
    """The finished checkpoints of a run, by folder and sum of the manifest; empty if no torchrun could restart the job."""
    if not Launcher.own().run_id:
        return ()
    found = []
    for each in finished(root):
        with suppress(OSError, ValueError):
            text = read_bounded(each.path / MANIFEST, MAX_MANIFEST_BYTES)
            found.append(f"{each.path.name} {hashlib.sha256(text.encode()).hexdigest()}")
    return tuple(found)


def keep_on_node(run: Run) -> None:
    """Keep the beginning for the restarts of this node, whose `--out` may be another folder than rank 0's."""
    if os.environ.get(LOCAL_RANK) == "0":
        beginning = beginning_of(run, "")
        with suppress(OSError, MegaplanError):
            run.out.mkdir(parents=True, exist_ok=True)
            write_whole(run.out / _of_host(), beginning.text(), str(os.getpid()))


def report_plans(began: Beginning, now: Mapping[str, str | None], out: Path) -> None:
    """Report on rank 0 the plan files that have changed since the job began.

    Args:
        began: Inputs that the job began with.
        now: Current texts of the files; None for one that cannot be read.
        out: Folder of the run.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for name, text in began.plans.items():
        if now.get(name) != text:
            what = "has changed" if now.get(name) is not None else "cannot be read any more"
            detail = f"{name} {what} since the job began; the job continues with its first plan, {out / PLAN}"
            hints = (f"megaplan diff {out / PLAN} {name}",)
            report([diagnostic("MP674", detail, Location(file=name), hints, Severity.WARNING)])


def report_options(began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Report on rank 0 the options that have changed since the job began."""
    lines = [f"{name} = {now.get(name)}, the job began with {value}" for name, value in began.items() if now.get(name) != value]
    if lines and os.environ.get("RANK", "0") == "0":
        report([diagnostic("MP674", "\n".join([*lines, "the job continues with its first ones"]), severity=Severity.WARNING)])


def require_data(run: Run, began: Beginning) -> None:
    """Refuse a restart whose token files have changed since the job began.

    Headers are compared. A file that was written again meanwhile is read entirely and its digest compared with its header's.

    Raises:
        MegaplanError: MP674; MP614 if a file does not match its header.
    """
    held_out = run.held_out.source if run.held_out is not None else None
    for name, source, before in (("--data", run.source, began.data), ("--eval-data", held_out, began.eval_data)):
        now = source.identity if source is not None else ()
        if not same_data(before, now):
            raise refusal("MP674", f"{name} is {data_text(now)}\nthe job began with {data_text(before)}", name)
    files = [file for source in (run.source, held_out) if source is not None for file in _files(source)]
    for file, stamp in zip(files, began.stamps, strict=False):
        if _stamp(file) != stamp:
            file.verify()


def _files(source: TokenFile | TokenMix) -> Sequence[TokenFile]:
    return source.files if isinstance(source, TokenMix) else (source,)


def _stamp(file: TokenFile) -> Stamp:
    return file.stamp


def _of_host() -> str:
    return f"job.{socket.gethostname()}.json"
