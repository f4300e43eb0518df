"""Start a command, wait until its run has made some steps, and kill the command's processes with SIGKILL, all at once.

python scripts/demo_kill.py RUN STEP COMMAND…        exits 1 if the command ends by itself before STEP
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_SECONDS = 0.02


def steps_done(run: Path) -> int:
    """Whole lines of steps in a run's metrics.jsonl."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"step_seconds"') if path.exists() else 0


def descendants(process: int) -> list[int]:
    """A process and all its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # exited meanwhile
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found = [process]
    for each in found:
        found += children.get(each, [])
    return found


def main(run: Path, step: int, command: list[str]) -> int:
    """Run, wait, kill."""
    with subprocess.Popen(command) as started:
        while steps_done(run) < step:
            if started.poll() is not None:
                print(f"the run ended with status {started.returncode} before step {step}", file=sys.stderr)
                return 1
            time.sleep(POLL_SECONDS)
        killed = descendants(started.pid)
        for process in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    print(f"kill -9 of {len(killed)} processes, torchrun and its ranks, after step {steps_done(run)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
