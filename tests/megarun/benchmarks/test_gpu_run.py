"""The GPU benchmark's command without a GPU: jobs that fail in every way stop no other, and a second call runs what is missing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from gpu import run as command
from gpu.faults import FAULTS
from gpu.results import Results, lines_of, of_done_jobs, statuses
from gpu.worker import Job, finite

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[3]
ENDS = {"exception": "failed", "timeout": "timeout", "segfault": "killed", "sigkill": "killed", "garbage": "garbage"}
"""Ends of each fault."""
CASES = ("relu2 96", "rope 4x16", "gated_add 96", "swiglu 96", "rms_norm 96")
CALLS = (
    *[f"checks/case {name}" for name in CASES],
    *[f"times/{name}" for name in CASES],
    *[f"train/tiny-hybrid{name}" for name in (" eager", " default-allocator", " 4-microbatches", "-selective eager", " compiled")],
    *[f"memory/tiny-{name} {allocator}" for name in ("hybrid", "ngram") for allocator in ("default", "expandable")],
    "memory/tiny-hybrid-selective default",
)
"""Five jobs of each kind, one for each fault."""
TUNE = ("tune/candidate 2 of attention 4/1 32/32", "tune/attention 4/1 32/32")
GOOD = (
    *("checks/case cross_entropy 200", "times/cross_entropy 200", "train/tiny-ngram eager", "memory/tiny-hybrid-selective expandable"),
    *TUNE,
)
"""And one of each kind without."""


def call(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(ROOT / "benchmarks/gpu/run.py"), "--cpu", *options]
    return subprocess.run([*words, "--out", str(out)], capture_output=True, text=True, env=environment, check=False)


def exactly(*names: str) -> str:
    return f"^({'|'.join(name for name in names)})$"


def started(lines: list[dict[str, Any]]) -> list[str]:
    return [line["job"] for line in lines if line.get("status") == "started"]


@pytest.mark.jobs
def test_every_failure_of_every_kind_leaves_every_other_line_and_a_second_call_runs_what_is_missing(tmp_path: Path) -> None:
    faults = [f"{name}={fault}" for index in range(0, len(CALLS), 5) for name, fault in zip(CALLS[index : index + 5], FAULTS, strict=True)]
    options = [word for fault in faults for word in ("--fault", fault)]
    first = call(
        tmp_path,
        "--only",
        "checks,times,train,memory,tune",
        "--seconds",
        "400",
        "--match",
        exactly("facts/device", *CALLS, *GOOD),
        *options,
    )
    assert first.returncode == 1, first.stderr
    lines = list(lines_of([tmp_path]))
    found = statuses(lines)
    ended = {name: ENDS[fault] for name, fault in (each.split("=") for each in faults)}
    assert found == {"facts/device": "done", **dict.fromkeys(GOOD, "done"), **ended}
    measured = of_done_jobs(lines)
    assert {line["job"] for line in measured} == {"facts/device", *CALLS, *GOOD}  # a failing job's first line is there too
    assert sum(line.get("before") == "the failure" for line in measured) == len(CALLS)
    assert {line["num_tokens"] for line in measured if line["job"] == GOOD[0]} == {1, 3, 17}
    trained = next(line for line in measured if line["job"] == GOOD[2] and "losses" in line)
    assert len(trained["losses"]) == 2
    assert trained["mfu"] is None  # nothing is measured
    tried = [line for line in measured if line["job"] in TUNE]
    assert all(row["right"] and row["bitwise"] for line in tried for row in line.get("others", [line]))
    assert {line["kernel"] for line in tried if "kernel" in line} == {"attention_key_kernel", "attention_query_kernel"}
    written = json.loads((tmp_path / "tuned/cpu.json").read_text())
    assert (written["device"], written["kernels"]) == ("cpu", [])  # no candidate was faster: nothing is measured

    again = [f"checks/case {name}" for name in CASES[:2]] + [f"times/{name}" for name in CASES[:2]] + [CALLS[15], GOOD[0], GOOD[1]]
    late = "checks/case gated_rms_norm 96/3"
    second = call(tmp_path, "--resume", str(tmp_path), "--seconds", "400", "--match", exactly("facts/device", late, *again))
    assert second.returncode == 0, second.stdout + second.stderr
    added = list(lines_of([tmp_path]))[len(lines) :]
    assert started(added)[0] == late  # jobs that were never started come first
    assert sorted(started(added)) == sorted({late, *again} - {*GOOD, "facts/device"})
    assert not [line for line in of_done_jobs(lines_of([tmp_path])) if line["job"] == again[0] and "before" in line]


@pytest.mark.slow
def test_every_job_runs_without_a_gpu(tmp_path: Path) -> None:
    done = call(tmp_path, "--seconds", "3000")
    found = statuses(lines_of([tmp_path]))
    assert {name for name, status in found.items() if status != "done"} == {name for name in found if " by torch " in name}, done.stdout
    assert {line["outcome"] for line in lines_of([tmp_path]) if "test" in line} == {"passed"}
    assert all(line["right"] for line in lines_of([tmp_path]) if "right" in line)


def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, str(ROOT / "benchmarks/gpu/run.py"), "--out", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "out").exists()


def test_results_are_not_mixed_by_accident(tmp_path: Path) -> None:
    Results(tmp_path).add({"job": "checks/a", "status": "done"})
    with pytest.raises(SystemExit):
        command.arguments_of(["--out", str(tmp_path)])
    assert command.arguments_of(["--resume", str(tmp_path)]).out == tmp_path
    with pytest.raises(SystemExit):
        command.arguments_of(["--only", "nothing"])


def test_a_line_that_was_cut_off_harms_no_other(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"job": "checks/a", "status": "done"}\n{"job": "checks/b", "sta')
    Results(tmp_path).add({"job": "checks/c", "status": "done"})
    assert statuses(lines_of([tmp_path])) == {"checks/a": "done", "checks/c": "done"}


def job(name: str, run: Callable[[Any], None] = lambda emit: emit({"x": 1}), **given: Any) -> Job:
    return Job("checks", name, run, **{"seconds": 30.0, "least": 0.0, "lane": "checks", **given})


def run_jobs(tmp_path: Path, jobs: list[Job], seconds: float = 60.0, cores: int = 4) -> dict[str, str]:
    run = command.Run(Results(tmp_path), tmp_path / "logs", seconds, cores)
    run.run(jobs)
    return run.statuses


def test_what_finds_no_time_is_listed_and_the_shorter_one_runs(tmp_path: Path) -> None:
    found = run_jobs(tmp_path, [job("long", least=1e3), job("short")])
    assert found == {"checks/long": "not run", "checks/short": "done"}
    assert "1000" in next(line["failure"] for line in lines_of([tmp_path]) if line["job"] == "checks/long")


def test_lanes_do_not_mix_and_memory_is_not_shared_out_twice(tmp_path: Path) -> None:
    log = tmp_path / "order"

    def note(name: str) -> Callable[[Any], None]:
        def run(emit: Any) -> None:
            for end in ("begins", "ends"):
                with log.open("a") as file:
                    file.write(f"{name} {end}\n")
                    file.flush()
                if end == "begins":
                    __import__("time").sleep(0.4)
            emit({"x": 1})

        return run

    jobs = [job(name, note(name), gib=50.0) for name in "abc"] + [job("alone", note("alone"), lane="alone")]
    assert set(run_jobs(tmp_path, jobs).values()) == {"done"}
    running, seen = set(), []
    for line in log.read_text().splitlines():
        name, end = line.split()
        running = running | {name} if end == "begins" else running - {name}
        seen.append(frozenset(running))
    assert max(map(len, seen)) == 2  # 100 of 128 GiB
    assert all(each == {"alone"} for each in seen if "alone" in each)


def test_a_job_that_says_nothing_has_failed_and_its_children_end_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def leaves_a_child(emit: Any) -> None:
        pid.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        emit({"x": 1})

    found = run_jobs(tmp_path, [job("silent", lambda _: None), job("parent", leaves_a_child)])
    assert found == {"checks/silent": "failed", "checks/parent": "done"}
    state = Path(f"/proc/{pid.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_numbers_that_json_has_not_are_text() -> None:
    assert json.dumps(finite({"a": [float("nan"), 1.0], "b": float("inf")})) == '{"a": ["nan", 1.0], "b": "inf"}'
