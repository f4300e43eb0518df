r"""Everything that needs a GPU, in one command: checks, times, training and memory, each job in its own process.

python benchmarks/gpu/run.py [--seconds 600] [--out DIR] [--resume DIR] [--only checks,times,train,memory] [--match REGEX]
python benchmarks/gpu/run.py --only tune                      launch options of kernels: OUT/tuned/DEVICE.json, and the package's own file
python benchmarks/gpu/run.py --cpu --out DIR                 no GPU: every job's code at small sizes; what it writes measures nothing
python benchmarks/gpu/run.py --explain NAME                  one plan: blocks alive at its peak and the trace's storages

Jobs run in the order of `jobs.py`, cheap and important ones first, until the time is up. Each writes lines of JSON to DIR/results.jsonl as
soon as it knows them, and has a deadline; one that fails, hangs, crashes or writes nonsense is a line that says so, and the next one runs.
What found no time is listed as not run. `--resume DIR` runs jobs that DIR lacks: first never started ones, then failed ones. The result
goes to DIR unless `--out` names another folder, for a machine that hands back only what it wrote. `page.py DIR` turns it into tables.

torch and megarun are loaded once, without CUDA; every job is a fork of that process. Exits 1 if a job failed or was not run, 2 without a
GPU.
"""

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "kernels", "benchmarks")]
OUT = ROOT / "runs/gpu"
WIDTHS = {"alone": 1, "checks": 12, "memory": 2}
"""Jobs of a lane that run at once."""
DEVICE_GIB = 128.0
"""The part of an H200's 139.8 GiB that jobs which run together may hold."""
END_SECONDS = 3.0
"""Kept for the last lines."""
POLL_SECONDS = 0.02


class Run:
    """Starts jobs while there is time, and writes what they find."""

    def __init__(self, results: Any, logs: Path, seconds: float, cores: int) -> None:
        self._results, self._logs = results, logs
        self._stop = time.monotonic() + seconds
        self._widths = {lane: max(1, min(width, cores)) for lane, width in WIDTHS.items()}
        self._running: list[Any] = []
        self.statuses: dict[str, str] = {}

    def run(self, jobs: Sequence[Any]) -> None:
        """Run the jobs in order; a later job of the running lane goes first if an earlier one does not fit together with the others."""
        waiting = list(jobs)
        try:
            while waiting or self._running:
                started = self._start(waiting)
                self._collect()
                if not started:
                    time.sleep(POLL_SECONDS)
        finally:
            from gpu.worker import kill  # noqa: PLC0415

            for each in self._running:
                kill(each)

    def _start(self, waiting: list[Any]) -> bool:
        """Start the first job that may run now, or say that it will not be."""
        from gpu.results import NOT_RUN  # noqa: PLC0415
        from gpu.worker import start  # noqa: PLC0415

        left = self._stop - time.monotonic() - END_SECONDS
        for index, job in enumerate(waiting):
            if self._running and job.lane != self._running[0].job.lane:
                return False  # entries of another lane that come before it end first
            if left < job.least:
                self._say(job, {"status": NOT_RUN, "failure": f"{max(0.0, left):.0f} s were left of the {job.least:.0f} that it needs"})
                del waiting[index]
                return True
            held = sum(each.job.gib for each in self._running)
            if len(self._running) < self._widths[job.lane] and (not self._running or held + job.gib <= DEVICE_GIB):
                del waiting[index]
                self._results.add({"job": job.id, "kind": job.kind, "status": "started"})
                self._running.append(start(job, self._logs / f"{_file_name(job.id)}.log", min(job.seconds, left)))
                return True
            if len(self._running) >= self._widths[job.lane]:
                return False
        return False

    def _collect(self) -> None:
        from gpu.worker import has_ended, outcome, read_lines  # noqa: PLC0415

        for running in list(self._running):
            ended = has_ended(running)  # checked before the lines are read, so that no line is missed
            for line in read_lines(running):
                self._results.add({"job": running.job.id, "kind": running.job.kind, **line})
            if ended:
                os.close(running.pipe)
                self._running.remove(running)
                self._say(running.job, outcome(running))

    def _say(self, job: Any, end: dict[str, Any]) -> None:
        self.statuses[job.id] = end["status"]
        self._results.add({"job": job.id, "kind": job.kind, **end})
        took = f" in {end['seconds']:.1f} s" if "seconds" in end else ""
        print(f"{job.id}: {end['status']}{took}{': ' + end['failure'] if 'failure' in end else ''}", flush=True)


def chosen(jobs: Sequence[Any], only: Sequence[str], match: str, known: dict[str, str]) -> list[Any]:
    """The jobs of the kinds and names asked for that are not done; those never started before those that failed."""
    wanted = [job for job in jobs if (job.kind in only or job.kind == "facts") and re.search(match, job.id) and known.get(job.id) != "done"]
    tried = ("failed", "timeout", "killed", "garbage", "started")
    return [job for job in wanted if known.get(job.id) not in tried] + [job for job in wanted if known.get(job.id) in tried]


def header(given: argparse.Namespace) -> dict[str, Any]:
    """Header of the results: time, machine, selection and commit."""
    stamp, commit = ROOT / "COMMIT", ""
    if stamp.exists():  # a bundle, which may lie in a checkout of another commit
        commit = stamp.read_text().strip()
    else:
        with suppress(OSError):
            done = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
            commit = done.stdout.strip()
    return {
        "call": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or None,
        "python": platform.python_version(),
        "seconds": given.seconds,
        "only": given.only,
        "dry": given.cpu,
    }


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="all of it ends by then; 600")
    parser.add_argument("--out", type=Path, help=f"folder of the results; {OUT.relative_to(ROOT)}")
    parser.add_argument("--resume", type=Path, help="folder of an earlier call, whose finished jobs are not run again")
    parser.add_argument("--only", default="checks,times,train,memory", help="kinds, separated by commas")
    parser.add_argument("--match", default="", help="only jobs in whose name this regular expression is found")
    parser.add_argument("--peer-seconds", type=float, default=4.0, help="for an operation of another library, which may compile; 4")
    parser.add_argument("--cpu", action="store_true", help="exercise the code without a GPU")
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    parser.add_argument("--explain", metavar="NAME", help="a plan of specs/ or memory.yaml")
    parser.add_argument("--fault", action="append", default=[], metavar="JOB=KIND", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    kinds = ("checks", "times", "train", "memory", "tune")
    if unknown := set(given.only.split(",")) - {*kinds, "facts"}:
        parser.error(f"--only {', '.join(sorted(unknown))}: choose among {', '.join(kinds)}")
    given.out = given.out or given.resume or OUT
    if (given.out / "results.jsonl").exists() and given.resume is None and not (given.list or given.explain):
        parser.error(f"{given.out} has results; --resume {given.out} adds what is missing, --out names another folder")
    return given


def has_gpu() -> bool:
    """Asked in a fork: a process that has asked CUDA anything can not be forked any more."""
    import torch  # noqa: PLC0415

    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if torch.cuda.is_available() else 1)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def main(words: Sequence[str] | None = None) -> int:
    """Run what is missing while there is time."""
    began = time.monotonic()
    given = arguments_of(words)
    if not given.cpu and not given.list and not has_gpu():
        sys.stderr.write("no GPU here; nothing was run and nothing written\n")
        return 2
    if given.cpu:  # before triton is imported
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    if given.explain:
        from gpu.explain import explain  # noqa: PLC0415

        return explain(given.explain)
    from gpu.faults import broken  # noqa: PLC0415
    from gpu.jobs import jobs  # noqa: PLC0415
    from gpu.results import Results, lines_of, statuses  # noqa: PLC0415

    known = statuses(lines_of([given.resume])) if given.resume else {}
    found = chosen(jobs("cpu" if given.cpu else "cuda", seconds={"peer": given.peer_seconds}), given.only.split(","), given.match, known)
    faults = dict(text.rsplit("=", 1) for text in given.fault)
    found = [broken(job, faults[job.id]) if job.id in faults else job for job in found]
    if given.list:
        print("\n".join(f"{job.id:60} {job.lane:7} {job.seconds:4.0f} s" for job in found))
        return 0
    results = Results(given.out)
    results.add(header(given))
    run = Run(results, given.out / "logs", given.seconds - (time.monotonic() - began), os.cpu_count() or 1)
    run.run(found)
    counts = {status: list(run.statuses.values()).count(status) for status in dict.fromkeys(run.statuses.values())}
    if "tune" in given.only.split(",") and {**known, **run.statuses}.get("facts/device") == "done":
        from gpu.tuned import FOLDER, write  # noqa: PLC0415

        written = [write([given.out], folder) for folder in (given.out / "tuned", *(() if given.cpu else (FOLDER,)))]
        print(f"launch options: {', '.join(map(str, written))}")
    print(f"{', '.join(f'{count} {status}' for status, count in counts.items()) or 'nothing was missing'}; {given.out}")
    return 0 if set(run.statuses.values()) <= {"done"} else 1


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)


if __name__ == "__main__":
    sys.exit(main())
