"""The GPU benchmark's lines as tables, as a file of results and as pending jobs; kernels by their part of the step."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from gpu import page, pending, tables
from gpu.groups import GROUPS, REST, group_of, grouped, part_of_group, part_of_operation
from gpu.results import Results, lines_of

pytestmark = pytest.mark.runtime
ROOT = Path(__file__).parents[3]
FIRST_RUN = json.loads((ROOT / "benchmarks/results/h200-2026-11-26.json").read_text())
MEASURED = {
    "nam56r": {
        **{
            "Mamba-3 scan": 379.5,
            "GEMM fwd/recompute": 163.0,
            "GEMM dgrad, Muon's products": 101.0,
            "GEMM wgrad": 98.4,
            "Muon symmetric": 91.7,
        },
        **{"m2rnn bwd": 83.3, "Muon GEMM (baddbmm)": 61.7, "indexed attention": 47.7, "DtoD copies": 36.6, "norms": 17.4, "other": 12.8},
    },
    "llama-16l-fp8": {"GEMM fp8": 242.7, "attn bwd dk,dv": 115.7, "fp8 quantise": 77.3, "AdamW": 37.0, "attn fwd (cuDNN)": 29.0},
    "mamba2-1b": {"SSD scan": 93.3, "causal conv": 24.1, "norms": 23.4, "cat": 10.2, "other": 3.8},
    "hybrid-1b": {"m2rnn bwd": 45.2, "MoE wgrad (outer)": 17.6, "Muon GEMM (baddbmm)": 14.7, "copies with stride / cast to bf16": 5.2},
}
"""Milliseconds of some parts of the first run, as they were read from its profiles by hand."""


@pytest.mark.parametrize("name", MEASURED)
def test_kernels_of_the_first_run_fall_into_the_parts_that_were_read_from_it(name: str) -> None:
    gpu = next(run["gpu"] for run in FIRST_RUN["runs"] if run["run"] == name and "gpu" in run)
    found = grouped([(kernel, launches, ms) for kernel, launches, ms in gpu["by_kernel"]])
    assert found.keys() <= set(GROUPS)
    assert {part: round(found[part][1], 1) for part in MEASURED[name]} == MEASURED[name]
    assert sum(launches for launches, _ in found.values()) <= gpu["kernels"]  # the record has the longest alone
    assert found["other"][1] < 0.02 * gpu["sum_ms"]


def test_an_operation_says_more_than_a_name() -> None:
    product = "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NNT"
    assert (group_of(product), group_of(product, "aten::mm")) == ("GEMM dgrad, Muon's products", "GEMM dgrad, Muon's products")
    assert group_of(product, "aten::baddbmm") == "Muon GEMM (baddbmm)"
    assert group_of("a_kernel_nobody_knows") == "other"


def test_measured_and_counted_operations_meet_in_the_same_parts() -> None:
    assert part_of_group("m2rnn bwd") == part_of_operation("megakernels.m2rnn_backward") == "m2rnn"
    assert part_of_group("GEMM wgrad") == part_of_operation("aten.mm") == "matrix products"
    assert part_of_group("norms") == part_of_operation("megakernels.gated_rms_norm_backward") == "norms"
    assert part_of_group("AdamW") == part_of_operation("aten._fused_adamw_") == REST
    assert part_of_operation("aten._foreach_norm") == REST


def phases(allocated: int, reserved: int) -> dict[str, dict[str, int]]:
    return {"init": {"allocated": 1, "reserved": 2}, "optimizer": {"allocated": allocated, "reserved": reserved}}


RUN = {"run": "nam56r", "compiled": False, "expandable_segments": True, "step_s": 1.5, "tok_s": 1e4, "tflops": 190.0, "mfu": 0.2}
RUN |= {"phases": phases(80 * 2**30, 100 * 2**30), "estimate": phases(81 * 2**30, 90 * 2**30)}
CHECK = {"case": "rope 32x128", "dtype": "bfloat16", "bitwise": True, "finite": True, "seconds": 1.0}
FOUND: list[dict[str, Any]] = [
    {"call": "2027-01-01T00:00:00+00:00", "commit": "12345678", "dry": False},
    {"job": "facts/device", "kind": "facts", "device": "NVIDIA H200", "copy_gb_s": 4000.0, "matmul_bf16_8192_tflop_s": 800.0},
    {"job": "checks/case rope 32x128", "kind": "checks", **CHECK, "num_tokens": 300, "error": 2e-3, "right": True},
    {"job": "checks/case rope 32x128", "kind": "checks", **CHECK, "num_tokens": 1, "error": "nan", "right": False, "finite": False},
    {"job": "checks/case rope 32x128", "kind": "checks", "status": "done"},
    {
        "job": "checks/file check_rope",
        "kind": "checks",
        "test": "check_rope.py::test_values",
        "outcome": "failed",
        "failure": "assert a | b",
    },
    {"job": "times/rope 32x128", "kind": "times", "case": "rope 32x128", "kernels": "triton", "part": "wall", "bound": "copy"}
    | {"wall_ns": 900_000, "forward_bytes": 400_000_000, "backward_bytes": 400_000_000, "forward_flops": 0, "backward_flops": 0},
    {"job": "times/rope 32x128", "kind": "times", "case": "rope 32x128", "kernels": "triton", "part": "kernels"}
    | {"forward_ns": 200_000, "backward_ns": 125_000},
    {"job": "train/nam56r eager", "kind": "train", **RUN},
    {"job": "train/nam56r eager", "kind": "train", "run": "nam56r"}
    | {"gpu": {"kernels": 5, "busy_ms": 1490.0, "by_group": [["m2rnn bwd", 3, 80.0], ["GEMM wgrad", 2, 98.0]]}},
    {"job": "memory/dense default", "kind": "memory", **RUN, "run": "dense", "expandable_segments": False},
    {"job": "train/nam56r compiled", "kind": "train", "status": "killed", "failure": "signal SIGSEGV"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    results = Results(tmp_path)
    for line in FOUND:
        results.add(line)
    return tmp_path


def test_tables_show_what_was_found_and_what_was_not(folder: Path) -> None:
    assert page.main([str(folder)]) == 0
    text = (folder / "page.md").read_text()
    assert "| rope 32x128 | 2 | 2.0e-03 | 1 bfloat16: error nan, not finite |" in text
    assert "`check_rope.py::test_values`: assert a \\| b" in text
    assert "| rope 32x128 | triton | 200 | 125 | 900 | 50% | 80% |" in text
    assert "| nam56r eager | 1,500 | 10,000 | 20.0% | 80.00 | +1.25% |" in text
    assert "| dense | default | 80.00 | +1.25% | 100.00 | -10.00% |" in text
    assert "| train/nam56r compiled | killed | signal SIGSEGV |" in text
    counted = "\n".join(tables.train_tables(FOUND[1:], {"nam56r": {"m2rnn": 24.0, "MoE": 56.0}}))
    assert "| m2rnn | 80.0 | 24.0 |" in counted
    assert "| MoE | 0.0 | 56.0 |" in counted


def test_a_file_of_results_has_the_form_of_the_first_run(folder: Path) -> None:
    assert page.main([str(folder), "--results", str(folder / "found.json")]) == 0
    found = json.loads((folder / "found.json").read_text())
    assert {"device", "date", "commit", "runs", "kernel_times", "checks_at_300_tokens"} <= found.keys() & FIRST_RUN.keys()
    assert ([run["run"] for run in found["runs"]], [run["run"] for run in found["memory"]]) == (["nam56r"], ["dense"])
    assert found["runs"][0]["gpu"]["kernels"] == 5
    assert {"case", "kernels", "forward_ns", "backward_ns", "wall_ns", "forward_of_copy"} <= found["kernel_times"][0].keys()
    assert found["checks_at_300_tokens"] == [{"case": "rope 32x128", "error300": 2e-3, "bitwise": True, "finite": True}]


def test_a_dry_run_is_not_a_measurement(tmp_path: Path) -> None:
    Results(tmp_path).add(FOUND[0] | {"dry": True})
    assert page.main([str(tmp_path), "--results", str(tmp_path / "found.json")]) == 1
    assert not (tmp_path / "found.json").exists()
    assert page.is_dry(list(lines_of([tmp_path])))


def test_pending_lines_are_those_with_a_job_that_is_not_done() -> None:
    names = ["checks/case a", "checks/case b", "train/x eager", "times/a", "times/a by fla"]
    text = "\n".join(pending.page(names, {"checks/case a": "done", "train/x eager": "done", "times/a": "failed"}))
    assert "`make gpu ONLY=checks` | 1 of 2 |" in text
    assert "A step of NAM56R whole" not in text
    assert text.count("| 1 of 1 |") == 2  # the operation's time and its peer's
    assert text.count("| two GPUs |") == 2


def test_the_committed_page_of_what_is_left_is_the_generated_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page, "PENDING", tmp_path / "pending.md")
    monkeypatch.setattr("gpu.peers.importlib.util.find_spec", lambda name: object() if name == "torch" else None)
    assert page.main(["--pending"]) == 0
    assert (tmp_path / "pending.md").read_text() == (ROOT / "benchmarks/pending.md").read_text()


def test_every_job_but_the_devices_facts_settles_a_line() -> None:
    from gpu.jobs import jobs  # noqa: PLC0415

    for job in jobs("cuda"):
        assert job.kind == "facts" or any(line.jobs and pending.re.search(line.jobs, job.id) for line in pending.LINES), job.id
        assert 0 < job.least <= job.seconds
        assert job.gib > 0
