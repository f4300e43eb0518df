"""Break megaplan in one place at a time and see which tests notice.

make mutants [SAMPLE=100] [SEED=0] [WRITE=1], or python scripts/mutants.py --sample 100 --seed 0 [--write] [--only TEXT] [--seconds 60]

Draws SAMPLE one-operator changes of `src/megaplan` (without `cli` and `diagnostics`) and applies each to a copy of the tree, never to the
checkout. The lines that every test runs are recorded once for a state of the tree, so a mutant meets the tests that run its line: the
fastest first, in one process, until one fails. What the planner's and the oracle's tests leave alive meets the plans that CI traces, if
they run its line, and last the planner's tests that start processes, whose lines are not seen. A test that does not run a line cannot
detect its change, so a mutant that gets through has met the whole suite.

Outcomes are kept in runs/mutants: a mutant that was killed stays killed as long as its module is the same, so a run that was stopped goes
on, and after a new test only the survivors are met again (`--again`: all). `--seconds` leaves out tests that together take longer, by the
recorded times: what gets through is then said not to have met them.

A mutant past its time-out (ten times what its tests take, and a minute) counts as killed, and is said to be. `--write` puts seed, sample
and survivors into benchmarks/results/mutants.md; why a survivor changes nothing is kept in scripts/mutation/equivalent.yaml.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "scripts/mutation"
sys.path.insert(0, str(TOOLS))

from operators import Mutant, all_mutants  # noqa: E402

PAGE, REVIEWED, RUNS = ROOT / "benchmarks/results/mutants.md", TOOLS / "equivalent.yaml", ROOT / "runs/mutants"
LEFT_OUT = ("cli", "diagnostics")
SUITES = {"planner": "tests/megaplan", "oracle": "tests/oracle", "traces": "tests/megarun/trace/test_matrix.py"}
STARTING = tuple(f"tests/megaplan/{name}.py" for name in ("spec/test_imports", "cli/test_exit_status", "cli/test_startup"))
"""Tests whose work is done in other processes."""
PRELOADED = (
    "hypothesis",
    "numpy",
    "pydantic",
    "pytest",
    "rich",
    "torch",
    "typer",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
)
FAST_TESTS = 60
"""Number of a line's fastest tests that run before all others: collecting few files takes little time."""
MOST_BYTES = 6 << 30
"""Memory limit of a process with a mutant: one that never stops growing ends before the machine does."""
KILLED, TIMED_OUT, SURVIVED = "killed", "killed by time-out", "survived"


@dataclass(frozen=True)
class Coverage:
    """Coverage of lines by tests: (node id, seconds) of tests, and for each module's lines the indices of tests."""

    tests: list[tuple[str, float]]
    lines: dict[str, dict[int, list[int]]]

    def of(self, mutant: Mutant) -> list[int]:
        """Tests of a mutant's line, of its package first, then the fastest; all tests where the line runs on import.

        What a wider fixture runs is counted to the first test that asks for it, so of files that have such fixtures all tests count.
        """
        lines = self.lines.get(mutant.path, {})
        found = {test for line in {mutant.line, mutant.statement} for test in lines.get(line, ())}
        if mutant.on_import or not found:
            found = set(range(len(self.tests)))
        package = "/".join(("tests", *Path(mutant.path).parts[1:3]))
        files = set(filter(_shares_work, {self.tests[test][0].partition("::")[0] for test in found}))
        sharing = {index for index, (name, _) in enumerate(self.tests) if name.partition("::")[0] in files} - found
        order = sorted(found, key=lambda test: (not self.tests[test][0].startswith(package), self.tests[test][1]))
        return [*order, *sorted(sharing, key=lambda test: self.tests[test][1])]


@cache
def _shares_work(test_file: str) -> bool:
    """True if fixtures of a test file, or of its folder, live longer than a test."""
    file = ROOT / test_file
    return any('scope="' in path.read_text() for path in (file, file.parent / "conftest.py") if path.exists())


@dataclass(frozen=True)
class Outcome:
    """Result of a mutant, and the test that detected it, or the number of tests that did not."""

    mutant: Mutant
    before: str
    after: str
    verdict: str
    by: str
    seconds: float

    @property
    def key(self) -> str:
        """Key of the mutant in the list of reviewed mutants, independent of its line number."""
        return f"{self.mutant.path}: {self.before} → {self.after}"


class _Known:
    """Killed mutants of earlier runs, by what is changed in which text of a module."""

    def __init__(self, outcomes: dict[str, list[str]] | None) -> None:
        self._file = RUNS / "killed.json"
        read = outcomes is None and self._file.exists()
        self._outcomes: dict[str, list[str]] = json.loads(self._file.read_text()) if read else outcomes or {}

    def of(self, mutant: Mutant, source: bytes) -> tuple[str, str] | None:
        """Reason why the mutant was killed."""
        found = self._outcomes.get(self._key(mutant, source))
        return None if found is None else (found[0], found[1])

    def keep(self, mutant: Mutant, source: bytes, verdict: str, by: str) -> None:
        """Record a killed mutant for the next run."""
        if verdict != SURVIVED:
            self._outcomes[self._key(mutant, source)] = [verdict, by]
            self._file.write_text(json.dumps(self._outcomes, indent=0))

    def _key(self, mutant: Mutant, source: bytes) -> str:
        return f"{mutant.path} {hashlib.sha256(source).hexdigest()[:16]} {mutant.start} {mutant.stop} {mutant.text}"


def main() -> int:
    """Draw, run, print each as it is known; 1 if less than nine of ten are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT", help="Of the sample, those whose place or change contains this.")
    parser.add_argument("--again", action="store_true", help="Also those that were killed before.")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="Of tests that a mutant meets, by recorded times.")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    files = _modules()
    mutants = all_mutants(files.items())
    drawn = random.Random(chosen.seed).sample(mutants, min(chosen.sample, len(mutants)))
    tree = Path(tempfile.mkdtemp(prefix="megaplan-mutants-"))
    try:
        _copy(tree)
        coverage = _coverage(tree)
        for module in PRELOADED:
            __import__(module)
        outcomes, known = [], _Known({} if chosen.again else None)
        for number, mutant in enumerate(drawn, start=1):
            before, after = mutant.line_texts(files[mutant.path])
            place = f"{mutant.path}:{mutant.line}"
            if chosen.only not in f"{place} {before} {after}":
                continue
            began = time.monotonic()
            verdict, by = known.of(mutant, files[mutant.path]) or _meet(tree, coverage, mutant, files[mutant.path], chosen.seconds)
            known.keep(mutant, files[mutant.path], verdict, by)
            outcomes.append(Outcome(mutant, before, after, verdict, by, time.monotonic() - began))
            print(
                f"{number:3} {verdict} ({outcomes[-1].seconds:.0f} s) {place}  {mutant.what}\n      {before}\n      {after}\n      {by}",
                flush=True,
            )
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    killed = sum(outcome.verdict != SURVIVED for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} killed; seed {chosen.seed}, {len(mutants):,} possible changes")
    if chosen.write:
        PAGE.write_text(_page(outcomes, chosen.seed, len(mutants), chosen.seconds))
    return 0 if killed * 10 >= len(outcomes) * 9 else 1


def _modules() -> dict[str, bytes]:
    package = ROOT / "src/megaplan"
    paths = [path for path in sorted(package.rglob("*.py")) if path.relative_to(package).parts[0] not in LEFT_OUT]
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in paths}


def _copy(tree: Path) -> None:
    """The files of the current checkout that git tracks, and its environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    if (ROOT / ".venv").exists():
        (tree / ".venv").symlink_to((ROOT / ".venv").resolve())


def _environment(tree: Path, **more: str) -> dict[str, str]:
    paths = [str(tree / "src"), str(tree / "kernels"), str(TOOLS), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def _coverage(tree: Path) -> Coverage:
    """Recorded again whenever a file of the sources or tests has changed."""
    files = [path for folder in ("src", "kernels", "tests") for path in sorted((tree / folder).rglob("*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    RUNS.mkdir(parents=True, exist_ok=True)
    tests: list[tuple[str, float]] = []
    lines: dict[str, dict[int, list[int]]] = {}
    for name, suite in SUITES.items():
        kept = RUNS / f"{digest}-{name}.json"
        if not kept.exists():
            print(f"recording which lines {suite} runs", flush=True)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "tests_of_lines", "-p", "no:cacheprovider", "-m", "not slow", suite]
            subprocess.run(command, cwd=tree, env=_environment(tree, MUTATION_RECORD=str(kept)), check=True)
        found, first = json.loads(kept.read_text()), len(tests)
        tests += [(test, seconds) for test, seconds in found["tests"]]
        for path, of_lines in found["lines"].items():
            known = lines.setdefault(path, {})
            for line, indices in of_lines.items():
                known[int(line)] = [*known.get(int(line), []), *(first + index for index in indices)]
    return Coverage(tests, lines)


def _meet(tree: Path, coverage: Coverage, mutant: Mutant, source: bytes, most_seconds: float) -> tuple[str, str]:
    """Run the mutant's tests until one fails."""
    place = tree / mutant.path
    tests = [coverage.tests[index] for index in coverage.of(mutant)]
    planner = [test for test in tests if not test[0].startswith("tests/megarun")]
    starting = [test for test in coverage.tests if test[0].startswith(STARTING) and test not in planner]
    rounds = (planner[:FAST_TESTS], planner[FAST_TESTS:], [test for test in tests if test not in planner], starting)
    spent, met, left_out = 0.0, 0, 0
    place.write_bytes(mutant.applied(source))
    try:
        for each in rounds:
            chosen = []
            for test in each:
                if spent + test[1] <= most_seconds:
                    chosen.append(test)
                    spent += test[1]
            met, left_out = met + len(chosen), left_out + len(each) - len(chosen)
            if chosen and (verdict := _run(tree, [name for name, _ in chosen], 60 + 10 * sum(seconds for _, seconds in chosen))):
                return verdict
        return SURVIVED, f"by {met} tests" + (f"; {left_out} slow ones were left out" if left_out else "")
    finally:
        place.write_bytes(source)


def _run(tree: Path, tests: Sequence[str], limit_seconds: float) -> tuple[str, str] | None:
    """Failure that these tests report in a new process, which has the libraries loaded and nothing of megaplan; None if all pass."""
    log, selected = tree / "mutant.log", tree / "mutant.tests"
    selected.write_text("\n".join(tests))
    process = os.fork()
    if process == 0:
        _child(tree, tests, log, selected)
    until = time.monotonic() + limit_seconds
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > until:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return TIMED_OUT, f"{limit_seconds:.0f} s"
        time.sleep(0.02)
    if os.waitstatus_to_exitcode(status) == 0:
        return None
    failures = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR", "E   "))]
    detected = [line for line in failures if line.startswith(("FAILED", "ERROR"))] or failures or ["the process crashed"]
    return KILLED, detected[0].partition(" - ")[0]


def _child(tree: Path, tests: Sequence[str], log: Path, selected: Path) -> None:
    """Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(tree)
        os.environ.update(_environment(tree, MUTATION_SELECT=str(selected)))
        sys.path[:0] = [str(tree / "src"), str(tree / "kernels")]
        sys.dont_write_bytecode = True
        import pytest  # noqa: PLC0415

        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        quiet = ["-q", "-x", "-p", "tests_of_lines", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=line", "--hypothesis-seed=0"]
        code = int(pytest.main([*quiet, "-m", "not slow", *files]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _page(outcomes: Sequence[Outcome], seed: int, possible: int, most_seconds: float) -> str:
    reasons: dict[str, str] = yaml.safe_load(REVIEWED.read_text()) or {} if REVIEWED.exists() else {}
    survivors = [outcome for outcome in outcomes if outcome.verdict == SURVIVED]
    slow = [outcome for outcome in outcomes if outcome.verdict == TIMED_OUT]
    lines = [
        "# Mutants",
        "",
        f"Written by `make mutants SAMPLE={len(outcomes)} SEED={seed} WRITE=1`: one-operator changes of `src/megaplan` without `cli` and",
        f"`diagnostics`, drawn from {possible:,}; each meets the tests that run its line, the CI subset of traces among them"
        + (f", up to {most_seconds:g} recorded seconds of them." if most_seconds < float("inf") else ", all of them."),
        "",
        f"**{len(outcomes) - len(survivors)} of {len(outcomes)} killed**" + (f", {len(slow)} of them by time-out." if slow else "."),
        "",
        "## Survivors" if survivors else "No survivors.",
        "",
    ]
    for outcome in survivors:
        reason = reasons.get(outcome.key)
        lines += [
            f"- `{outcome.mutant.path}:{outcome.mutant.line}`, {outcome.mutant.what}",
            "",
            f"      {outcome.before}",
            f"      {outcome.after}",
            "",
        ]
        lines += [f"  Equivalent: {reason}" if reason else f"  Open: survived {outcome.by}.", ""]
    lines += ["## Killed", "", "| Place | Change | By |", "|---|---|---|"]
    for outcome in outcomes:
        if outcome.verdict != SURVIVED:
            detected = outcome.by.removeprefix("FAILED ").replace("|", "\\|") if outcome.verdict == KILLED else f"time-out, {outcome.by}"
            lines.append(
                f"| {outcome.mutant.path.removeprefix('src/megaplan/')}:{outcome.mutant.line} | {outcome.mutant.what} | {detected} |"
            )
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
