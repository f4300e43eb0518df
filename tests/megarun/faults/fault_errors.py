"""Faults of a file system: calls that fail once, as on a network file system whose server changes, or each time."""

import builtins
import contextlib
import errno
import fnmatch
import io
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fault_bench import ERROR, STEPS, Bench, Case, Outcome, first_line, losses, newest_step
from fault_outputs import replaced

SAVED, BEFORE = 4, 6
"""Step whose save meets the fault; steps of a run that a reading continues."""
ONCE, ALWAYS = "once", "each time"
PARTIAL, OLD, NEWEST = f"*/.step-{SAVED:08d}.partial", "*/step-00000002", f"*/step-{BEFORE:08d}"
CALLS: dict[str, tuple[tuple[Any, str], ...]] = {
    "open": ((io, "open"), (builtins, "open"), (os, "open")),
    "fsync": ((os, "fsync"),),
    "rename": ((os, "rename"),),
    "mkdir": ((os, "mkdir"),),
    "unlink": ((os, "unlink"),),
}
SAVES = (
    ("fsync", f"{PARTIAL}/__0_0.distcp", ("EIO", "EDQUOT")),
    ("rename", PARTIAL, ("EIO", "ESTALE", "EACCES")),
    ("mkdir", PARTIAL, ("EACCES", "EROFS")),
    ("open", f"{PARTIAL}/manifest.json", ("EMFILE", "ENOSPC")),
    ("open", f"{PARTIAL}/__0_0.distcp", ("ENFILE", "EIO")),
)
REMOVALS = (("rename", OLD, "EACCES", ALWAYS), ("rename", OLD, "EBUSY", ONCE), ("unlink", "*/.step-00000002.removed", "EIO", ALWAYS))
READ = ("manifest.json", "index.json", "__0_0.distcp")


@contextlib.contextmanager
def failing(call: str, pattern: str, code: str, times: str) -> Iterator[list[str]]:
    """Let a call of the operating system fail for paths of a pattern; yields the paths for which it has failed."""
    number, failed = getattr(errno, code), []

    def called(path: Any, *arguments: Any, real: Callable[..., Any], **named: Any) -> Any:
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(path)
        if fnmatch.fnmatch(name, pattern) and (times == ALWAYS or not failed):
            failed.append(name)
            raise OSError(number, os.strerror(number), name)
        return real(path, *arguments, **named)

    with contextlib.ExitStack() as stack:
        for owner, name in CALLS[call]:
            stack.enter_context(replaced(owner, name, partial(called, real=getattr(owner, name))))
        yield failed


def _named(call: str, pattern: str, code: str, times: str) -> str:
    return f"{call} of {pattern.removeprefix('*/').removesuffix('*')} fails with {code} {times}"


def in_a_save(bench: Bench, call: str, pattern: str, code: str) -> Outcome:
    """The save is not complete, the one before stays, and the run ends with the reason."""
    happened, out = _named(call, pattern, code, ALWAYS), bench.folder / f"save-{call}-{Path(pattern).name}-{code}"
    with failing(call, pattern, code, ALWAYS) as failed:
        status, said, seconds = bench.here(bench.words(bench.one, out))
    assert failed
    assert status == ERROR, said
    assert newest_step(out) == SAVED - 2
    assert "error[MP645]: the checkpoint could not be saved" in said
    _, lost = bench.resume(out, SAVED - 2)
    return Outcome(happened, f"error[MP645]: …: {os.strerror(getattr(errno, code))}", lost, seconds, status)


def in_a_removal(bench: Bench, call: str, pattern: str, code: str, times: str) -> Outcome:
    """The old checkpoint stays for the next removal, and the run continues."""
    out = bench.folder / f"removal-{call}-{code}"
    with failing(call, pattern, code, times) as failed:
        status, said, seconds = bench.here(bench.words(bench.one, out))
    assert failed
    assert status == 0, said
    assert losses(out) == bench.expected
    assert newest_step(out) == STEPS
    return Outcome(_named(call, pattern, code, times), first_line(said, "warning[MP657]"), 0, seconds, status)


def in_a_resume(bench: Bench, name: str, code: str, times: str) -> Outcome:
    """An error that passes costs nothing; with one that stays the checkpoint before is used."""
    out = bench.whole(f"resume-{name}-{code}-{times.split(maxsplit=1)[0]}", BEFORE)
    with failing("open", f"{NEWEST}/{name}", code, times) as failed:
        status, said, seconds = bench.here(bench.words(bench.one, out))
    assert failed
    assert status == 0, said
    assert losses(out) == bench.expected
    wanted = BEFORE if times == ONCE else BEFORE - 2
    assert f"{wanted} steps done" in said, said
    read = "" if times == ONCE else f"{first_line(said, 'warning[MP646]')}; "
    happened = _named("open", f"{NEWEST}/{name}", code, times)
    return Outcome(happened, read + first_line(said, "resumed from"), BEFORE - wanted, seconds, status)


def of_tokens(bench: Bench, code: str, times: str) -> Outcome:
    """An error that passes costs nothing; one that stays is refused before anything is trained."""
    out = bench.folder / f"tokens-{code}-{times.split(maxsplit=1)[0]}"
    with failing("open", "*.tokens", code, times) as failed:
        status, said, seconds = bench.here(bench.words(bench.one, out))
    assert failed
    happened = f"open of the token file fails with {code} {times}"
    if times == ONCE:
        assert losses(out) == bench.expected
        return Outcome(happened, first_line(said, f"step {STEPS}/{STEPS}").partition("  ")[0], 0, seconds, status)
    assert status == ERROR, said
    assert not losses(out)
    return Outcome(happened, first_line(said, "error[MP611]"), None, seconds, status)


ERRORS: dict[str, Case] = {
    **{
        _named(call, pattern, code, ALWAYS): (lambda bench, a=call, b=pattern, c=code: in_a_save(bench, a, b, c))
        for call, pattern, codes in SAVES
        for code in codes
    },
    **{_named(*each): (lambda bench, each=each: in_a_removal(bench, *each)) for each in REMOVALS},
    **{
        _named("open", f"{NEWEST}/{name}", code, times): (lambda bench, a=name, b=code, c=times: in_a_resume(bench, a, b, c))
        for name in READ
        for code, times in (("EIO", ONCE), ("ESTALE", ONCE), ("EIO", ALWAYS), ("EACCES", ALWAYS))
    },
    **{
        f"tokens: {code} {times}": (lambda bench, a=code, b=times: of_tokens(bench, a, b))
        for code, times in (("EIO", ONCE), ("ESTALE", ONCE), ("EIO", ALWAYS))
    },
}
