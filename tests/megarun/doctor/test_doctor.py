"""`megarun doctor`: its findings on a machine with and without GPUs and on a plan, and its exit status; `--version`."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakernels._common.hazards import hazards_of
from megaplan.plan.make import make_plan, write_plan
from megaplan.spec.models import Spec
from megaplan.terminal.versions import installed
from megarun.cli.main import run
from megarun.doctor import machine, plan
from megarun.doctor.findings import State

pytestmark = pytest.mark.runtime
GIB = 1 << 30


@pytest.fixture
def plan_file(tmp_path: Path, spec_with: Any) -> Callable[..., str]:
    def write(**changed: Any) -> str:
        path = tmp_path / "plan.json"
        write_plan(make_plan(Spec.model_validate(spec_with(changed))), path)
        return str(path)

    return write


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with GPUs: how many, free bytes of each, capability."""

    def put(count: int, free: int, capability: tuple[int, int] = (9, 0)) -> None:
        major, minor = capability
        properties = SimpleNamespace(name="NVIDIA H200", major=major, minor=minor, multi_processor_count=132)
        values = {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "mem_get_info": lambda _: (free, 140 * GIB),
            "get_device_properties": lambda _: properties,
            "get_device_capability": lambda _: capability,
        }
        for name, value in values.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(machine, "_driver", lambda _: "CUDA 13.0")
        monkeypatch.setattr(plan, "look_up", lambda *_: (3, 5))

    return put


def examined(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, dict[str, Any]]:
    """The findings of `--json` by name."""
    assert run(["doctor", *words, "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == "megarun.doctor/1"
    for state, count in document["counts"].items():
        assert sum(each["state"] == state for each in document["findings"]) == count
    assert all(bool(each["advice"]) == (each["state"] != State.OK) for each in document["findings"])
    return {each["name"]: each for each in document["findings"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_machine_without_a_gpu_has_no_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = examined(capsys, "--out", str(tmp_path / "runs" / "new"))
    assert found["CUDA"]["state"] == State.WARNING
    assert "no GPU" in found["CUDA"]["text"]
    assert found["torch"]["values"]["version"] == torch.__version__
    assert found["allocator"]["values"].keys() == {"expandable_segments", "source", "raw"}
    assert found["out"]["state"] == State.OK
    assert not (tmp_path / "runs").exists()
    assert run(["doctor"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^  warning  CUDA: no GPU .*\n           → ", said, re.MULTILINE)
    assert said.splitlines()[-1].startswith("0 problems, ")


def test_known_hazards_of_the_installed_compiler_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    number = installed("triton")
    if number is None:
        pytest.skip("no triton")
    assert run(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"triton: {number}, " in said
    assert [each.name for each in hazards_of("triton", number) if each.name not in said] == []


def test_a_folder_that_cannot_be_written_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    found = examined(capsys, "--out", "/proc/runs", status=1)
    assert found["out"]["state"] == State.PROBLEM
    assert "/proc/runs" in found["out"]["text"]


def test_gpus_are_listed_and_what_others_hold_is_a_warning(capsys: pytest.CaptureFixture[str], gpus: Callable[..., None]) -> None:
    gpus(2, 139 * GIB)
    found = examined(capsys)
    assert "CUDA" not in found
    assert found["GPU 1"]["text"] == "NVIDIA H200, sm_90, 139.00 GiB of 140.00 GiB free"
    assert found["GPU 1"]["state"] == State.OK
    gpus(1, 90 * GIB)
    found = examined(capsys)
    assert found["GPU 0"]["state"] == State.WARNING
    assert "GPU 1" not in found


def test_little_shared_memory_is_a_warning(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = machine.shutil.disk_usage
    small = SimpleNamespace(total=64 << 20, used=0, free=64 << 20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: small if str(path) == "/dev/shm" else usage(path))
    found = examined(capsys)
    if "/dev/shm" in found:
        assert found["/dev/shm"]["state"] == State.WARNING
        assert "--shm-size" in found["/dev/shm"]["advice"]


@pytest.mark.parametrize(
    ("count", "free", "capability", "state", "said"),
    [
        (2, 139 * GIB, (9, 0), State.OK, "2 ranks"),
        (1, 139 * GIB, (9, 0), State.PROBLEM, "this machine has 1 GPUs"),
        (2, 1 << 10, (9, 0), State.PROBLEM, "1.00 KiB are free here"),
        (2, 139 * GIB, (10, 0), State.WARNING, "this GPU is sm_100"),
    ],
)
def test_a_plan_is_held_against_the_gpus(
    count: int,
    free: int,
    capability: tuple[int, int],
    state: State,
    said: str,
    capsys: pytest.CaptureFixture[str],
    gpus: Callable[..., None],
    plan_file: Callable[..., str],
) -> None:
    gpus(count, free, capability)
    found = examined(capsys, plan_file(**{"mesh.dp_shard": 2, "host.kernels": "triton"}), status=int(state is State.PROBLEM))
    assert found["small"]["state"] == state
    assert said in found["small"]["text"]
    if installed("triton") is not None:
        assert found["compiled kernels"]["text"] == "2 of 5 are not in the cache"
        assert "megarun compile" in found["compiled kernels"]["advice"]


def test_a_plan_of_plain_torch_needs_no_kernels(capsys: pytest.CaptureFixture[str], plan_file: Callable[..., str]) -> None:
    assert run(["doctor", plan_file()]) == 0
    assert "compiled kernels: the plan runs plain torch" in capsys.readouterr().out


def test_a_plan_that_cannot_be_read_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["doctor", str(tmp_path / "none.json")]) == 2
    assert "error[MP" in capsys.readouterr().err
    assert run(["doctor", str(tmp_path / "none.json"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["format"] == "megaplan.error/1"


def test_the_version_names_what_a_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"megarun \d+\.\d+\.\d+( \(commit \w+\+?\))?", said[0])
    assert f"torch {installed('torch')}" in said
    assert any(line.startswith("triton ") for line in said)


def test_state_in_host_memory_fits_into_it(plan_file: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = plan_file(**{"host.optimizer_offload": 1.0})
    monkeypatch.setattr(plan, "host_amounts", lambda: {"MemAvailable": GIB})
    needed = examined(capsys, path)["host memory"]["values"]["needed_bytes"]
    assert 0 < needed < GIB
    monkeypatch.setattr(plan, "host_amounts", lambda: {"MemAvailable": needed - 1})
    assert examined(capsys, path, status=1)["host memory"]["state"] == State.PROBLEM
    assert "host memory" not in examined(capsys, plan_file())
